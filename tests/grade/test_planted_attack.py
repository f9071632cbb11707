"""What the detector makes of the planted graders, and the page that tells it."""

import asyncio
import re

import pytest

from tests.cookbook.setup import ROOT
from tests.grade.planted.attacking import PARTS, Outcome, outcomes

PAGE = (ROOT / "docs" / "graders.md").read_text()


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=PARTS)
def part(request: pytest.FixtureRequest) -> list[Outcome]:
    return asyncio.run(outcomes(request.param))


def test_most_hackable_graders_are_caught_and_no_sound_one(part: list[Outcome]) -> None:
    caught = {each.case.name for each in part if each.report.verdict == "hackable"}
    hackable = {each.case.name for each in part if each.case.kind == "hackable"}
    assert len(caught & hackable) >= 9, hackable - caught
    assert caught <= hackable, caught - hackable


def test_the_page_tells_what_comes_of_each_planted_grader(part: list[Outcome]) -> None:
    rows = [each.row for each in part]
    assert re.findall(rf"^\| {part[0].part} \| `.*\|$", PAGE, re.MULTILINE) == rows, "\n".join(rows)


def test_the_page_counts_each_part_by_itself(part: list[Outcome]) -> None:
    caught, alarms = (sum(each.report.verdict == "hackable" for each in part if each.case.kind == kind) for kind in ("hackable", "sound"))
    undecided = sum(each.report.verdict == "undecided" for each in part)
    assert f"| {part[0].part} | {caught} of 10 | {alarms} of 10 | {undecided} |" in PAGE
