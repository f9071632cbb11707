"""Logging in and out, in a real browser: by the key of an address, which any page may have led to, by one that is entered, and not by a wrong one."""

from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from tests.live import LiveServer
from tests.web.conftest import WAIT_MS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]


def test_a_logout_is_one_and_no_key_is_kept(page: "Page", server: LiveServer) -> None:
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("API key").wait_for()
    assert page.evaluate("localStorage.getItem('bloomery-csrf')") is None
    page.get_by_label("API key").fill(server.key)
    page.get_by_role("button", name="Open").click()
    page.get_by_role("heading", name="Home").wait_for()
    assert server.key not in page.url
    assert server.key not in str(page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])"))
    page.reload()
    page.get_by_role("heading", name="Home").wait_for()


def test_a_wrong_key_is_refused_and_a_login_ends_only_where_the_server_says_so(browser: "Browser", server: LiveServer) -> None:
    with browser.new_context(base_url=server.url) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto("/#key=tml-wrong")
        page.get_by_role("alert").wait_for()
        page.get_by_label("API key").fill(server.key)
        page.get_by_role("button", name="Open").click()
        _log_out_of_a_server_that_is_away(page)
        # Another port of the host was told the cookie, and nothing else.
        page.evaluate("localStorage.clear()")
        page.reload()
        page.get_by_label("API key").wait_for()


def _log_out_of_a_server_that_is_away(page: "Page") -> None:
    page.get_by_role("heading", name="Home").wait_for()
    page.route("**/api/v1/login", lambda route: route.fulfill(status=503, json={"error": {"message": "the disk is full"}}))
    page.get_by_role("button", name="Log out").click()
    page.get_by_role("alert").get_by_text("still logged in: the disk is full").wait_for()
    page.get_by_role("heading", name="Home").wait_for()
    page.unroute("**/api/v1/login")
    page.reload()
    page.get_by_role("heading", name="Home").wait_for()


def test_a_key_in_an_address_takes_nobodys_place_unasked(page: "Page", server: LiveServer, client: Client) -> None:
    other = client.keys.create("of-somebody-else", ["read"], project="elsewhere").key
    for answer, name in (("Stay in default", "development"), ("Change to elsewhere", "of-somebody-else")):
        page.goto("about:blank")
        page.goto(f"/#key={other}")
        page.get_by_text("of-somebody-else of the project elsewhere").wait_for()
        assert other not in page.url
        page.get_by_role("button", name=answer).click()
        page.get_by_role("navigation").get_by_text(name, exact=True).wait_for()
    page.goto("about:blank")
    page.goto(f"/#key={other}")
    page.get_by_role("navigation").get_by_text("of-somebody-else", exact=True).wait_for()


def test_a_page_of_somebody_else_logs_no_browser_in(browser: "Browser", server: LiveServer, client: Client) -> None:
    key = client.keys.create("of-who-made-the-link", ["read"], project="elsewhere").key
    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.set_content(f'<a href="{server.url}/#key={key}">look at this</a>')
        page.get_by_role("link").click()
        page.get_by_text("holds the key of-who-made-the-link of the project elsewhere").wait_for()
        assert key not in page.url
        # Who hits Enter has agreed to nothing.
        assert page.evaluate("document.activeElement.tagName") == "P"
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Log in to elsewhere", disabled=False).wait_for()
        assert context.cookies() == []
        page.get_by_role("button", name="Enter another key").click()
        page.get_by_label("API key").fill(server.key)
        page.get_by_role("button", name="Open").click()
        page.get_by_role("navigation").get_by_text("development", exact=True).wait_for()
