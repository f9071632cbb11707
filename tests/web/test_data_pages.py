"""Data sets and evaluations, in a real browser: from a file that is dropped to the rows on which two models differ."""

import json
import re
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from tests.web.world import BASE, HOSTILE, World

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
DROP = """([place, name, text]) => {
    const data = new DataTransfer();
    data.items.add(new File([text], name));
    for (const kind of ["dragenter", "dragover", "drop"])
        document.querySelector(place).dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


def rows(count: int, *, start: int = 0) -> list[str]:
    return [
        json.dumps({"messages": [{"role": "user", "content": f"number {start + n}: {n * 7919}"}, {"role": "assistant", "content": "ab"[n % 2]}]})
        for n in range(count)
    ]


def dropped(page: "Page", name: str, text: str) -> "Locator":
    page.evaluate(DROP, ["main", name, text])
    return page.get_by_role("dialog")


def test_a_file_that_is_dropped_is_looked_at_before_anything_is_stored(page: "Page", client: Client) -> None:
    page.goto("/datasets")
    page.get_by_role("heading", name="Data sets").wait_for()
    dialog = dropped(page, f"{HOSTILE}.jsonl", "\n".join([*rows(40), '{"messages": [', '{"conversations": []}']))
    dialog.get_by_text("not_json", exact=True).wait_for()
    dialog.get_by_text("unknown_form", exact=True).wait_for()
    assert dialog.get_by_role("button", name="Store 40 rows").is_disabled()
    dialog.get_by_label("Data set").fill("dropped")
    dialog.get_by_label("Leave out the 2 broken rows").check()
    assert "dropped" not in {each.name for each in client.datasets.list()}
    dialog.get_by_role("button", name="Store 40 rows").click()
    page.get_by_role("heading", name="dropped").wait_for()
    page.get_by_role("region", name="Rows that were left out").get_by_text("not_json").wait_for()
    (version,) = client.datasets.get("dropped").versions
    assert version.counts["train.rejected"] == 2
    assert version.counts["train.rows"] + version.counts.get("eval.rows", 0) == 40
    assert page.locator("img[src=x]").count() == 0


def test_a_share_of_too_few_groups_is_said_to_hold_nothing_out(page: "Page", client: Client) -> None:
    page.goto("/datasets")
    page.get_by_role("heading", name="Data sets").wait_for()
    dialog = dropped(page, "few.jsonl", "\n".join(rows(12, start=900)))
    dialog.get_by_label("Held out: eval").fill("0.01")
    told = "No row is held out for eval: groups are held out whole, and of 12 groups none fell there."
    dialog.get_by_text(told).wait_for()
    dialog.get_by_role("button", name="Store 12 rows").click()
    page.get_by_role("region", name="Where the rows went").get_by_text(told).wait_for()
    assert client.datasets.get("few").versions[0].unfilled == ["eval"]


def test_a_file_says_its_format_by_its_name(page: "Page") -> None:
    page.goto("/datasets")
    page.get_by_role("heading", name="Data sets").wait_for()
    dropped(page, "notes.docx", "what").get_by_text("has to end in").wait_for()


def test_a_data_set_is_split_and_deleted(page: "Page", client: Client) -> None:
    client.datasets.create("divided")
    client.datasets.upload("divided", "\n".join(rows(60, start=500)).encode(), format="jsonl")
    page.goto("/datasets/divided")
    page.get_by_role("button", name="Split").click()
    page.get_by_role("dialog").get_by_label("Hold out for eval").fill("30")
    page.get_by_role("button", name="Make the version").click()
    page.wait_for_url(re.compile("version=2"))
    assert client.datasets.get("divided").versions[1].recipe["kind"] == "split"
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete it").click()
    page.get_by_role("heading", name="Data sets").wait_for()
    assert "divided" not in {each.name for each in client.datasets.list()}


def test_tokens_with_loss_are_those_that_are_trained_on(page: "Page", world: World, client: Client) -> None:
    page.goto("/datasets/chats?split=train&row=3")
    row = page.get_by_role("article", name="row 4")
    row.locator(".tokens .tinted").first.wait_for()
    version = client.datasets.get("chats").versions[-1]
    (example,) = client.datasets.preview("chats", version.id, model=BASE, limit=1, offset=3)[0].examples
    assert "".join(row.locator(".tokens .tinted").all_text_contents()) == "".join(
        text for text, weight in zip(example.texts, example.weights, strict=True) if weight
    )
    row.get_by_role("button", name="As text").click()
    row.get_by_text("assistant", exact=True).wait_for()


def test_ten_thousand_rows_are_walked_by_keyboard_with_few_of_them_in_the_page(page: "Page", client: Client) -> None:
    client.datasets.create("many")
    client.datasets.upload("many", "\n".join(json.dumps({"text": f"line {n}", "label": "xy"[n % 2]}) for n in range(10_000)).encode(), format="jsonl")
    page.goto("/datasets/many")
    walked = page.get_by_role("listbox")
    walked.focus()
    page.keyboard.press("End")
    walked.get_by_role("option", name="line 9999").wait_for()
    assert walked.get_by_role("option").count() < 60
    page.keyboard.press("ArrowUp")
    page.get_by_role("article", name="row 9999").wait_for()


def test_an_evaluation_shows_where_models_differ_and_what_each_said(page: "Page", world: World) -> None:
    page.goto(f"/evaluations/{world.evaluation}")
    scores = page.get_by_role("region", name="Scores")
    scores.get_by_role("cell", name=BASE).first.wait_for()
    assert scores.locator(".interval .dot").count() == 4
    page.get_by_role("region", name="Differences").wait_for()
    pairs = page.get_by_role("region", name="Row by row")
    pairs.get_by_role("article").get_by_role("region", name=f"answer of {BASE}").wait_for()
    pairs.get_by_text(re.compile("exact")).wait_for()
    pairs.get_by_label("show").select_option("better")
    told = pairs.get_by_role("region", name="rows").locator("td:last-child")
    told.filter(has_text=re.compile(r"^[^+]")).first.wait_for(state="detached")
    told.first.wait_for()
    differences = told.all_inner_texts()
    assert differences
    assert all(each.startswith("+") for each in differences)
    assert "show=better" in page.url


def test_an_evaluation_is_run_stands_on_the_board_and_is_deleted(page: "Page", world: World, client: Client) -> None:
    page.goto("/evaluations")
    page.get_by_role("button", name="New evaluation").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("by-hand")
    dialog.get_by_label("Data set").select_option("prompts")
    dialog.get_by_label("Rows at most").fill("4")
    dialog.get_by_role("checkbox", name=re.compile(f"^{BASE}")).check()
    dialog.get_by_role("checkbox", name=re.compile("^short")).check()
    # A version is told by what it is: its hash, of which all stands in the title, takes little room.
    assert world.taught.result is not None
    version = dialog.locator("label.option", has_text="what job taught ended with")
    assert " ".join(version.inner_text().split()) == f"what job taught ended with {world.taught.result.version[:12]}"
    assert world.taught.result.version in (version.get_attribute("title") or "")
    dialog.get_by_label("Tokens at most").fill("8")
    dialog.get_by_text("4 answers, 4 scores").wait_for()
    dialog.get_by_role("button", name="Run it").click()
    page.get_by_role("heading", name="by-hand").wait_for()
    page.get_by_text("succeeded", exact=True).wait_for(timeout=60_000)
    page.goto("/evaluations/leaderboard?dataset=prompts")
    page.get_by_role("link", name="compared").first.wait_for()
    page.goto("/evaluations/by-hand")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete it").click()
    page.get_by_role("heading", name="Evaluations").wait_for()
    assert "by-hand" not in {each.spec.name for each in client.evaluations.list()}
