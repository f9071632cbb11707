"""Whoever comes first fetches little, finds nothing, and on every page what to do about it."""

from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from bloomery.types.keys import SCOPES
from tests.live import LiveServer
from tests.web.conftest import SIZE, WAIT_MS, log_in

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
NEXT = {
    "/": ["/datasets", "/jobs", "/playground"],
    "/runs": ["/datasets", "/jobs"],
    "/rollouts": ["/jobs"],
    "/evaluations": ["/datasets", "/graders"],
    "/evaluations/leaderboard": ["/evaluations"],
    "/evaluations/judges": ["/graders"],
    "/graders": ["/graders/new"],
    "/deployments": ["/playground", "/runs"],
    "/traces": ["/playground"],
    "/labelling": ["/evaluations"],
}
FETCHED = """performance.getEntriesByType("resource").filter(({ name }) => new URL(name).pathname.startsWith("/ui/"))
    .map(({ name, encodedBodySize }) => [name, encodedBodySize])"""
FIRST_PAGE_BYTES = 250_000
"""Of scripts and styles as they are sent, compressed: half a second at 4 Mbit/s."""


def test_little_is_fetched_before_the_first_page_is_shown(page: "Page") -> None:
    page.goto("/")
    fetched = page.evaluate(FETCHED)
    assert any(name.endswith(".js") for name, _ in fetched)
    assert sum(size for _, size in fetched) < FIRST_PAGE_BYTES


def test_a_page_with_nothing_on_it_leads_to_what_would_be_there(browser: "Browser", server: LiveServer, client: Client) -> None:
    key = client.keys.create("newcomer", SCOPES, project="nothing-yet").key
    with browser.new_context(viewport=SIZE, base_url=server.url) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        log_in(page, key)
        for place, leads in NEXT.items():
            page.goto(place)
            page.locator("main .empty a").nth(len(leads) - 1).wait_for()
            assert sorted(link.get_attribute("href") or "" for link in page.locator("main .empty a").all()) == leads
        page.goto("/datasets")
        page.get_by_text("Drop a file here").wait_for()
        page.get_by_role("button", name="Log out").click()
        page.get_by_label("API key").wait_for()
        # The printed address, where a page of the server is open: the browser fetches nothing for what stands behind the #.
        page.evaluate("(key) => (location.hash = `key=${key}`)", key)
        page.get_by_text("newcomer of the project nothing-yet").or_(page.get_by_role("button", name="Log in to nothing-yet")).first.wait_for()
        assert key not in page.url
