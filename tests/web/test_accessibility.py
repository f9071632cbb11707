"""No page, and no question in front of one, has a serious fault that axe finds, in either light."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from tests.live import LiveServer
from tests.web.api_types import WEB
from tests.web.conftest import SIZE, WAIT_MS, log_in
from tests.web.test_data_pages import dropped, rows
from tests.web.world import BASE, World, places

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
SERIOUS = {"serious", "critical"}
Question = tuple[str, "str | Callable[[Page], None]"]
"""Where it is asked, and the button that has it asked, or what else does."""
PAYS_ANYTHING = {"type": "function", "source": "def score(output):\n    return float(len(output) > 3)\n", "entry": "score"}


@pytest.fixture(params=["light", "dark"])
def looked_at(browser: "Browser", server: LiveServer, request: pytest.FixtureRequest) -> "Iterator[Page]":
    """A page that lets axe in, which its policy does not; nobody is logged in."""
    with browser.new_context(viewport=SIZE, base_url=server.url, bypass_csp=True, color_scheme=request.param) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        yield page


@pytest.fixture(scope="module")
def questions(world: World, client: Client) -> list[Question]:
    consents = client.chat(world.deployment, [{"role": "user", "content": "red is moon"}], max_tokens=4, headers={"x-bloomery-consent": "train"})
    client.graders.create("pays-anything", PAYS_ANYTHING)
    client.graders.attack("pays-anything", dataset="prompts")
    client.keys.create("revocable", ["read"])
    client.deployments.create("unpriced", BASE)
    return [
        ("/keys", "New key"),
        ("/keys", made_key),
        ("/keys", "Revoke"),
        ("/deployments", "New deployment"),
        ("/deployments/unpriced", "Set a price"),
        (f"/deployments/{world.deployment}", "Roll back to it"),
        (f"/runs/{world.taught.id}", "Deploy"),
        ("/evaluations", "New evaluation"),
        (f"/evaluations/{world.evaluation}", "Run again"),
        (f"/evaluations/{world.evaluation}", "Delete"),
        ("/datasets", upload),
        ("/datasets/chats", "Split"),
        ("/datasets/chats", "Curate from traffic"),
        ("/datasets/chats", "Delete"),
        (f"/rollouts/{world.rewarded.run}", chosen),
        (f"/traces/{consents['id']}", "Add to a data set"),
        ("/graders/pays-anything", "Waive…"),
        ("/graders/new", half_written),
    ]


@pytest.fixture(scope="module")
def strangers_key(client: Client) -> str:
    return client.keys.create("looks-in", ["read"], project="beside").key


def test_no_page_has_a_serious_fault(looked_at: "Page", server: LiveServer, world: World) -> None:
    log_in(looked_at, server.key)
    found: dict[str, list[str]] = {}
    for place in places(world):
        looked_at.goto(place)
        looked_at.get_by_role("heading", level=1).wait_for()
        looked_at.wait_for_load_state("networkidle")
        if faults := faults_of(looked_at):
            found[place] = faults
    assert not found


def test_no_question_in_front_of_a_page_has_a_serious_fault(looked_at: "Page", server: LiveServer, questions: list[Question]) -> None:
    log_in(looked_at, server.key)
    found: dict[str, list[str]] = {}
    for place, button in questions:
        looked_at.goto(place)
        looked_at.get_by_role("heading", level=1).wait_for()
        if isinstance(button, str):
            looked_at.get_by_role("button", name=button, exact=True).first.click()
        else:
            button(looked_at)
        looked_at.get_by_role("dialog").or_(looked_at.get_by_label("Prompts")).first.wait_for()
        looked_at.wait_for_load_state("networkidle")
        if faults := faults_of(looked_at):
            found[f"{place}: {button}"] = faults
    assert not found


def test_no_login_has_a_serious_fault(looked_at: "Page", server: LiveServer, strangers_key: str) -> None:
    looked_at.goto("/")
    looked_at.get_by_label("API key").wait_for()
    assert not faults_of(looked_at)
    looked_at.goto("about:blank")
    looked_at.goto(f"/#key={server.key}")
    looked_at.get_by_role("button", name="Log in to default").wait_for()
    assert not faults_of(looked_at)
    looked_at.get_by_role("button", name="Log in to default").click()
    looked_at.get_by_role("heading", name="Home").wait_for()
    looked_at.goto("about:blank")
    looked_at.goto(f"/#key={strangers_key}")
    looked_at.get_by_role("button", name="Change to beside").wait_for()
    assert not faults_of(looked_at)


def made_key(page: "Page") -> None:
    page.get_by_role("button", name="New key").click()
    page.get_by_role("dialog").get_by_label("Name").fill(f"looked-at-{page.evaluate('document.documentElement.dataset.light')}")
    page.get_by_role("button", name="Create").click()
    page.get_by_role("button", name="Copy").wait_for()


def upload(page: "Page") -> None:
    dropped(page, "rows.jsonl", "\n".join([*rows(4), "nothing"])).get_by_text("not_json", exact=True).wait_for()


def chosen(page: "Page") -> None:
    page.get_by_role("article").get_by_role("checkbox").first.check()
    page.get_by_role("button", name="To a data set 1").click()


def half_written(page: "Page") -> None:
    page.get_by_label("Source").fill("def score(output):\n")
    page.get_by_role("link", name="Keys", exact=True).click()


def faults_of(page: "Page") -> list[str]:
    """The serious ones, each with an element that has it."""
    # What is dimmed because something newer is on its way is not what is looked at.
    page.wait_for_function("() => !document.querySelector('[aria-busy=true]')")
    page.add_script_tag(path=str(WEB / "node_modules" / "axe-core" / "axe.min.js"))
    said = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in said["violations"] if each["impact"] in SERIOUS]
