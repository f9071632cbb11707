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
