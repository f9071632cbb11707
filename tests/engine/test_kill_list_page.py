"""The kill list as `docs/rl.md` tells it: every thread that was asked for is in it, and every fault in it is one that a test injects."""

import re
from pathlib import Path
from typing import NamedTuple

from tests.engine.faults import FAULTS
from tests.engine.forward_faults import FORWARD_FAULTS
from tests.engine.test_chains import CHAIN_FAULTS
from tests.engine.test_kill_list import DOCS, LATER
from tests.recipes import test_kill_list_numbers, test_kill_list_tokens
from tests.sync.chain import test_receiver

ROOT = Path(__file__).parents[2]
THREADS = {
    1: "verl#7495",
    2: "SkyRL#1680",
    3: "trl#5312",
    4: "miles#684",
    5: "vllm#32718",
    6: "verl#7987",
    7: "ART#758",
    8: "open-instruct#1627",
    9: "SkyRL#1077",
    10: "trl#4772",
    11: "trl#6789",
    12: "trl#4159",
    13: "slime#1695",
    15: "open-instruct#1473",
    16: "SkyRL#1776",
    17: "RL#2180",
    20: "verl#3720",
    21: "verl#3960",
    22: "verl#6719",
    23: "prime-rl#1334",
    24: "ART#726",
    25: "ms-swift#10012",
}
"""Those that the list was asked to hold, as they were numbered."""


class Row(NamedTuple):
    """Of a table of faults."""

    fault: str
    threads: frozenset[tuple[int, str]]
    caught_by: str


FILES = (
    "tests/engine/test_kill_list*.py tests/recipes/test_kill_list*.py tests/recipes/test_holding.py tests/sync/chain/test_receiver.py "
    "tests/engine/test_chains.py"
)


def rows() -> list[Row]:
    _, section = DOCS.read_text().split("### The kill list")
    met, deltas = section.split("**Weight deltas.**")
    return [Row(fault, threads_of(met_by), caught_by) for fault, _, met_by, caught_by in cells(met)] + of_deltas(deltas)


def of_deltas(section: str) -> list[Row]:
    """Faults that no thread tells of."""
    return [Row(fault, frozenset(), caught_by) for fault, _, caught_by in cells(section)]


def cells(section: str) -> list[list[str]]:
    """Of all rows but those that name columns."""
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in section.splitlines() if re.match(r"\| (?!fault \|)", line)]


def threads_of(met_by: str) -> frozenset[tuple[int, str]]:
    return frozenset((int(number), name) for number, name in re.findall(r"(\d+): ([\w-]+#\d+)", met_by))


def injected() -> dict[str, set[str]]:
    """The threads of every fault that a test injects."""
    several = [*FAULTS, *FORWARD_FAULTS, *test_kill_list_numbers.FAULTS, *test_kill_list_tokens.DRIFTS]
    later = LATER | test_kill_list_numbers.LATER | test_kill_list_tokens.LATER
    found = {fault.name: set(fault.threads) for fault in several} | {name: {thread} for name, thread in later.items()}
    assert not found.keys() & test_receiver.REFUSED.keys(), "a name stands for one fault"
    of_chains = {fault.name for fault in CHAIN_FAULTS}
    assert not of_chains & (found.keys() | test_receiver.REFUSED.keys()), "a name stands for one fault"
    return found | {name: set() for name in test_receiver.REFUSED.keys() | of_chains}


def test_every_thread_that_was_asked_for_is_in_the_list_under_its_number() -> None:
    told = {thread for row in rows() for thread in row.threads}
    assert sorted(set(THREADS.items()) - told) == []
    assert {number for number, _ in told - set(THREADS.items())} <= {48}
    assert len(dict(told)) == len(told), "a number stands for one thread"


def test_the_list_says_whose_threads_they_are_and_which_command_injects_all_of_it() -> None:
    _, section = DOCS.read_text().split("### The kill list")
    owned = {name for _, name in re.findall(r"`([\w-]+)/([\w-]+)`", section.partition("**Weights.**")[0])}
    assert {name.partition("#")[0] for row in rows() for _, name in row.threads} == owned
    assert f"python -m pytest {FILES}`" in section
    run = {path.relative_to(ROOT).as_posix() for pattern in FILES.split() for path in ROOT.glob(pattern)}
    named = set(re.findall(r"`(tests/[\w/]+/test_\w+\.py)`", section))
    assert named <= run, sorted(named - run)


def test_every_fault_in_the_list_is_injected_by_a_test_and_says_what_catches_it() -> None:
    found, tests = rows(), injected()
    assert sorted(row.fault for row in found) == sorted(tests)
    for row in found:
        assert row.caught_by, row.fault
        assert tests[row.fault] <= {name for _, name in row.threads}, row.fault
    assert set(THREADS.values()) <= {thread for row in found for _, thread in row.threads}
