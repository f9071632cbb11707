"""The answers of a job before and after, side by side on its page, as the API has them."""

from typing import TYPE_CHECKING

import pytest

from bloomery.types.jobs import Job
from tests.web.world import World

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]


def test_what_was_said_before_and_after_stands_side_by_side(page: "Page", world: World) -> None:
    for job, columns in ((world.taught, ["Row", "Asked", "Reference", "Before", "After"]), (world.rewarded, ["Row", "Asked", "Before", "After"])):
        page.goto(f"/runs/{job.id}")
        table = page.get_by_role("table", name="Answers before and after")
        table.wait_for()
        assert table.get_by_role("columnheader").all_inner_texts() == columns
        cells = [row.get_by_role("cell").all_inner_texts() for row in table.locator("tbody").get_by_role("row").all()]
        assert [[_plain(cell) for cell in row] for row in cells] == _said(job)


def _said(job: Job) -> list[list[str]]:
    assert job.result is not None
    assert job.result.samples
    rewards = [(each.before_reward, each.after_reward) for each in job.result.samples]
    assert {reward is None for both in rewards for reward in both} == {job.spec.method.kind != "rft"}
    found = []
    for each in job.result.samples:
        answers = [(each.before, each.before_reward), (each.after, each.after_reward)]
        said = [f"{text or 'nothing'}{'' if reward is None else f' reward {reward:.4g}'}" for text, reward in answers]
        found.append([str(each.row + 1), each.asked, *([] if each.reference is None else [each.reference]), *said])
    return [[_plain(cell) for cell in row] for row in found]


def _plain(cell: str) -> str:
    return " ".join(cell.split())
