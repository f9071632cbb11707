"""What is clicked happens, and nothing else does: whatever arrives while a button is pressed, or after a question was closed."""

import re
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from bloomery.types.resources import Price
from tests.live import wait_until
from tests.web.world import BASE, World

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Route

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
FRAMES = "() => new Promise((shown) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(shown))))"
"""What was told is in sight then."""


def test_a_press_is_no_less_of_one_where_what_arrives_meanwhile_moves_the_page(page: "Page", world: World) -> None:
    held = hold(page, "**/api/v1/spans?*", method="GET")
    page.goto(f"/deployments/{world.deployment}")
    button = page.get_by_role("button", name="Roll back to it")
    press(page, button)
    before = button.bounding_box()
    told(page, held)
    assert button.bounding_box() == before
    page.mouse.up()
    page.get_by_role("dialog", name="Roll back").get_by_role("button", name="Not now").click()
    page.get_by_role("region", name="Traffic").locator("canvas").first.wait_for()


def test_a_press_that_never_ends_keeps_nothing_back_for_long(page: "Page", world: World) -> None:
    held = hold(page, "**/api/v1/spans?*", method="GET")
    page.goto(f"/deployments/{world.deployment}")
    press(page, page.get_by_role("heading", level=1))
    told(page, held)
    page.get_by_role("region", name="Traffic").locator("canvas").first.wait_for()


def test_a_row_stays_under_the_pointer_that_presses_it_while_others_come(page: "Page", client: Client) -> None:
    client.keys.create("pressed", ["read"])
    page.goto("/keys")
    page.get_by_text("live", exact=True).wait_for()
    page.get_by_role("columnheader", name="Name").get_by_role("button").click()
    press(page, page.get_by_role("row").filter(has_text="pressed").get_by_role("button", name="Revoke"))
    with page.expect_response(re.compile(r"/api/v1/keys\?")) as answered:
        client.keys.create("a-key-before-it", ["read"])
    answered.value.finished()
    page.evaluate(FRAMES)
    page.mouse.up()
    page.get_by_role("dialog", name="Revoke pressed").get_by_role("button", name="Keep it").click()
    page.get_by_role("row").filter(has_text="a-key-before-it").wait_for()


def test_a_question_stays_open_and_has_the_focus_whatever_changes_behind_it(page: "Page", world: World, client: Client) -> None:
    client.deployments.create("changes", BASE)
    page.goto("/deployments")
    page.get_by_text("live", exact=True).wait_for()
    page.get_by_role("button", name="New deployment").click()
    name = page.get_by_role("dialog").get_by_label("Name that callers give")
    name.fill("half wri")
    with page.expect_response(re.compile(r"/api/v1/deployments\?")) as answered:
        client.deployments.set_price("changes", Price(prompt_usd_per_mtok=3, completion_usd_per_mtok=7))
    answered.value.finished()
    page.get_by_role("row", include_hidden=True).filter(has_text="$3 + $7").wait_for()
    page.keyboard.type("tten")
    assert name.input_value() == "half written"


def test_what_ends_closes_its_own_question_and_no_other(page: "Page", world: World, client: Client) -> None:
    assert world.rewarded.result is not None
    client.deployments.create("asked", BASE)
    client.deployments.promote("asked", str(client.deployments.get(world.deployment).revisions[-1].version), {})
    page.goto("/deployments/asked")
    held = hold(page, "**/rollback", method="POST")
    page.get_by_role("button", name="Roll back to it").click()
    page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
    page.get_by_role("dialog").get_by_role("button", name="Not now").click()
    page.get_by_label("Version to make live").select_option(world.rewarded.result.version)
    page.get_by_role("button", name="Make live").click()
    told(page, held)
    page.get_by_role("region", name="Live", include_hidden=True).get_by_text("revision 1").wait_for()
    page.get_by_role("dialog", name="Make live").get_by_role("button", name="Make live").wait_for()


def test_who_has_closed_a_question_is_led_nowhere_by_its_answer(page: "Page", client: Client) -> None:
    page.goto("/deployments")
    held = hold(page, "**/api/v1/deployments", method="POST")
    page.get_by_role("button", name="New deployment").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name that callers give").fill("left-behind")
    dialog.get_by_label("Version").select_option(BASE)
    dialog.get_by_role("button", name="Deploy").click()
    dialog.get_by_role("button", name="Not now").click()
    page.get_by_role("link", name="Keys", exact=True).click()
    page.get_by_role("heading", name="Keys").wait_for()
    told(page, held)
    assert client.deployments.get("left-behind").live.number == 1
    assert page.url.endswith("/keys")


def hold(page: "Page", pattern: str, *, method: str) -> "list[Route]":
    """Requests of that kind: they are under way until `told`."""
    held: list[Route] = []
    page.route(pattern, lambda route: held.append(route) if route.request.method == method else route.fallback())
    return held


def told(page: "Page", held: "list[Route]") -> None:
    """Have the first of them answered, and the page do what it does of it."""
    wait_until(lambda: page.evaluate(FRAMES) or bool(held))
    with page.expect_event("requestfinished", lambda request: request == held[0].request):
        held[0].continue_()
    page.evaluate(FRAMES)


def press(page: "Page", button: "Locator") -> None:
    button.scroll_into_view_if_needed()
    box = button.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
