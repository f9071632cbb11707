"""Texts in the tokens of their model: what is known of each is seen, pointed at, and gone through by keys."""

import json
import re
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from tests.web.world import BASE, World

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
ASKED = "red is moon"


def test_a_request_is_shown_in_the_tokens_that_the_model_read_and_sampled(page: "Page", world: World, client: Client) -> None:
    answered = client.chat(world.deployment, [{"role": "user", "content": ASKED}], max_tokens=6, ignore_eos=True)
    detail = client.spans.get(answered["id"])
    assert detail.body is not None
    assert detail.texts is not None
    assert ASKED in "".join(detail.texts.prompt)
    page.goto(f"/traces/{answered['id']}")
    request = page.get_by_role("region", name=re.compile("^Request"))
    request.get_by_role("button", name="In tokens").click()
    for part, texts in {"prompt": detail.texts.prompt, "answer": detail.texts.samples[0]}.items():
        tokens = request.get_by_role("group", name=f"tokens of the {part}").locator("span")
        tokens.first.wait_for()
        assert [re.sub("⏎(?=\n)", "", text) for text in tokens.all_text_contents()] == texts
    (sample,) = detail.body["tokens"]["samples"]
    title = request.get_by_role("group", name="tokens of the answer").locator("span").first.get_attribute("title") or ""
    token, logprob = re.findall(r"^token (\d+), sampled\nlog-probability (\S+),", title)[0]
    assert (int(token), float(logprob)) == (sample["tokens"][0], pytest.approx(sample["logprobs"][0], rel=1e-3))
    page.reload()
    request.get_by_role("group", name="tokens of the answer").wait_for()
    request.get_by_role("button", name="As text").click()
    request.get_by_text("assistant", exact=True).wait_for()


def test_a_request_whose_tokens_would_spell_what_was_replaced_says_so(page: "Page", world: World, client: Client) -> None:
    answered = client.chat(world.deployment, [{"role": "user", "content": "write to somebody@example.com"}], max_tokens=2)
    assert client.spans.get(answered["id"]).texts is None
    page.goto(f"/traces/{answered['id']}?as=tokens")
    page.get_by_text("Redaction removed the tokens").wait_for()


def test_tokens_are_gone_through_by_keys_and_each_says_what_is_known_of_it(page: "Page", world: World, client: Client) -> None:
    page.goto(f"/rollouts/{world.rewarded.run}?step=2")
    group = page.get_by_role("group", name=re.compile("^tokens of rollout")).first
    group.focus()
    told = group.locator("xpath=following-sibling::p")
    titles = [title.replace("\n", ", ") for title in group.locator("span").evaluate_all("all => all.map((each) => each.title)")]
    for key, place in {"ArrowRight": 0, "End": -1, "ArrowLeft": -2, "Home": 0}.items():
        page.keyboard.press(key)
        told.get_by_text(titles[place]).wait_for()
        assert group.locator("span.at").get_attribute("title") == group.locator("span").all()[place].get_attribute("title")
    assert "step=2" in page.url, "the arrows turn no page where they go through tokens"
    group.locator("span").nth(1).click()
    told.get_by_text(titles[1]).wait_for()
    page.get_by_role("heading", level=1).click()
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**step=3**")


def test_the_weight_of_a_token_of_a_row_is_told_without_a_pointer(page: "Page", client: Client) -> None:
    client.datasets.create("weighed")
    row = {"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "yes"}], "weight": 0.5}
    client.datasets.upload("weighed", json.dumps(row).encode(), format="jsonl")
    page.goto("/datasets/weighed")
    group = page.get_by_role("article", name="row 1").get_by_role("group", name="tokens", exact=True)
    group.focus()
    page.keyboard.press("End")
    example = client.datasets.preview("weighed", client.datasets.get("weighed").versions[0].id, model=BASE, limit=1)[0].examples[0]
    said = f"token {example.tokens[-1]}, place {len(example.tokens) - 1}, weight {example.weights[-1]:g}"
    group.locator("xpath=following-sibling::p").get_by_text(said).wait_for()
