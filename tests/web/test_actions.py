"""What pages do, beyond what they show: each is clicked, and looked for where the server keeps it."""

import re
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from tests.web.world import BASE, World

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]


def test_a_deployment_has_a_price_and_what_it_serves_from_then_on_a_cost(page: "Page", world: World, client: Client) -> None:
    client.deployments.create("priced", BASE)
    before = client.chat("priced", [{"role": "user", "content": "red is moon"}], max_tokens=4)
    page.goto("/traces?deployment=priced")
    page.get_by_role("status", name="what these requests come to").get_by_text("bloomery deployment price").wait_for()
    page.goto("/deployments/priced")
    price = page.get_by_role("region", name="Price and cost")
    price.get_by_text("bloomery deployment price priced").wait_for()
    price.get_by_role("button", name="Set a price").click()
    price.get_by_label("Prompts").fill("1000")
    price.get_by_label("Answers").fill("500000")
    price.get_by_role("button", name="Set it").click()
    price.get_by_text("$1000 + $500000").wait_for()
    after = client.chat("priced", [{"role": "user", "content": "blue is sun"}], max_tokens=4)
    usage = after["usage"]
    cost = (usage["prompt_tokens"] * 1000 + usage["completion_tokens"] * 500_000) / 1e6
    assert client.spans.get(after["id"]).span.cost_usd == pytest.approx(cost)
    price.get_by_text("1 of 2 requests").wait_for()
    page.goto("/deployments")
    page.get_by_role("row").filter(has_text="priced").get_by_text(f"${cost:.2f}").wait_for()
    page.goto("/traces?deployment=priced")
    rows = page.get_by_role("region", name="requests", exact=True).locator("tbody tr")
    rows.nth(1).wait_for()
    page.get_by_label("first the").select_option("dearest")
    rows.nth(1).wait_for(state="detached")
    assert f"${cost:.2f}" in rows.first.inner_text()
    page.get_by_label("first the").select_option("newest")
    page.get_by_label("costing at least $").fill("0.000001")
    page.get_by_label("costing at least $").press("Enter")
    rows.nth(1).wait_for(state="detached")
    page.get_by_role("status", name="what these requests come to").get_by_text(re.compile(r"^1 requests: ")).wait_for()
    rows.first.click()
    page.get_by_role("region", name=re.compile("^Request")).get_by_text(f"tokens · ${cost:.2f}").wait_for()
    assert client.spans.get(before["id"]).span.cost_usd is None
    page.goto("/deployments/priced")
    price.get_by_role("button", name="Change the price").click()
    price.get_by_role("button", name="Forget it").click()
    price.get_by_text("Nobody said what its tokens cost").wait_for()
    assert client.deployments.get("priced").price is None
