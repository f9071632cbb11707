"""docs/contract.md: what of the contract is supported, refused, or accepted without effect, and the tests that show it.

python -m tests.tinker.contract_page    # `make contract`: runs the tests that claim a row, and writes the page from those that passed
"""

import sys
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.tinker.contract_entries import Entry, entries
from tests.tinker.contract_traffic import REFUSED, TAKEN

DIRECTORY: Final = Path(__file__).parent
PAGE: Final = DIRECTORY.parent.parent / "docs" / "contract.md"
UNTESTED: Final = "**untested**"
_ELSEWHERE: Final = ("slow", "gpu", "web")
"""Tests that `make test` does not run show nothing here."""
_HEAD: Final = """# The contract of the `tinker` SDK, row by row

Written by `make contract` from the tests that passed, not by hand; [tinker.md](tinker.md) and [losses.md](losses.md) explain what is listed here.
Routes, fields and losses are read from the code, so that one without a test fails the suite. A test stands in a row because it sent that field with
something else than its default, or used the route or loss itself, and a running server answered as the row says: a whole one with the shipped model
(`_live`), or the api over a stand-in for the engine, to show what arrives there; `tests/train` and `tests/infer` show what the engine makes of it.

- **supported**: does what the contract says.
- **refused**: answered with an error that names it; beside *supported*, what is refused of it.
- **accepted, no effect**: taken, so that no client need leave it out, and without consequences.

In the fields `*` is any key. Beside these, any JSON body may name its own `type`, which is not read.
"""


class Claim(NamedTuple):
    """That a test shows a row: that it is supported, or what of it is `refused`, or why it is `ignored`."""

    entry: Entry
    test: str
    refused: str | None = None
    ignored: str | None = None

    @property
    def outcome(self) -> str:
        """What becomes of a request that uses it."""
        return TAKEN if self.refused is None else REFUSED

    @property
    def state(self) -> str:
        """In words."""
        if self.refused is not None:
            return f"refused: {self.refused}"
        return "supported" if self.ignored is None else f"accepted, no effect: {self.ignored}"


CLAIMS: Final = pytest.StashKey[list[Claim] | None]()
"""Of all tests of this directory; None in a run of some of them."""


def claims_of(item: Any) -> Iterator[Claim]:
    """What a test claims."""
    if any(item.get_closest_marker(name) for name in _ELSEWHERE):
        return
    for mark in item.iter_markers("contract"):
        place, *fields = mark.args
        for field in fields or [""]:
            yield Claim(Entry(place, field), f"`{item.path.name}::{item.originalname}`", **mark.kwargs)


def page(claims: Iterable[Claim]) -> str:
    """The whole text."""
    shown: dict[Entry, list[Claim]] = defaultdict(list)
    for claim in claims:
        shown[claim.entry].append(claim)
    if unknown := shown.keys() - set(entries()):
        raise ValueError(f"claimed and not in the contract: {', '.join(map(str, unknown))}")
    return "\n".join([_HEAD, *_table("route", shown), "", *_table("loss", shown), ""])


def _table(what: str, shown: dict[Entry, list[Claim]]) -> list[str]:
    lines, last = [f"| {what} | field | state | shown by |", "|---|---|---|---|"], ""
    for entry in entries():
        if ("/" in entry.place) != (what == "route"):
            continue
        states = sorted({claim.state for claim in shown[entry]}, key=lambda state: (state != "supported", state))
        tests = sorted({claim.test for claim in shown[entry]})
        place = "" if entry.place == last else f"`{entry.place.removeprefix('loss ')}`"
        lines.append(f"| {place} | {entry.field and f'`{entry.field}`'} | {'; '.join(states) or UNTESTED} | {', '.join(tests)} |")
        last = entry.place
    return lines


class Passed:
    """What the tests of a run claim that passed."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note them."""
        report = yield
        if call.when == "call" and report.passed:
            self.claims += claims_of(item)
        return report


def main() -> int:
    """Run and write."""
    passed = Passed()
    # What this module imports is imported already when pytest comes to it.
    quietly = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    status = pytest.main([str(DIRECTORY), *quietly, "-m", f"contract and not {' and not '.join(_ELSEWHERE)}"], plugins=[passed])
    PAGE.write_text(page(passed.claims))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
