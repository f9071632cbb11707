"""Who is about to leave what is written and not kept is asked first, whichever way leads away."""

import re
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from tests.web.test_presses import hold, told

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
WRITTEN = "def score(output):\n    return 1.0\n"
CLOSING = "!dispatchEvent(new Event('beforeunload', { cancelable: true }))"
"""Whether the browser would ask before it closes the page."""


def test_a_grader_that_is_not_kept_is_left_by_no_link_and_no_way_back_unasked(page: "Page") -> None:
    page.goto("/graders")
    page.get_by_role("link", name="New grader").click()
    source = page.get_by_label("Source")
    source.wait_for()
    assert not page.evaluate(CLOSING)
    page.get_by_label("Begin with another kind").select_option("Python function")
    assert not page.evaluate(CLOSING), "nobody has written that"
    source.fill(WRITTEN)
    assert page.evaluate(CLOSING)
    question = page.get_by_role("dialog", name="Give up what is not kept?")
    for away in (
        lambda: page.get_by_role("link", name="Keys", exact=True).click(),
        lambda: page.go_back(),
        lambda: page.get_by_role("button", name="Log out").click(),
        lambda: page.get_by_label("Begin with another kind").select_option("Comparison of texts"),
    ):
        away()
        question.get_by_role("button", name="Go on writing").click()
        question.wait_for(state="detached")
        assert page.url.endswith("/graders/new")
        assert source.input_value() == WRITTEN
    page.go_back()
    question.get_by_role("button", name="Give it up").click()
    page.get_by_role("heading", name="Graders").wait_for()
    assert page.url.endswith("/graders")
    page.get_by_role("link", name="Keys", exact=True).click()
    page.get_by_role("heading", name="Keys").wait_for()


def test_the_next_version_of_a_grader_is_asked_for_until_it_is_kept(page: "Page", client: Client) -> None:
    for score in ("0.0", "0.5"):
        client.graders.create("half-written", {"type": "function", "source": f"def score(output):\n    return {score}\n", "entry": "score"})
    page.goto("/graders/half-written")
    page.get_by_text("What is known of version 2").wait_for()
    version = page.get_by_role("combobox", name=re.compile("^Version"))
    page.get_by_label("Source").fill(WRITTEN)
    version.select_option("1")
    question = page.get_by_role("dialog", name="Give up what is not kept?")
    question.get_by_role("button", name="Go on writing").click()
    assert version.input_value() == "2"
    assert page.get_by_label("Source").input_value() == WRITTEN
    held = hold(page, "**/api/v1/graders", method="POST")
    page.get_by_role("button", name="Keep as the next version").click()
    page.get_by_role("button", name="Keeping…").wait_for()
    for box in ("Source", "Everything else, as JSON"):
        assert page.get_by_label(box).is_disabled(), "what is written now would be lost once this is kept"
    told(page, held)
    page.get_by_text("What is known of version 3").wait_for()
    assert page.get_by_label("Source").is_enabled()
    version.select_option("1")
    page.get_by_text("What is known of version 1").wait_for()
    assert question.count() == 0
