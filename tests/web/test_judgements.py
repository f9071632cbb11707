"""What people say of answers, by keyboard alone: what judges disagree on comes first, and what was said stands on the cards of graders."""

import re
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from bloomery.types.evaluations import EvaluationSpec
from tests.web.world import BASE, World

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
ROWS = 8
LIKES = "def score(output):\n    return min(len(output), 100) / 100\n"
DOUBTS = "def score(output, pairs):\n    liked = min(len(output), 100) / 100\n    return 1 - liked if sorted(pairs)[0] < 'moon' else liked\n"
"""The same, but the other way round on some rows."""
FOCUSED = "(button) => button === document.activeElement"


@pytest.fixture(scope="module")
def doubted(world: World, client: Client) -> set[int]:
    """The evaluation of this name has answers that one grader passes and another does not; the rows where they disagree."""
    for name, source in (("likes", LIKES), ("doubts", DOUBTS)):
        client.graders.create(name, {"type": "function", "source": source, "entry": "score", "pass_threshold": 0.5})
    spec = {
        "name": "doubted",
        "data": {"dataset": "prompts", "split": "eval", "rows": ROWS},
        "models": [world.deployment, BASE],
        "graders": ["likes", "doubts"],
        "params": {"max_tokens": 24},
    }
    client.evaluations.wait(client.evaluations.create(EvaluationSpec.model_validate(spec)).id, 120)
    return {item.row for item in client.evaluations.items("doubted") if len({score.result.score for score in item.scores}) > 1}


def test_answers_that_judges_disagree_on_are_passed_or_failed_first_and_make_a_card(page: "Page", client: Client, doubted: set[int]) -> None:
    items = list(client.evaluations.items("doubted"))
    apart = sum(len({score.passed for score in item.scores}) > 1 for item in items)
    assert 0 < apart < len(items)
    _open(page, client, "single")
    note = page.get_by_text("Judges disagree on this one.")
    for done in range(apart):
        page.get_by_text(f"{done} / {len(items)}").wait_for()
        note.wait_for()
        page.keyboard.press("pf"[done % 2])
    page.get_by_text(f"{apart} / {len(items)}").wait_for()
    assert note.count() == 0
    _calibrate(page, f"With {apart} labels")
    card = client.graders.calibrations("doubts")[0]
    assert (card.rows, card.pairs) == (apart, None)
    page.goto("/graders/doubts")
    page.get_by_role("region", name=re.compile("^card of")).get_by_text(f"{apart} answers with labels of people").wait_for()


def test_pairs_that_judges_order_differently_are_compared_first_and_make_a_card(page: "Page", client: Client, doubted: set[int]) -> None:
    texts = {(item.row, item.model): item.answer.text for item in client.evaluations.items("doubted")}
    apart = sum(_told_apart(texts, row) for row in doubted)
    assert 0 < apart < ROWS
    _open(page, client, "pairs")
    note = page.get_by_text("Judges disagree on this pair.")
    for done in range(apart):
        note.wait_for()
        page.keyboard.press("12"[done % 2])
        page.get_by_text(re.compile(f"^{done + 1} / ")).wait_for()
    assert note.count() == 0
    page.keyboard.press("0")
    page.get_by_text(re.compile(f"^{apart + 1} / ")).wait_for()
    _calibrate(page, f"With {apart + 1} pairs")
    card = client.graders.calibrations("doubts")[0]
    assert card.pairs is not None
    assert (card.rows, card.pairs.people_ties) == (apart + 1, 1)


def test_no_model_is_named_before_somebody_asks_what_came_of_it_and_what_was_counted_does_not_come_again(
    page: "Page", world: World, client: Client, doubted: set[int]
) -> None:
    _open(page, client, "pairs")
    texts = {(item.row, item.model): item.answer.text for item in client.evaluations.items("doubted")}
    pairs = sum(texts[row, world.deployment] != texts[row, BASE] for row in range(ROWS))
    taken_back = page.get_by_role("button", name="Take back")
    for done in range(pairs - 1):
        assert _named(page, world) == []
        page.keyboard.press("102"[done % 3])
        page.get_by_text(f"{done + 1} / {pairs}").wait_for()
    assert _named(page, world) == []
    page.get_by_role("button", name="Show what came of it").click()
    came = page.get_by_role("region", name="What people prefer").get_by_text(f"Of {pairs - 1} pairs: ")
    counted = came.inner_text()
    assert sum(map(int, re.findall(r"(?<= )\d+(?=[,.])", counted))) == pairs - 1
    assert world.deployment in counted
    assert taken_back.is_disabled()
    page.keyboard.press("u")
    page.keyboard.press("1")
    page.get_by_text(f"{pairs} / {pairs}").wait_for()
    assert came.inner_text() == counted, "what was just preferred is in no count yet"
    page.keyboard.press("u")
    page.get_by_text(f"{pairs - 1} / {pairs}").wait_for()
    page.keyboard.press("u")
    page.keyboard.press("2")
    page.get_by_role("button", name="Show what came of it").click()
    page.get_by_text(f"Of {pairs} pairs: ").wait_for()


def _named(page: "Page", world: World) -> list[str]:
    """The models that the page names to whoever reads or hears it."""
    shown = page.get_by_role("main").inner_text()
    return [model for model in (world.deployment, BASE) if model in shown]


def _told_apart(texts: dict[tuple[int, str], str], row: int) -> bool:
    """Whether the graders tell both answers apart."""
    return len({min(len(text), 100) for (of, _), text in texts.items() if of == row}) > 1


def _open(page: "Page", client: Client, mode: str) -> None:
    page.goto(f"/labelling?evaluation={client.evaluations.get('doubted').id}&mode={mode}&grader=doubts")
    page.get_by_role("heading", name=re.compile("^Calibrate doubts@1")).wait_for()


def _calibrate(page: "Page", button: str) -> None:
    """Reached and pressed by keyboard."""
    wanted = page.get_by_role("button", name=button)
    wanted.wait_for()
    for _ in range(60):
        if wanted.evaluate(FOCUSED):
            break
        page.keyboard.press("Tab")
    assert wanted.evaluate(FOCUSED)
    page.keyboard.press("Enter")
    page.get_by_role("status").get_by_role("region", name=re.compile("^card of")).wait_for()
