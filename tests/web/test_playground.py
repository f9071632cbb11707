"""An answer that is stopped in its middle, asked for again and forgotten, by clicking; what became of it on the server is looked for there."""

from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from bloomery.types.resources import Span
from tests.live import wait_until
from tests.web.conftest import WAIT_MS
from tests.web.world import BASE

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
LONG = 1_900
"""Tokens that take long enough for an answer to be stopped in its middle."""
QUESTION = "red is moon"


def test_an_answer_that_is_stopped_is_sampled_no_further_and_its_question_is_given_back(page: "Page", client: Client) -> None:
    from playwright.sync_api import expect

    client.deployments.create("stopped", BASE)
    _open(page, "stopped", tokens=LONG)
    page.get_by_label("Message", exact=True).press("Enter")
    left = page.get_by_role("region", name="left")
    left.get_by_role("group", name="answer").locator("span").nth(3).wait_for()
    left.get_by_role("button", name="Stop").click()
    expect(page.get_by_label("Message", exact=True)).to_have_value(QUESTION, timeout=WAIT_MS)
    expect(left.get_by_role("group", name="answer")).to_have_count(0, timeout=WAIT_MS)
    (broken,) = _recorded(client, "stopped", 1)
    assert broken.status == "cancelled"
    assert 0 < broken.out_tokens < LONG
    page.get_by_label("Most tokens").fill("4")
    page.get_by_label("Message", exact=True).press("Enter")
    left.get_by_text("4 tokens in").wait_for()
    page.get_by_role("button", name="Begin anew").click()
    expect(left.get_by_text(QUESTION, exact=True)).to_have_count(0, timeout=WAIT_MS)
    page.get_by_label("Message", exact=True).fill("blue is sun")
    page.get_by_label("Message", exact=True).press("Enter")
    left.get_by_text("4 tokens in").wait_for()
    newest, second, _ = _recorded(client, "stopped", 3)
    assert second.status == newest.status == "ok"
    assert _asked(client, newest) == ["blue is sun"]


def test_what_one_of_two_models_did_not_answer_is_asked_again_at_its_side(page: "Page", client: Client) -> None:
    for side in ("asked-left", "asked-right"):
        client.deployments.create(side, BASE)
    _open(page, "asked-left", beside="asked-right", tokens=120)
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("Message", exact=True).press("Enter")
    left, right = page.get_by_role("region", name="left"), page.get_by_role("region", name="right")
    right.get_by_role("button", name="Stop").click()
    left.get_by_text("tokens in").wait_for()
    assert page.get_by_label("Message", exact=True).input_value() == ""
    page.get_by_label("Most tokens").fill("4")
    right.get_by_role("button", name="Ask again").click()
    right.get_by_text("4 tokens in").wait_for()
    assert right.get_by_role("button", name="Ask again").count() == 0
    again, stopped = _recorded(client, "asked-right", 2)
    assert (again.status, stopped.status) == ("ok", "cancelled")
    assert _asked(client, again) == ["Be brief.", QUESTION]
    assert len(_recorded(client, "asked-left", 1)) == 1


def test_what_is_judged_in_the_playground_moves_nothing_and_with_consent_is_curated(page: "Page", client: Client) -> None:
    from playwright.sync_api import expect

    client.deployments.create("judged-here", BASE)
    client.datasets.create("of-the-playground")
    client.datasets.upload("of-the-playground", b'{"text": "a", "label": "b"}', format="jsonl")
    page.goto("/playground?model=judged-here")
    left = page.get_by_role("region", name="left")
    message = page.get_by_label("Message", exact=True)
    page.get_by_text("Curate leaves them out").wait_for()
    for number, consent in enumerate(("none", "train")):
        page.get_by_label("Consent").select_option(consent)
        message.fill(f"{QUESTION} {number}")
        message.press("Enter")
        good = left.get_by_role("button", name="Good answer").nth(number)
        left.get_by_text(f"consent {consent}").wait_for()
        height = left.bounding_box()
        good.click()
        expect(left.get_by_role("status").nth(number)).to_have_text("judged good", timeout=WAIT_MS)
        assert left.bounding_box() == height
        assert good.get_attribute("aria-pressed") == "true"
    consenting, silent = _recorded(client, "judged-here", 2)
    assert (consenting.consent, silent.consent) == ("train", "none")
    page.get_by_role("link", name="trace", exact=True).nth(1).click()
    page.get_by_role("link", name="Curate").click()
    page.get_by_role("link", name="of-the-playground").click()
    dialog = page.get_by_role("dialog", name="Curate from traffic")
    expect(dialog.get_by_label("Traffic of")).to_have_value("judged-here", timeout=WAIT_MS)
    dialog.get_by_role("button", name="Make the version").click()
    page.wait_for_url("**version=2")
    assert dialog.count() == 0
    rows = client.datasets.rows("of-the-playground", client.datasets.get("of-the-playground").versions[1].id, "train")
    assert [row.source_span for row in rows if row.source_span] == [consenting.id]


def test_an_answer_has_as_many_tokens_in_the_playground_as_in_its_trace(page: "Page", client: Client) -> None:
    client.deployments.create("counted-here", BASE)
    page.goto("/playground?model=counted-here")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Message", exact=True).fill(QUESTION)
    page.get_by_label("Message", exact=True).press("Enter")
    left = page.get_by_role("region", name="left")
    left.get_by_text("ended by itself").wait_for()
    (span,) = _recorded(client, "counted-here", 1)
    shown = left.get_by_role("group", name="answer").locator("span").count()
    assert span.out_tokens == shown + 1, "the one that ends it has no text"
    counted = left.get_by_text(f"{span.out_tokens} tokens", exact=True)
    assert "the one that ends the answer" in (counted.get_attribute("title") or "")


def _open(page: "Page", model: str, *, beside: str = "", tokens: int) -> None:
    """The playground with a question that is not yet asked, and whose answer has all tokens that it may have: by itself the tiny model is brief.

    What the model at the right says at first is long.
    """

    def goes_on(route: "Route") -> None:
        body = route.request.post_data_json
        endless = {"max_tokens": LONG} if (body["model"], body["max_tokens"]) == (beside, tokens) else {}
        route.continue_(post_data=body | {"ignore_eos": True} | endless)

    page.route("**/v1/chat/completions", goes_on)
    page.goto(f"/playground?model={model}&beside={beside}")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill(str(tokens))
    page.get_by_label("Message", exact=True).fill(QUESTION)


def _recorded(client: Client, deployment: str, count: int) -> list[Span]:
    """The requests to it, newest first, once there are so many."""
    wait_until(lambda: len(client.spans.list(deployment=deployment)) >= count)
    return client.spans.list(deployment=deployment)


def _asked(client: Client, span: Span) -> list[str]:
    body = client.spans.get(span.id).body
    assert body is not None
    return [message["content"] for message in body["request"]["messages"]]
