"""Lists of requests and of pairs that the server filters, orders, prices and pages: what is shown is what it says."""

import re
from typing import TYPE_CHECKING, Final

import pytest

from bloomery.client import Client
from bloomery.types.evaluations import EvaluationSpec
from bloomery.types.resources import Price
from tests.web.conftest import WAIT_MS
from tests.web.world import BASE

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
SAID = [
    {
        "role": "user",
        "content": "a question of more tokens than one block of the cache has, so that it is not read anew by whoever asks it again " * 2,
    }
]
ANSWER = 6
"""The column that says how many tokens an answer has."""
MANY: Final = 220
"""Requests of which not all are in the document."""
PROMPTS: Final = """shown => [...shown.querySelectorAll("tbody tr[aria-rowindex]")].map((row) => ({
    place: row.ariaRowIndex - 2, prompt: Number(row.cells[4].innerText.replace(",", "")), answer: Number(row.cells[5].innerText) }))"""
"""Of the rows in the document, the number of each and how many tokens it says."""
NUMBERS: Final = """shown => [...shown.querySelectorAll("tbody tr[aria-rowindex]")].map((row) => Number(row.ariaRowIndex))"""
PAIRED, FEW = 501, 3
"""Rows of two evaluations, one of them more than the server gives in one page."""


def test_requests_are_found_by_what_was_said_of_them_and_the_slowest_come_first(page: "Page", client: Client) -> None:
    client.deployments.create("told-of", BASE)
    good, bad, labelled, _ = (client.chat("told-of", SAID, max_tokens=tokens, ignore_eos=True)["id"] for tokens in (1, 2, 3, 4))
    client.feedback(good, "helpful", True)
    client.feedback(bad, "helpful", False)
    client.feedback(labelled, "topic", "weather", type="label")
    page.goto("/traces?deployment=told-of")
    for chosen, expected in {"good": [1], "bad": [2], "in any way": [3, 2, 1], "by nobody": [4], "or not": [4, 3, 2, 1]}.items():
        page.get_by_role("combobox", name=re.compile("^judged")).select_option(chosen)
        _lists(page, expected)
    page.get_by_role("combobox", name=re.compile("^first the")).select_option("slowest")
    page.wait_for_url(re.compile("order=slowest"))
    _lists(page, [span.out_tokens for span in client.spans.list(deployment="told-of", order="slowest")])


def test_of_many_requests_each_row_says_one_and_the_focus_stays_with_it_or_goes(page: "Page", client: Client) -> None:
    """Rows of the document are written anew with what comes into sight."""
    client.deployments.create("many", BASE)
    for number in range(MANY):
        client.chat("many", [{"role": "user", "content": "red " * (1 + number)}], max_tokens=1 + number % 3, ignore_eos=True)
    spans = {span.in_tokens: span.out_tokens for span in client.spans.list(deployment="many")}
    assert len(spans) == MANY
    page.goto("/traces?deployment=many")
    table = page.get_by_role("region", name="requests", exact=True)
    page.get_by_role("status").filter(has_text=re.compile(rf"^{MANY}$")).wait_for()
    table.get_by_role("button", name="Prompt").click()
    ordered = sorted(spans, reverse=True)
    page.wait_for_function(f"""shown => {PROMPTS}(shown)[0]?.prompt === {ordered[0]}""", arg=table.element_handle())

    def shown() -> list[dict[str, int]]:
        found: list[dict[str, int]] = table.evaluate(PROMPTS)
        assert [(ordered[row["place"]], spans[row["prompt"]]) for row in found] == [(row["prompt"], row["answer"]) for row in found]
        return found

    assert len(shown()) < MANY / 2
    _scrolled(table, 500)
    kept = table.locator("tr[aria-rowindex='32']")
    kept.focus()
    said = kept.inner_text()
    for top in (600, 1400, 500, 900):
        _scrolled(table, top)
        shown()
        assert page.evaluate("document.activeElement.innerText") == said, f"the focus is lost where {top} pixels are above"
    for top in (4000, 4400, 7000, 100):
        _scrolled(table, top)
        shown()
        assert table.evaluate("shown => document.activeElement === shown"), "the focus is neither on another row nor lost"
    table.get_by_role("button", name="Prompt").click()
    ordered = sorted(spans)
    page.wait_for_function(f"""shown => {PROMPTS}(shown)[0]?.prompt === {ordered[0]}""", arg=table.element_handle())
    shown()


def test_what_is_read_of_many_requests_stays_where_it_is_as_others_come_in(page: "Page", client: Client) -> None:
    client.deployments.create("many-more", BASE)

    def ask(tokens: int) -> None:
        client.chat("many-more", [{"role": "user", "content": "red"}], max_tokens=tokens, ignore_eos=True)

    for _ in range(MANY):
        ask(1)
    page.goto("/traces?deployment=many-more")
    table = page.get_by_role("region", name="requests", exact=True)
    page.get_by_role("status").filter(has_text=re.compile(rf"^{MANY}$")).wait_for()
    for top, moved in ((3000, 37), (0, 0)):
        _scrolled(table, top)
        ask(2)
        page.get_by_role("status").filter(has_text=re.compile(rf"^{MANY + 1 + (not moved)}$")).wait_for()
        page.wait_for_function("([shown, top]) => shown.scrollTop === top", arg=[table.element_handle(), top + moved])
        assert table.evaluate("shown => Math.floor(shown.scrollTop / 37) + 2") in table.evaluate(NUMBERS), "what is in sight is written"


def test_tokens_that_were_kept_cost_what_the_form_says_of_them(page: "Page", client: Client) -> None:
    client.deployments.create("cached", BASE)
    page.goto("/deployments/cached")
    form = page.get_by_role("region", name="Price and cost")
    form.get_by_role("button", name="Set a price").click()
    for field, price in {"Prompts": "1000", "of these cached": "100", "Answers": "20000"}.items():
        form.get_by_label(field).fill(price)
    form.get_by_role("button", name="Set it").click()
    form.get_by_text("for a million tokens").wait_for()
    assert client.deployments.get("cached").price == Price(prompt_usd_per_mtok=1000, cached_prompt_usd_per_mtok=100, completion_usd_per_mtok=20_000)
    answers = [client.chat("cached", SAID, max_tokens=2, ignore_eos=True) for _ in range(2)]
    usage = answers[1]["usage"]
    kept = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < kept < usage["prompt_tokens"]
    cost = ((usage["prompt_tokens"] - kept) * 1000 + kept * 100 + usage["completion_tokens"] * 20_000) / 1e6
    assert client.spans.get(answers[1]["id"]).span.cost_usd == pytest.approx(cost)
    page.goto(f"/traces/{answers[1]['id']}?deployment=cached")
    trace = page.get_by_role("region", name=re.compile("^Request"))
    trace.get_by_text(f"{usage['prompt_tokens']} ({kept} cached) + 2 tokens · ${cost:.3g}").wait_for()


def test_two_models_are_compared_row_by_row_over_more_than_one_page(page: "Page", client: Client) -> None:
    client.datasets.create("long-list")
    rows = "\n".join(f'{{"messages": [{{"role": "user", "content": "{number}"}}], "number": {number}}}' for number in range(PAIRED))
    client.datasets.add_version("long-list", {"eval": rows, "train": '{"messages": [{"role": "user", "content": "none"}]}'})
    client.deployments.create("listed", BASE)
    client.graders.create("always", {"type": "string_check", "operation": "eq", "input": "a", "reference": "a"})
    long, brief = _evaluated(client, BASE, PAIRED), _evaluated(client, "listed", FEW)
    page.goto(f"/evaluations/compare?of={long},{brief}")
    pairs = page.get_by_role("region", name="Row by row")
    pairs.get_by_text(f"{PAIRED} rows", exact=True).wait_for()
    pairs.get_by_label("what these rows come to").filter(has_text=f"alike {FEW};").get_by_text(f"{PAIRED - FEW} rows lack a score").wait_for()
    listed = pairs.get_by_role("region", name="rows")
    assert listed.get_by_role("row").count() < 100
    listed.evaluate("(rows) => rows.scrollTo(0, rows.scrollHeight)")
    last = listed.locator(f'tr[aria-rowindex="{PAIRED + 1}"]')
    last.wait_for()
    (expected,) = client.evaluations.pairs(long, model=BASE, other="listed", against=brief, order="apart", limit=1, offset=PAIRED - 1).data
    assert last.get_by_role("cell").first.inner_text() == str(expected.row + 1)
    last.click()
    page.get_by_role("article", name=f"row {expected.row + 1}").get_by_text("It was not asked this").wait_for()
    pairs.get_by_label("show").select_option("alike")
    pairs.get_by_text(f"{FEW} rows", exact=True).wait_for()


def _evaluated(client: Client, model: str, rows: int) -> str:
    spec = {
        "name": f"long-list-{rows}",
        "data": {"dataset": "long-list", "rows": rows},
        "models": [model],
        "graders": ["always"],
        "params": {"max_tokens": 1},
    }
    made = client.evaluations.create(EvaluationSpec.model_validate(spec))
    return client.evaluations.wait(made.id, 300).id


def _lists(page: "Page", out_tokens: list[int]) -> None:
    """These requests, in this order, soon."""
    from playwright.sync_api import expect

    cells = page.get_by_role("region", name="requests", exact=True).locator(f"tbody td:nth-child({ANSWER})")
    expect(cells).to_have_text([str(tokens) for tokens in out_tokens], timeout=WAIT_MS)


def _scrolled(table: "Locator", top: int) -> None:
    """Until what is in sight then has been written."""
    table.evaluate("(shown, top) => { shown.scrollTop = top; return new Promise((done) => requestAnimationFrame(() => setTimeout(done))); }", top)
    assert table.evaluate("shown => shown.scrollTop") == top, "it does not stay where it was scrolled to"
