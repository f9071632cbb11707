"""What is clicked happens, and nothing else does: whatever arrives late, while a button is pressed, or after a question was closed."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from bloomery.types.resources import Price
from tests.live import wait_until
from tests.web.world import BASE, World, places

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Route

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
PRICE = Price(prompt_usd_per_mtok=3, completion_usd_per_mtok=7)
FRAMES = "() => new Promise((shown) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(shown))))"
"""What was told is in sight then."""
PRESSES = Path(__file__).parents[2] / "web" / "src" / "lib" / "press.ts"
LATE = """
const asked = fetch;
let begun = 0;
window.under_way = 0;
window.moved = [];
// One answer behind the other, each as late as if the server had been busy.
window.fetch = async (...given) => {
    const late_ms = 60 * (begun++ % 12);
    window.under_way++;
    try {
        const answer = await asked(...given);
        await new Promise((done) => setTimeout(done, late_ms));
        return answer;
    } finally {
        setTimeout(() => window.under_way--, 60);
    }
};
const places = new Map();
// By what they are called: what is made anew is another element, and the same to whoever is about to click it.
let called = new Map();
const look = () => {
    const now = new Map();
    for (const each of document.querySelectorAll("main :is(button, a, input, select, textarea, summary)")) {
        const { top, height } = each.getBoundingClientRect();
        if (height === 0) continue;
        const words = `${each.getAttribute("aria-label") ?? each.textContent.trim().slice(0, 40)} (${each.tagName})`;
        let name = words;
        for (let number = 2; now.has(name); number++) name = `${words} ${number}`;
        const gone = called.get(name);
        const before = places.get(each) ?? (gone && !gone.each.isConnected ? gone.top : undefined);
        if (before !== undefined && before < innerHeight && Math.abs(top - before) > 3) moved.push(`${name}: ${before} to ${top}`);
        places.set(each, top);
        now.set(name, { each, top });
    }
    // What is away for a moment is remembered.
    called = new Map([...called, ...now]);
    requestAnimationFrame(look);
};
document.addEventListener("DOMContentLoaded", look);
"""
"""Notes what in sight can be clicked and changes its place, while answers come one by one."""


def test_a_press_is_no_less_of_one_where_what_arrives_meanwhile_moves_the_page(page: "Page", world: World, client: Client) -> None:
    page.add_init_script(patient())
    # All of it in sight: a page that is scrolled to its end moves above that.
    page.set_viewport_size({"width": 1280, "height": 1400})
    page.goto(deployed_twice(client, world, "moves"))
    page.get_by_role("navigation").get_by_text("live", exact=True).wait_for()
    button = page.get_by_role("button", name="Roll back to it")
    press(page, button)
    before = button.bounding_box()
    with page.expect_response("**/api/v1/deployments/moves") as answered:
        client.deployments.set_price("moves", PRICE)
    answered.value.finished()
    page.evaluate(FRAMES)
    assert button.bounding_box() == before
    page.mouse.up()
    page.get_by_role("dialog", name="Roll back").get_by_role("button", name="Not now").click()
    page.get_by_text("$3.00 + $7.00 for a million tokens").wait_for()
    assert button.bounding_box() != before


def test_a_press_that_never_ends_keeps_nothing_back_for_long(page: "Page", world: World, client: Client) -> None:
    page.goto(deployed_twice(client, world, "held"))
    page.get_by_role("navigation").get_by_text("live", exact=True).wait_for()
    press(page, page.get_by_role("heading", level=1))
    client.deployments.set_price("held", PRICE)
    page.get_by_text("$3.00 + $7.00 for a million tokens").wait_for()


def test_a_row_stays_under_the_pointer_that_presses_it_while_others_come(page: "Page", client: Client) -> None:
    page.add_init_script(patient())
    client.keys.create("pressed", ["read"])
    page.goto("/keys")
    page.get_by_role("navigation").get_by_text("live", exact=True).wait_for()
    page.get_by_role("columnheader", name="Name").get_by_role("button").click()
    press(page, page.get_by_role("row").filter(has_text="pressed").get_by_role("button", name="Revoke"))
    with page.expect_response(re.compile(r"/api/v1/keys\?")) as answered:
        client.keys.create("a-key-before-it", ["read"])
    answered.value.finished()
    page.evaluate(FRAMES)
    page.mouse.up()
    page.get_by_role("dialog", name="Revoke pressed").get_by_role("button", name="Keep it").click()
    page.get_by_role("row").filter(has_text="a-key-before-it").wait_for()


def test_nothing_that_can_be_clicked_changes_its_place_as_answers_come_in(page: "Page", world: World) -> None:
    page.add_init_script(LATE)
    moved: dict[str, list[str]] = {}
    for place in places(world):
        page.goto(place)
        page.get_by_role("heading", level=1).wait_for()
        # What has arrived may make the page ask for more.
        for _ in range(2):
            page.wait_for_function("() => under_way === 0")
            page.evaluate(FRAMES)
        if found := page.evaluate("moved"):
            moved[place] = found[:5]
    assert not moved


def test_a_question_stays_open_and_has_the_focus_whatever_changes_behind_it(page: "Page", world: World, client: Client) -> None:
    client.deployments.create("changes", BASE)
    page.goto("/deployments")
    page.get_by_role("navigation").get_by_text("live", exact=True).wait_for()
    page.get_by_role("button", name="New deployment").click()
    name = page.get_by_role("dialog").get_by_label("Name that callers give")
    name.fill("half wri")
    with page.expect_response(re.compile(r"/api/v1/deployments\?")) as answered:
        client.deployments.set_price("changes", PRICE)
    answered.value.finished()
    page.get_by_role("row", include_hidden=True).filter(has_text="changes").get_by_text("$3.00 + $7.00").wait_for()
    page.keyboard.type("tten")
    assert name.input_value() == "half written"


def test_what_ends_closes_its_own_question_and_no_other(page: "Page", world: World, client: Client) -> None:
    assert world.rewarded.result is not None
    page.goto(deployed_twice(client, world, "asked"))
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


def test_a_key_whose_form_was_closed_is_shown_and_closes_no_other_form(page: "Page") -> None:
    page.goto("/keys")
    held = hold(page, "**/api/v1/keys", method="POST")
    form = page.get_by_role("dialog", name="New key")
    page.get_by_role("button", name="New key").click()
    form.get_by_label("Name", exact=True).fill("of-a-closed-form")
    form.get_by_role("button", name="Create").click()
    form.get_by_role("button", name="Not now").click()
    page.get_by_role("button", name="New key").click()
    form.get_by_label("Name", exact=True).fill("half written")
    told(page, held)
    secret = page.get_by_role("dialog", name="Key of-a-closed-form")
    secret.get_by_text(re.compile("^tml-")).wait_for()
    secret.get_by_role("button", name="Done").click()
    assert form.get_by_label("Name", exact=True).input_value() == "half written"


def test_a_key_whose_page_was_left_is_shown_to_who_comes_back(page: "Page") -> None:
    page.goto("/keys")
    held = hold(page, "**/api/v1/keys", method="POST")
    form = page.get_by_role("dialog", name="New key")
    page.get_by_role("button", name="New key").click()
    form.get_by_label("Name", exact=True).fill("of-a-page-that-was-left")
    form.get_by_role("button", name="Create").click()
    form.get_by_role("button", name="Not now").click()
    page.get_by_role("link", name="Deployments", exact=True).click()
    page.get_by_role("heading", name="Deployments").wait_for()
    told(page, held)
    assert page.get_by_role("dialog").count() == 0
    page.get_by_role("link", name="Keys", exact=True).click()
    secret = page.get_by_role("dialog", name="Key of-a-page-that-was-left")
    secret.get_by_text(re.compile("^tml-")).wait_for()
    secret.get_by_role("button", name="Done").click()
    assert page.get_by_role("dialog").count() == 0


def test_a_price_that_is_set_closes_its_own_form_and_no_other(page: "Page", client: Client) -> None:
    client.deployments.create("asked-for-a-price", BASE)
    page.goto("/deployments/asked-for-a-price")
    held = hold(page, "**/price", method="POST")
    price = page.get_by_role("region", name="Price and cost")
    price.get_by_role("button", name="Set a price").click()
    price.get_by_label("Prompts").fill("3")
    price.get_by_label("Answers").fill("7")
    price.get_by_role("button", name="Set it").click()
    price.get_by_role("button", name="Not now").click()
    price.get_by_role("button", name="Set a price").click()
    price.get_by_label("Prompts").fill("11")
    told(page, held)
    price.get_by_text("$3.00 + $7.00 for a million tokens").wait_for()
    assert price.get_by_label("Prompts").input_value() == "11"


def test_a_waiver_closes_its_own_question_and_no_other(page: "Page", world: World, client: Client) -> None:
    client.graders.create("pays-late", {"type": "function", "source": "def score(output):\n    return float(len(output) > 3)\n", "entry": "score"})
    assert client.graders.attack("pays-late", dataset="prompts").verdict == "hackable"
    page.goto("/graders/pays-late")
    held = hold(page, "**/waive", method="POST")
    question = page.get_by_role("dialog")
    page.get_by_role("button", name="Waive…").click()
    question.get_by_label("Reason").fill("a test is to be long")
    question.get_by_role("button", name="Waive").click()
    question.get_by_role("button", name="Not now").click()
    page.get_by_role("button", name="Waive…").click()
    told(page, held)
    page.get_by_text("Waived by").wait_for()
    question.get_by_role("button", name="Not now").click()


def test_who_kept_an_evaluation_after_all_is_led_nowhere_and_asked_what_he_was_asked(page: "Page", world: World) -> None:
    page.goto(f"/evaluations/{world.evaluation}")
    held = hold(page, f"**/api/v1/evaluations/{world.evaluation}", method="DELETE")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete it").click()
    page.get_by_role("dialog").get_by_role("button", name="Keep it").click()
    page.get_by_role("button", name="Run again").click()
    told(page, held, status=204)
    page.get_by_role("dialog", name="New evaluation").get_by_role("button", name="Not now").click()
    assert page.url.endswith(world.evaluation)


def test_who_has_left_a_form_is_led_nowhere_by_what_was_made_of_it(page: "Page", world: World, client: Client) -> None:
    page.goto("/jobs")
    held = hold(page, "**/api/v1/jobs", method="POST")
    page.get_by_label("Name", exact=True).fill("left-alone")
    page.get_by_label("Data set").select_option("chats")
    page.get_by_role("button", name="Start the job").click()
    _leave(page, held)
    client.jobs.cancel("left-alone")
    page.goto("/graders/new")
    held = hold(page, "**/api/v1/graders", method="POST")
    page.get_by_label("Name", exact=True).fill("left-too")
    page.get_by_role("button", name="Keep", exact=True).click()
    _leave(page, held)
    assert client.graders.get("left-too").version == 1


def _leave(page: "Page", held: "list[Route]") -> None:
    page.get_by_role("link", name="Keys", exact=True).click()
    page.get_by_role("heading", name="Keys").wait_for()
    told(page, held)
    assert page.url.endswith("/keys")


def deployed_twice(client: Client, world: World, name: str) -> str:
    """The address of a deployment with something to go back to, and without a price."""
    assert world.taught.result is not None
    client.deployments.create(name, BASE)
    client.deployments.promote(name, world.taught.result.version, {})
    return f"/deployments/{name}"


def hold(page: "Page", pattern: str, *, method: str) -> "list[Route]":
    """Requests of that kind: they are under way until `told`."""
    held: list[Route] = []
    page.route(pattern, lambda route: held.append(route) if route.request.method == method else route.fallback())
    return held


def told(page: "Page", held: "list[Route]", *, status: int | None = None) -> None:
    """Have the first of them answered, and the page do what it does of it. With a status the server is not asked, and that is the answer."""
    wait_until(lambda: page.evaluate(FRAMES) or bool(held))
    with page.expect_event("requestfinished", lambda request: request == held[0].request):
        if status is None:
            held[0].continue_()
        else:
            held[0].fulfill(status=status)
    page.evaluate(FRAMES)


def patient() -> str:
    """What makes a press last a minute before it counts for none: on a slow machine the server takes long to answer beneath it."""
    (longest_ms,) = re.findall(r"const LONGEST_MS = ([\d_]+)", PRESSES.read_text())
    return f"const timer = setTimeout; window.setTimeout = (run, ms, ...given) => timer(run, ms === {int(longest_ms)} ? 60_000 : ms, ...given);"


def press(page: "Page", button: "Locator") -> None:
    button.scroll_into_view_if_needed()
    box = button.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
