"""No page has a serious fault that axe finds, in either light."""

from typing import TYPE_CHECKING

import pytest

from tests.live import LiveServer
from tests.web.api_types import WEB
from tests.web.conftest import SIZE, WAIT_MS, log_in
from tests.web.world import World

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
SERIOUS = {"serious", "critical"}


@pytest.mark.parametrize("light", ["light", "dark"])
def test_no_page_has_a_serious_fault(browser: "Browser", server: LiveServer, world: World, light: str) -> None:
    places = [
        "/",
        "/runs",
        f"/runs/{world.rewarded.id}",
        f"/runs/compare?of={world.taught.id},{world.rewarded.id}",
        "/jobs",
        "/graders",
        "/graders/right",
        "/graders/new",
        "/rollouts",
        f"/rollouts/{world.rewarded.run}",
        "/deployments",
    ]
    places += [
        "/deployments/front",
        "/traces",
        "/playground",
        f"/labelling?evaluation={world.evaluation}",
        "/keys",
        "/datasets",
        "/datasets/chats",
        "/datasets/damaged?as=text",
        "/evaluations",
        f"/evaluations/{world.evaluation}",
        f"/evaluations/compare?of={world.evaluation}",
        "/evaluations/leaderboard",
        "/evaluations/judges",
    ]
    # The policy of the page lets no script in but its own, not that of axe either.
    context = browser.new_context(viewport=SIZE, base_url=server.url, bypass_csp=True, color_scheme=light)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    log_in(page, server.key)
    found: dict[str, list[str]] = {}
    for place in places:
        page.goto(place)
        page.get_by_role("heading", level=1).wait_for()
        page.wait_for_load_state("networkidle")
        page.add_script_tag(path=str(WEB / "node_modules" / "axe-core" / "axe.min.js"))
        said = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        faults = [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in said["violations"] if each["impact"] in SERIOUS]
        if faults:
            found[place] = faults
    context.close()
    assert not found
