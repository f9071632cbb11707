"""The pictures of `docs/dashboard.md`: `python -m tests.web.screenshots` takes them again, of a server with something on every page."""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from playwright.sync_api import sync_playwright

from bloomery.client import Client
from tests.live import running_server
from tests.web.conftest import SIZE, WAIT_MS, log_in
from tests.web.world import build

TALL: Final = {"dataset": 1232}
"""Pages whose point is further down."""
PLACE: Final = Path(__file__).parents[2] / "docs" / "dashboard"


def main() -> None:
    """Overwrite them."""
    found = shutil.which("chromium") or sys.exit("Chromium is not installed: run `make test-web`")
    PLACE.mkdir(exist_ok=True)
    with TemporaryDirectory() as scratch, running_server(Path(scratch) / "data", jobs=1) as server, Client(server.url, server.key) as client:
        world = build(client, "by hand")
        run = world.rewarded.run
        pages = {
            "home": ("/", "light"),
            "run": (f"/runs/{world.taught.id}", "light"),
            "rollouts": (f"/rollouts/{run}?colour=advantage", "light"),
            "dataset": ("/datasets/chats?row=3", "light"),
            "evaluation": (f"/evaluations/{world.evaluation}", "dark"),
            "job": ("/jobs?dataset=chats", "dark"),
        }
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
            for name, (place, light) in pages.items():
                size: Any = SIZE | {"height": TALL.get(name, SIZE["height"])}
                page = browser.new_context(viewport=size, base_url=server.url, color_scheme=light).new_page()
                page.set_default_timeout(WAIT_MS)
                log_in(page, server.key)
                page.goto(place)
                page.get_by_text("live", exact=True).wait_for()
                if name == "job":
                    # What it would take is said of a job that has one.
                    page.get_by_label("Name", exact=True).fill("colours")
                    page.get_by_role("complementary", name="What it would take").locator("dl[aria-busy=false]").wait_for()
                page.wait_for_timeout(2_000)
                page.screenshot(path=PLACE / f"{name}.png")
            browser.close()


if __name__ == "__main__":
    main()
