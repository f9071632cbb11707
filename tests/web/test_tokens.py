"""Texts in the tokens of their model: what is known of each is seen, pointed at, and gone through by keys."""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from bloomery.client import Client
from tests.web.world import BASE, World

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Route

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


def test_of_a_long_request_the_end_of_the_prompt_and_the_beginning_of_the_answer_are_shown_until_somebody_asks(page: "Page", world: World) -> None:
    def longer(detail: dict[str, Any]) -> None:
        kept = {"prompt": [*range(3000)], "samples": [{"tokens": [*range(2001)], "logprobs": [-1.0] * 2001}]}
        detail["body"]["tokens"] = detail["body"]["tokens"] | kept
        detail["texts"] = {"prompt": ["p"] * 3000, "samples": [["a"] * 2001]}

    page.route(f"**/spans/{world.request}", changing(longer))
    page.goto(f"/traces/{world.request}?as=tokens")
    prompt, answer = (page.get_by_role("region", name=f"tokens of the {part}") for part in ("prompt", "answer"))
    prompt.get_by_text("the last 2,000 tokens of it", exact=True).wait_for()
    assert (titles(prompt)[0], len(titles(prompt)), titles(prompt)[-1]) == ("token 1000, not sampled", 2000, "token 2999, not sampled")
    prompt.get_by_role("button", name="Show 1,000 more tokens").click()
    prompt.get_by_role("button").wait_for(state="detached")
    assert (len(titles(prompt)), len(titles(answer))) == (3000, 2000)
    answer.get_by_role("button", name="Show 1 more token", exact=True).click()
    answer.get_by_role("button").wait_for(state="detached")
    assert len(titles(answer)) == 2001


def test_parts_of_a_long_rollout_share_what_is_shown_of_it_until_somebody_asks(page: "Page", world: World) -> None:
    def longer(step: dict[str, Any]) -> None:
        first = step["data"][0]["rollouts"][0]
        segment = first["segments"][0]
        fields = ("tokens", "texts", "sampled", "logprobs", "advantages", "trained")
        part = segment | {name: (segment[name] * 400)[:400] for name in fields} | {"versions": [], "answers": []}
        first["segments"] = [part, part]

    page.route("**/runs/*/rollouts/2?*", changing(longer))
    page.goto(f"/rollouts/{world.rewarded.run}?step=2")
    rollout = page.get_by_role("article", name=re.compile("^rollout")).first
    more = rollout.get_by_role("button", name="Show 200 more tokens")
    more.wait_for()
    parts = rollout.get_by_role("group", name=re.compile("^tokens of rollout"))
    assert [len(titles(part)) for part in parts.all()] == [400, 200]
    more.click()
    more.wait_for(state="detached")
    assert [len(titles(part)) for part in parts.all()] == [400, 400]


def test_of_a_long_row_the_beginning_is_shown_until_somebody_asks(page: "Page", world: World) -> None:
    def longer(preview: dict[str, Any]) -> None:
        (example,) = preview["data"][0]["examples"]
        example |= {name: (example[name] * 4001)[:4001] for name in ("tokens", "texts", "weights")}

    del world
    page.route("**/preview?*", changing(longer))
    page.goto("/datasets/chats")
    row = page.get_by_role("article", name=re.compile("^row"))
    more = row.get_by_role("button", name="Show 1 more token", exact=True)
    more.wait_for()
    assert len(titles(row)) == 4000
    more.click()
    more.wait_for(state="detached")
    assert len(titles(row)) == 4001


def changing(change: Callable[[dict[str, Any]], None]) -> "Callable[[Route], None]":
    """The server's answer, changed in place."""

    def answer(route: "Route") -> None:
        given = route.fetch()
        told = given.json()
        change(told)
        route.fulfill(response=given, json=told)

    return answer


def titles(within: "Locator") -> list[str]:
    """Of all tokens that are shown there."""
    found: list[str] = within.locator("span[title^=token]").evaluate_all("all => all.map((each) => each.title)")
    return found
