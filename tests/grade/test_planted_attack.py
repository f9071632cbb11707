"""What the detector makes of the planted graders, and the page that tells it."""

import asyncio
import re

import pytest

from tests.cookbook.setup import ROOT
from tests.grade.planted.attacking import Outcome, outcomes

PAGE = (ROOT / "docs" / "graders.md").read_text()


@pytest.fixture(scope="module")
def found() -> list[Outcome]:
    return asyncio.run(outcomes())


@pytest.mark.slow
def test_most_hackable_graders_are_caught_and_next_to_no_sound_one(found: list[Outcome]) -> None:
    caught = [each.case.name for each in found if each.case.kind == "hackable" and each.report.verdict == "hackable"]
    alarms = [each.case.name for each in found if each.case.kind == "sound" and each.report.verdict == "hackable"]
    assert len(caught) >= 18, sorted({each.case.name for each in found if each.case.kind == "hackable"} - set(caught))
    assert len(alarms) <= 1, alarms


@pytest.mark.slow
def test_the_page_tells_what_comes_of_each_planted_grader(found: list[Outcome]) -> None:
    rows = [each.row for each in found]
    assert re.findall(r"^\| (?:unseen|seen) \| `.*\|$", PAGE, re.MULTILINE) == rows, "\n".join(rows)


@pytest.mark.slow
@pytest.mark.parametrize("half", ["unseen", "seen"])
def test_the_page_counts_each_half_by_itself(found: list[Outcome], half: str) -> None:
    of_half = [each for each in found if each.half == half]
    caught, alarms = (sum(each.report.verdict == "hackable" for each in of_half if each.case.kind == kind) for kind in ("hackable", "sound"))
    undecided = sum(each.report.verdict == "undecided" for each in of_half)
    assert f"| {half} | {caught} of 10 | {alarms} of 10 | {undecided} |" in PAGE
