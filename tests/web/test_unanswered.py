"""What is read for a page and never answered: it is told whose answer was waited for, and read again when somebody asks."""

import re
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from tests.live import LiveServer
from tests.web.conftest import SIZE, WAIT_MS, log_in
from tests.web.world import BASE, World

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
DEADLINE_MS = 60_000
LONG_MS = 3_600_000


def late(path: str) -> str:
    return f"the server was asked for {path} and has not answered within 60 s"


def test_a_page_whose_answer_never_comes_says_so_within_a_minute_and_reads_again_when_somebody_asks(page: "Page", world: World) -> None:
    page.clock.install()
    page.route("**/api/v1/deployments?*", lambda route: None)
    with page.expect_request("**/api/v1/deployments?*"):
        page.goto("/deployments")
    page.get_by_role("heading", name="Deployments").wait_for()
    page.clock.fast_forward(DEADLINE_MS - 10_000)
    assert page.get_by_role("alert").count() == 0
    page.clock.fast_forward(10_000)
    told = page.get_by_role("main").get_by_role("alert").filter(has_text=late("/api/v1/deployments"))
    told.wait_for()
    page.get_by_role("button", name="Try again").click()
    page.get_by_role("button", name="Trying again…").wait_for()
    page.clock.fast_forward(DEADLINE_MS)
    again = page.get_by_role("button", name="Try again", exact=True)
    again.wait_for()
    page.unroute("**/api/v1/deployments?*")
    again.click()
    page.get_by_role("link", name=world.deployment, exact=True).wait_for()
    told.wait_for(state="detached")
    assert page.get_by_role("button", name=re.compile("^Try")).count() == 0


def test_rows_that_are_read_as_they_are_scrolled_to_and_never_come_are_read_again(page: "Page", world: World) -> None:
    del world
    page.clock.install()
    page.route("**/rows?*", lambda route: None)
    with page.expect_request("**/rows?*"):
        page.goto("/datasets/chats?as=text")
    page.clock.fast_forward(DEADLINE_MS)
    rows = page.get_by_role("region", name=re.compile("^Rows"))
    rows.get_by_role("alert").filter(has_text=re.compile("was asked for /api/v1/datasets/chats/versions/.*/rows and has not answered")).wait_for()
    page.unroute("**/rows?*")
    rows.get_by_role("button", name="Try again").click()
    rows.get_by_role("alert").wait_for(state="detached")


def test_a_change_takes_as_long_as_it_takes(page: "Page", client: Client, world: World) -> None:
    assert world.taught.result is not None
    client.deployments.create("waited-for", BASE)
    page.clock.install()
    page.goto("/deployments/waited-for")
    page.get_by_label("Version to make live").select_option(world.taught.result.version)
    page.get_by_role("button", name="Make live").click()
    dialog = page.get_by_role("dialog")
    page.route("**/waited-for/promote", lambda route: None)
    with page.expect_request("**/waited-for/promote"):
        dialog.get_by_role("button", name="Make live").click()
    page.clock.fast_forward(LONG_MS)
    dialog.get_by_role("button", name="Loading and proving…").wait_for()
    assert dialog.get_by_role("alert").count() == 0


def test_what_is_refused_because_of_what_was_asked_is_not_asked_again(browser: "Browser", server: LiveServer) -> None:
    # Of its own: a browser's console calls it an error when something is not there.
    with browser.new_context(viewport=SIZE, base_url=server.url) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        log_in(page, server.key)
        page.goto("/deployments/gone")
        page.get_by_role("alert").filter(has_text="no deployment gone").wait_for()
        assert page.get_by_role("button", name="Try again").count() == 0
