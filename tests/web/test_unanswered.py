"""What is read for a page and never answered: it is told whose answer was waited for, and read again when somebody asks."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from tests.jobs.test_methods_live import chat, lines, pairs
from tests.live import LiveServer
from tests.web.conftest import SIZE, WAIT_MS, log_in
from tests.web.world import BASE, World

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

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
    page.get_by_role("button", name=re.compile("^Try")).wait_for(state="detached")


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
    held: list[Route] = []
    page.route("**/waited-for/promote", lambda route: held.append(route))
    with page.expect_request("**/waited-for/promote"):
        dialog.get_by_role("button", name="Make live").click()
    page.clock.fast_forward(LONG_MS)
    dialog.get_by_role("button", name="Loading and proving…").wait_for()
    held[0].continue_()
    page.get_by_role("region", name="Live").get_by_text("revision 2").wait_for(timeout=60_000)
    dialog.wait_for(state="detached")


def test_what_a_job_would_take_is_waited_for_no_longer_than_what_is_read(page: "Page", world: World) -> None:
    page.clock.install()
    page.route("**/jobs/estimate*", lambda route: None)
    with page.expect_request("**/jobs/estimate*"):
        page.goto(f"/jobs?clone={world.taught.id}")
    page.clock.fast_forward(DEADLINE_MS)
    page.get_by_role("alert").filter(has_text=late("/api/v1/jobs/estimate")).wait_for()
    page.unroute("**/jobs/estimate*")
    page.get_by_role("button", name="Try again").click()
    page.get_by_role("complementary", name="What it would take").locator("dl[aria-busy=false]").wait_for()


def test_what_is_refused_because_of_what_was_asked_is_not_asked_again(alone: "Page") -> None:
    alone.goto("/deployments/gone")
    alone.get_by_role("alert").filter(has_text="no deployment gone").wait_for()
    assert alone.get_by_role("button", name="Try again").count() == 0
    alone.goto("/jobs?clone=gone")
    alone.get_by_label("Name", exact=True).wait_for()
    alone.get_by_role("alert").filter(has_text="gone").wait_for()
    assert alone.get_by_role("button", name="Try again").count() == 0


def test_a_change_that_failed_in_the_words_of_a_reading_is_not_tried_again_by_reading(alone: "Page", client: Client, world: World) -> None:
    assert world.taught.result is not None
    client.deployments.create("unreached", BASE)
    alone.route("**/spans?*", lambda route: route.abort())
    alone.route("**/unreached/promote", lambda route: route.abort())
    alone.goto("/deployments/unreached")
    alone.get_by_role("main").get_by_role("button", name="Try again").wait_for()
    alone.get_by_label("Version to make live").select_option(world.taught.result.version)
    alone.get_by_role("button", name="Make live").click()
    dialog = alone.get_by_role("dialog")
    dialog.get_by_role("button", name="Make live").click()
    dialog.get_by_role("alert").filter(has_text="the server does not answer").wait_for()
    assert dialog.get_by_role("button", name="Try again").count() == 0


def test_a_version_is_deployed_under_no_name_before_it_is_known_which_there_are(alone: "Page", world: World) -> None:
    alone.goto(f"/runs/{world.taught.id}")
    alone.get_by_role("button", name="Deploy", exact=True).wait_for()
    alone.route("**/api/v1/deployments?*", lambda route: route.abort())
    alone.get_by_role("button", name="Deploy", exact=True).click()
    dialog = alone.get_by_role("dialog")
    dialog.get_by_label("Name that callers give").fill(world.deployment)
    dialog.get_by_role("alert").wait_for()
    assert dialog.get_by_role("button", name="Deploy", exact=True).is_disabled()
    alone.unroute("**/api/v1/deployments?*")
    dialog.get_by_role("button", name="Try again").click()
    dialog.get_by_role("button", name="Make it live").wait_for()


def test_a_job_that_is_cloned_late_overwrites_nothing(alone: "Page", world: World) -> None:
    alone.route(f"**/jobs/{world.taught.id}", lambda route: route.abort())
    alone.goto(f"/jobs?clone={world.taught.id}")
    again = alone.get_by_role("button", name="Try again")
    again.wait_for()
    assert alone.get_by_label("Name", exact=True).count() == 0
    alone.unroute(f"**/jobs/{world.taught.id}")
    again.click()
    name = alone.get_by_label("Name", exact=True)
    name.wait_for()
    assert name.input_value() == "taught-2"


def test_the_run_of_a_job_is_looked_for_again(alone: "Page", world: World) -> None:
    alone.route(f"**/jobs/{world.rewarded.id}", lambda route: route.abort())
    alone.goto(f"/rollouts?job={world.rewarded.id}")
    again = alone.get_by_role("button", name="Try again")
    again.wait_for()
    alone.unroute(f"**/jobs/{world.rewarded.id}")
    again.click()
    alone.wait_for_url(f"**/rollouts/{world.rewarded.run}*")


def test_rows_that_came_do_not_hide_that_others_did_not_until_nobody_wants_those(alone: "Page", client: Client, world: World) -> None:
    del world
    client.datasets.create("rows-of-pages")
    client.datasets.add_version("rows-of-pages", {"train": lines([chat(each) for each in pairs(250, 7)])})
    first: list[Route] = []
    alone.route("**/rows?*offset=0", lambda route: first.append(route))
    alone.route("**/rows?*offset=200", lambda route: route.abort())
    with alone.expect_request("**/rows?*offset=0"):
        alone.goto("/datasets/rows-of-pages?as=text&row=220")
    rows = alone.get_by_role("region", name=re.compile("^Rows"))
    rows.get_by_role("alert").wait_for()
    first[0].continue_()
    rows.get_by_role("option").first.get_by_text("reading…").wait_for(state="detached")
    rows.get_by_role("button", name="Try again").click()
    rows.get_by_role("button", name="Try again", exact=True).wait_for()
    rows.get_by_label("Go to row").fill("2")
    rows.get_by_label("Go to row").press("Enter")
    rows.get_by_role("alert").wait_for(state="detached")


def test_rows_that_are_refused_are_not_asked_for_again(alone: "Page", world: World) -> None:
    del world
    alone.route("**/rows?*", lambda route: route.fulfill(status=404, json={"error": {"message": "there are no such rows"}}))
    alone.goto("/datasets/chats?as=text")
    rows = alone.get_by_role("region", name=re.compile("^Rows"))
    rows.get_by_role("alert").filter(has_text="there are no such rows").wait_for()
    assert rows.get_by_role("button", name="Try again").count() == 0


def test_a_dialog_says_that_it_does_not_know_which_data_sets_there_are(alone: "Page", world: World) -> None:
    alone.goto(f"/playground?model={world.deployment}")
    alone.get_by_label("Most tokens").fill("2")
    alone.get_by_label("Message", exact=True).fill("red is moon")
    alone.get_by_label("Message", exact=True).press("Enter")
    alone.route("**/api/v1/datasets?*", lambda route: route.abort())
    alone.get_by_role("button", name="Save as example").click()
    dialog = alone.get_by_role("dialog")
    dialog.get_by_role("alert").wait_for()
    alone.unroute("**/api/v1/datasets?*")
    dialog.get_by_role("button", name="Try again").click()
    dialog.get_by_role("alert").wait_for(state="detached")
    assert dialog.locator("option[value=chats]").count() == 1


@pytest.fixture
def alone(browser: "Browser", server: LiveServer) -> Iterator["Page"]:
    """A page of which nobody minds what its console calls an error, such as something that is not there."""
    with browser.new_context(viewport=SIZE, base_url=server.url) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        log_in(page, server.key)
        yield page
