"""From a file to an answer, by clicking alone: a job that learns what is said, and one that is rewarded."""

import re
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from tests.jobs.test_methods_live import GRADER, chat, lines, pairs, prompt
from tests.web.test_data_pages import dropped
from tests.web.world import BASE

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(900)]
TRAINED_MS = 240_000


def test_supervised_from_upload_to_deployment(page: "Page", client: Client) -> None:
    upload(page, "journey-chats", lines([chat(each) for each in pairs(64, 41)]))
    turn_to(page, "Jobs")
    page.get_by_label("Name", exact=True).fill("journey-taught")
    page.get_by_label("Base model").select_option(BASE)
    page.get_by_label("Data set").select_option("journey-chats")
    page.get_by_label("Epochs").fill("1")
    page.get_by_label("Learning rate").fill("0.003")
    page.get_by_label("Learning rate").press("Tab")
    follow(page, "journey-taught", shows="Loss")
    deploy(page, client, "journey-taught")


def test_reinforced_from_upload_over_rollouts_to_deployment(page: "Page", client: Client) -> None:
    upload(page, "journey-prompts", lines([prompt(each) for each in pairs(32, 42)]))
    turn_to(page, "Graders")
    page.get_by_role("link", name="New grader").click()
    page.get_by_label("Name").fill("journey-grader")
    page.get_by_label("Source").fill(GRADER)
    page.get_by_role("button", name="Keep", exact=True).click()
    page.get_by_role("heading", name="journey-grader").wait_for()
    turn_to(page, "Jobs")
    page.get_by_role("radio", name=re.compile("Reinforcement")).check(force=True)
    page.get_by_label("Name", exact=True).fill("journey-rewarded")
    page.get_by_label("Base model").select_option(BASE)
    page.get_by_label("Data set").select_option("journey-prompts")
    page.get_by_label("Grader", exact=True).select_option("journey-grader")
    for field, value in {"Steps": "2", "Groups per step": "4", "Group size": "4"}.items():
        page.get_by_label(field, exact=True).fill(value)
        page.get_by_label(field, exact=True).press("Tab")
    page.locator('[id="field-method.max_tokens"]').fill("48")
    page.locator('[id="field-method.max_tokens"]').press("Tab")
    follow(page, "journey-rewarded", shows="Reward")
    page.get_by_role("link", name="step by step").click()
    group = page.get_by_role("region", name=re.compile(r"^group \d+$")).first
    group.wait_for()
    shown = group.get_by_role("group", name=re.compile("tokens of rollout")).first
    assert "log-probability" in (shown.locator("span").first.get_attribute("title") or "")
    page.get_by_label("Colour by").select_option("loss mask")
    group.get_by_role("checkbox").first.check()
    page.get_by_role("button", name="To a data set 1").click()
    page.get_by_role("dialog").get_by_label("Data set").fill("journey-kept")
    page.get_by_role("button", name="Keep them").click()
    page.get_by_text("version 1 of journey-kept").wait_for()
    page.get_by_role("button", name="Done").click()
    page.get_by_role("link", name="Curves").click()
    page.get_by_role("region", name="Reward", exact=True).locator("canvas").wait_for()
    deploy(page, client, "journey-rewarded")


def turn_to(page: "Page", name: str) -> None:
    page.get_by_role("navigation", name="Pages").get_by_role("link", name=name, exact=True).click()


def upload(page: "Page", name: str, text: str) -> None:
    turn_to(page, "Data sets")
    page.get_by_role("heading", name="Data sets").wait_for()
    dialog = dropped(page, "rows.jsonl", text)
    dialog.get_by_label("Data set").fill(name)
    dialog.get_by_label("Held out: eval").fill("10")
    dialog.get_by_role("button", name=re.compile("^Store")).click()
    page.get_by_role("heading", name=name).wait_for()


def follow(page: "Page", name: str, *, shows: str) -> None:
    """Start what the form has, once it says what it would take, and see it end."""
    page.get_by_role("complementary", name="What it would take").get_by_text("Steps", exact=True).wait_for()
    page.get_by_role("button", name="Start the job").click()
    page.get_by_role("heading", name=name).wait_for()
    page.get_by_role("region", name=shows, exact=True).locator("canvas").wait_for(timeout=TRAINED_MS)
    page.get_by_role("region", name="What came of it").wait_for(timeout=TRAINED_MS)
    page.get_by_text("succeeded", exact=True).first.wait_for()


def deploy(page: "Page", client: Client, name: str) -> None:
    """Put what came of it live, and ask it."""
    page.get_by_role("button", name="Deploy", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Deploy", exact=True).click()
    page.get_by_role("region", name="Live").get_by_text("revision 1").wait_for(timeout=60_000)
    page.get_by_role("link", name="Try it").first.click()
    page.get_by_label("Message", exact=True).fill("red is moon")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("group", name="answer").locator("span").first.wait_for()
    assert client.deployments.get(name).live.number == 1
