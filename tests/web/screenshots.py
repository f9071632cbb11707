"""The pictures of `docs/dashboard.md`: `python -m tests.web.screenshots` takes them again, of a server with something on every page."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from playwright.sync_api import Page, expect, sync_playwright

from bloomery.client import Client
from bloomery.types.resources import Price
from tests.jobs.test_methods_live import asked, pairs
from tests.live import running_server
from tests.web.conftest import SIZE, WAIT_MS, log_in
from tests.web.world import BASE, World, build

TALL: Final = {"dataset": 1232, "price": 900, "traces": 1100}
"""Pages whose point is further down."""
PLACE: Final = Path(__file__).parents[2] / "docs" / "dashboard"


def main() -> None:
    """Overwrite them."""
    found = shutil.which("chromium") or sys.exit("Chromium is not installed: run `make test-web`")
    PLACE.mkdir(exist_ok=True)
    with TemporaryDirectory() as scratch, running_server(Path(scratch) / "data", jobs=1) as server, Client(server.url, server.key) as client:
        world = build(client, "by hand")
        with_costs(client)
        with_others(client, world)
        run = world.rewarded.run
        pages = {
            "home": ("/", "light"),
            "run": (f"/runs/{world.taught.id}", "light"),
            "rollouts": (f"/rollouts/{run}?colour=advantage", "light"),
            "dataset": ("/datasets/chats?row=3", "light"),
            "evaluation": (f"/evaluations/{world.evaluation}", "dark"),
            "job": ("/jobs?dataset=chats", "dark"),
            "traces": ("/traces?deployment=front", "light"),
            "price": ("/deployments/front", "light"),
            "pairs": (f"/labelling?evaluation={world.evaluation}&mode=pairs", "dark"),
            "compare": (f"/runs/compare?of={world.taught.id},{world.rewarded.id}", "light"),
            "grader": ("/graders/right", "dark"),
            "playground": ("/playground?model=front&beside=plain", "light"),
        }
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
            for name, (place, light) in pages.items():
                size: Any = SIZE | {"height": TALL.get(name, SIZE["height"])}
                page = browser.new_context(viewport=size, base_url=server.url, color_scheme=light).new_page()
                page.set_default_timeout(WAIT_MS)
                log_in(page, server.key)
                page.goto(place)
                page.get_by_role("navigation").get_by_text("live", exact=True).wait_for()
                POSED.get(name, lambda _: None)(page)
                page.wait_for_timeout(2_000)
                page.screenshot(path=PLACE / f"{name}.png")
            browser.close()


def with_costs(client: Client) -> None:
    """Traffic before there was a price, and behind it."""
    client.deployments.set_price("front", Price(prompt_usd_per_mtok=0.15, cached_prompt_usd_per_mtok=0.03, completion_usd_per_mtok=0.6))
    for number, given in enumerate(pairs(12, 6)):
        answer = client.chat("front", asked(given), max_tokens=48, seed=number, headers={"x-bloomery-consent": "train"} if number % 3 else {})
        if number % 2:
            client.feedback(answer["id"], "helpful", number % 4 == 1)


def with_others(client: Client, world: World) -> None:
    """Deployments beside it: of what was rewarded, and of the base model."""
    assert world.rewarded.result is not None
    client.deployments.create("next", world.rewarded.result.version)
    client.deployments.create("plain", BASE)


def named(page: Page) -> None:
    """What it would take is said of a job that has a name."""
    page.get_by_label("Name", exact=True).fill("colours")
    page.get_by_role("complementary", name="What it would take").locator("dl[aria-busy=false]").wait_for()


def answered(page: Page) -> None:
    """Both sides have answered the same question."""
    page.get_by_label("System message").fill("Write as JSON.")
    page.get_by_label("Most tokens").fill("48")
    page.get_by_label("Message", exact=True).fill("fish is iron, green is chair")
    page.get_by_label("Message", exact=True).press("Enter")
    for side in ("left", "right"):
        page.get_by_role("region", name=side).get_by_text("tokens in").wait_for()


def tried(page: Page) -> None:
    """Scores of sample rows stand beside them."""
    page.get_by_label("Rows of a data set").select_option("prompts")
    sampled = page.get_by_role("region", name="Try it")
    for number in (1, 2):
        fields = sampled.get_by_label(f"fields of row {number}")
        expect(fields).to_have_value(re.compile("pairs"), timeout=WAIT_MS)
        right = json.loads(fields.input_value())["pairs"]
        said = right if number == 1 else dict.fromkeys(right, "red")
        sampled.get_by_label(f"output {number}", exact=True).fill(json.dumps(said))
    sampled.get_by_role("button", name="Run").click()
    sampled.locator("td.number b").first.wait_for()


POSED: Final[dict[str, Callable[[Page], object]]] = {
    "home": lambda page: page.get_by_role("link", name="what job taught ended with").first.wait_for(),
    "grader": tried,
    "job": named,
    "playground": answered,
    "price": lambda page: page.get_by_role("button", name="Change the price").click(),
    "traces": lambda page: page.get_by_role("row").filter(has_text="helpful: true").first.click(),
}
"""What is done on a page before its picture is taken."""


if __name__ == "__main__":
    main()
