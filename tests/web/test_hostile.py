"""What people, programs and models wrote or are called: none of it runs, none of it breaks the page, and what is no name is refused in words."""

import json
import re
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from bloomery.client import Client
from bloomery.recipes.pairs import WORDS
from bloomery.types.arrays import Array
from bloomery.types.evaluations import EvaluationSpec
from bloomery.types.jobs import Data, JobSpec
from bloomery.types.methods import Batches, Optimizer, Supervised
from bloomery.types.rollouts import RecordedFailure, RecordedGroup, RecordedRollout, RecordedSegment, RecordedStep, packed_messages
from tests.live import LiveServer
from tests.web.conftest import SIZE, WAIT_MS, log_in
from tests.web.test_data_pages import dropped
from tests.web.world import BASE, HOSTILE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Route

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
LINK: Final = "[see](javascript:document.title='stolen') javascript:document.title='stolen' <a href=\"javascript:document.title='stolen'\">see</a>"
TURNED: Final = "\u202egnihtemos\u2066 \u2067 said the other way round"
LONG: Final = "x" * 10_000
TEXTS: Final = [HOSTILE, LINK, TURNED, LONG]
WIDE: Final = """() => {
    const inside = [...document.querySelectorAll("body, main, dialog")];
    return inside.filter((part) => part.scrollWidth > part.clientWidth + 1).map((part) => `${part.tagName} ${part.scrollWidth}`);
}"""
"""What is wider than its place: it would be cut off, or have the whole page move sideways."""


def test_hostile_rows_prompts_answers_and_feedback_are_shown_as_they_are(page: "Page", client: Client) -> None:
    client.datasets.create("hostile")
    spoken = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]} for text in TEXTS[:3]]
    fields = [{"messages": [{"role": "user", "content": "a"}], LINK: TURNED, HOSTILE: LONG[:2000], "label": text[:200]} for text in TEXTS]
    client.datasets.upload("hostile", "\n".join(map(json.dumps, spoken)).encode(), format="jsonl")
    client.datasets.create("hostile-fields")
    client.datasets.upload("hostile-fields", "\n".join(map(json.dumps, fields)).encode(), format="jsonl", kind="prompt")
    client.deployments.create("hostile", BASE)
    for text in (HOSTILE, LINK, TURNED, LONG[:800]):
        answer = client.chat("hostile", [{"role": "user", "content": text}], max_tokens=2, headers={"x-bloomery-episode": "e" * 200})
        client.feedback(answer["id"], "why", text, type="comment", comment=text)
        client.feedback(answer["id"], "helpful", True, comment=text)
    for place in ("/datasets/hostile?as=text", "/datasets/hostile?row=2", "/datasets/hostile-fields?as=text&row=1", "/traces?deployment=hostile"):
        page.goto(place)
        page.get_by_role("heading", level=1).wait_for()
        page.wait_for_load_state("networkidle")
        _is_harmless(page)
    for row in page.get_by_role("region", name="requests", exact=True).locator("tbody tr").all():
        row.click()
        page.get_by_role("region", name="Request").get_by_text("assistant", exact=True).wait_for()
        _is_harmless(page)
    page.goto("/playground?model=hostile")
    page.get_by_label("Most tokens").fill("2")
    for text in (HOSTILE, LINK, TURNED):
        page.get_by_label("Message", exact=True).fill(text)
        page.get_by_label("Message", exact=True).press("Enter")
        page.get_by_role("region", name="left").get_by_text(text, exact=True).wait_for()
        page.get_by_role("button", name="Save as example").wait_for()
        _is_harmless(page)


def test_an_answer_that_a_job_learnt_and_keeps_is_shown_as_it_is(page: "Page", client: Client) -> None:
    asked = f"{LINK} {TURNED}"
    random = Random(1)
    # Unlike each other, and unlike what is held out: training rows that are nearly the same as that are left out.
    questions = [*(" ".join(random.sample(WORDS, 4)) for _ in range(33)), asked]
    *train, like_those, unlike_any = [
        json.dumps({"messages": [{"role": "user", "content": each}, {"role": "assistant", "content": HOSTILE}]}) for each in questions
    ]
    client.datasets.create("hostile-answers")
    client.datasets.add_version("hostile-answers", {"train": "\n".join(train), "eval": f"{like_those}\n{unlike_any}"})
    method = Supervised(optimizer=Optimizer(learning_rate=4e-3), batches=Batches(epochs=12, rows=8))
    spec = JobSpec(name="says-it", base_model=BASE, data=Data(dataset="hostile-answers"), method=method, seed=1)
    job = client.jobs.wait(client.jobs.create(spec).id, 300)
    assert job.result is not None, job.reason
    assert job.result.samples
    said = [text for each in job.result.samples for text in (each.reference, each.before, each.after)]
    assert HOSTILE in {each.after for each in job.result.samples}
    page.goto(f"/runs/{job.id}")
    table = page.get_by_role("table", name="Answers before and after")
    table.get_by_text(HOSTILE, exact=True).last.wait_for()
    assert table.get_by_text(HOSTILE, exact=True).count() == said.count(HOSTILE) >= 3
    assert table.get_by_text(asked, exact=True).count() == 1
    _is_harmless(page)


def test_hostile_tokens_parts_reasons_and_failures_of_rollouts_are_shown_as_they_are(page: "Page", client: Client) -> None:
    run = client.create_run(BASE, 4, name="hostile-rollouts")
    tokens = _tokens_of(client, texts := [*TEXTS[:3], LONG[:200]])
    run.rollouts.add(1, RecordedStep(groups=tuple(_group(number, text, tokens[number]) for number, text in enumerate(texts))))
    for colour in ("version", "advantage"):
        page.goto(f"/rollouts/{run.id}?colour={colour}")
        for number, text in enumerate(texts):
            rollout = page.get_by_role("article", name=f"rollout {number}.0")
            assert rollout.get_by_role("group", name=f"tokens of rollout {number}.0").inner_text().strip() == text
            rollout.locator(".reason").get_by_text(text, exact=True).wait_for()
            rollout.locator(".parts b").first.wait_for()
            page.get_by_role("region", name=f"group {number}").get_by_text(f"given up: {text}").wait_for()
        _is_harmless(page)
        page.get_by_role("group", name="tokens of rollout 0.0").focus()
        page.keyboard.press("End")
        _is_harmless(page)


def test_hostile_answers_reasons_and_exploits_are_shown_as_they_are_where_they_are_compared_and_labelled(page: "Page", client: Client) -> None:
    reasons = f"def score(output, item):\n    return {{'score': float(len(output) > 3), 'reason': {HOSTILE + LINK!r} + item['reference']}}\n"
    client.graders.create("hostile-reasons", {"type": "function", "source": reasons, "entry": "score"})
    asked = [{"messages": [{"role": "user", "content": text}], "reference": text} for text in (HOSTILE, LINK, TURNED)]
    client.datasets.create("hostile-asked")
    client.datasets.upload("hostile-asked", "\n".join(map(json.dumps, asked)).encode(), format="jsonl", kind="prompt")
    client.deployments.create("hostile-answers", BASE)
    spec = {"name": "hostile-answers", "data": {"dataset": "hostile-asked", "split": "train"}, "models": ["hostile-answers", BASE]}
    made = client.evaluations.create(EvaluationSpec.model_validate({**spec, "graders": ["hostile-reasons"], "params": {"max_tokens": 2}}))
    client.evaluations.wait(made.id, 120)
    # What the tiny model says is harmless by itself.
    page.route(re.compile(r"/api/v1/evaluations/[^/]+/items"), _answers_hostilely)
    page.goto(f"/evaluations/{made.id}")
    page.get_by_role("article", name=re.compile("^row")).get_by_text(f"hostile-answers {HOSTILE}").wait_for()
    page.get_by_role("article", name=re.compile("^row")).get_by_text(HOSTILE + LINK).first.wait_for()
    _is_harmless(page)
    for mode, told in (("single", "answer to label"), ("pairs", "answers to compare")):
        page.goto(f"/labelling?evaluation={made.id}&mode={mode}")
        shown = page.get_by_role("region", name=told)
        for key in "12"[: len(asked)]:
            shown.get_by_text("hostile-answers ").or_(shown.get_by_text(f"{BASE} ")).first.wait_for()
            _is_harmless(page)
            page.keyboard.press(key if mode == "pairs" else "p")
    page.unroute_all()
    rows = [
        {"messages": [{"role": "user", "content": f"{text} {number}"}], "reference": f"{number} {text}"} for number in range(4) for text in TEXTS[:3]
    ]
    client.datasets.create("hostile-attacked")
    client.datasets.upload("hostile-attacked", "\n".join(map(json.dumps, rows)).encode(), format="jsonl", kind="prompt")
    assert client.graders.attack("hostile-reasons", dataset="hostile-attacked").exploits
    page.goto("/graders/hostile-reasons")
    found = page.get_by_role("region", name="What is known of version 1")
    found.locator("summary").first.wait_for()
    for exploit in found.locator("summary").all():
        exploit.click()
    found.get_by_text(HOSTILE + LINK).first.wait_for()
    _is_harmless(page)


def test_a_hostile_answer_in_the_playground_is_shown_as_it_is(page: "Page", client: Client) -> None:
    for text in (HOSTILE, LINK, TURNED):
        page.route("**/v1/chat/completions", partial(_answer_with, text))
        page.goto(f"/playground?model={BASE}")
        page.get_by_label("Message", exact=True).fill("red is moon")
        page.get_by_label("Message", exact=True).press("Enter")
        answer = page.get_by_role("region", name="left").get_by_role("group", name="answer")
        page.get_by_role("button", name="Save as example").wait_for()
        assert answer.inner_text().strip() == text
        _is_harmless(page)
        page.get_by_role("button", name="Save as example").click()
        page.get_by_role("dialog").get_by_label("The answer").wait_for()
        _is_harmless(page)
        page.unroute_all()


def test_what_is_no_name_is_refused_where_it_was_written(browser: "Browser", server: LiveServer, client: Client) -> None:
    # The console of a browser complains of what is refused: `page` would fail.
    with browser.new_context(viewport=SIZE, base_url=server.url) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        log_in(page, server.key)
        for given in (HOSTILE + LINK, TURNED, LONG):
            page.goto("/keys")
            page.get_by_role("button", name="New key").click()
            page.get_by_role("dialog").get_by_label("Name").fill(given)
            _is_refused(page, page.get_by_role("dialog"), "Create")
            page.goto("/graders/new")
            page.get_by_label("Name").fill(given)
            _is_refused(page, page.get_by_role("main"), "Keep")
            page.goto("/deployments")
            page.get_by_role("button", name="New deployment").click()
            page.get_by_role("dialog").get_by_label("Name that callers give").fill(given)
            page.get_by_role("dialog").get_by_label("Version").select_option(BASE)
            _is_refused(page, page.get_by_role("dialog"), "Deploy")
            page.goto("/datasets")
            page.get_by_role("heading", name="Data sets").wait_for()
            dialog = dropped(page, f"{given[:200]}.jsonl", json.dumps({"text": given, "label": given[:100]}))
            dialog.get_by_role("button", name="Store 1 row").wait_for()
            assert dialog.get_by_label("Data set").evaluate("(field) => field.checkValidity() && /^[A-Za-z0-9._-]*$/.test(field.value)")
            _is_harmless(page)
    named = (
        {each.name for each in client.keys.list()} | {each.name for each in client.graders.list()} | {each.name for each in client.deployments.list()}
    )
    assert not named & {HOSTILE + LINK, TURNED, LONG}


def test_runs_that_programs_called_as_they_liked_are_listed_and_opened(page: "Page", client: Client) -> None:
    ids = [client.create_run(BASE, 4, name=name).id for name in (LINK[:128], TURNED, LONG[:128])]
    for place in ("/", "/runs", "/rollouts", *(f"/runs/{run}" for run in ids)):
        page.goto(place)
        page.get_by_role("heading", level=1).wait_for()
        page.wait_for_load_state("networkidle")
        _is_harmless(page)


def _tokens_of(client: Client, texts: list[str]) -> list[list[int]]:
    """As the model reads them."""
    client.datasets.create("hostile-tokens")
    rows = [{"prompt": "a", "completion": text} for text in texts]
    client.datasets.upload("hostile-tokens", "\n".join(map(json.dumps, rows)).encode(), format="jsonl")
    version = client.datasets.get("hostile-tokens").versions[0]
    shown = client.datasets.preview("hostile-tokens", version.id, model=BASE, limit=len(texts))
    examples = [row.examples[0] for row in shown]
    return [[token for token, weight in zip(each.tokens, each.weights, strict=True) if weight][:-1] for each in examples]


def _group(number: int, text: str, tokens: list[int]) -> RecordedGroup:
    """One rollout of these tokens, sampled by two versions, in which everything else says the text."""
    count = len(tokens)
    segment = RecordedSegment(
        tokens=_numbers(tokens, "int32"),
        sampled=((0, count),),
        logprobs=_numbers([-1.0] * count, "float32"),
        advantages=_numbers([1.0] * count, "float32"),
        trained=((0, count),),
        versions=((0, 1, text[:256]), (1, count, "b" * 64)),
    )
    rollout = RecordedRollout(
        id=f"{number}.0", segments=(segment,), stopped=False, reward=1.0, parts={text[:256]: 1.0}, turns={text[:256]: 0.5}, reason=text
    )
    failure = RecordedFailure(id=f"{number}.1", kind=text[:256], message=text, final=True)
    said = packed_messages([{"role": "user", "content": text}])
    prompt = _numbers([5], "int32")
    return RecordedGroup(number=number, problem=text[:256], prompt=prompt, rollouts=(rollout,), failures=(failure,), messages=said)


def _numbers(given: list[Any], kind: str) -> Array:
    return Array.of(np.asarray(given, kind))


def _answers_hostilely(route: "Route") -> None:
    """As if each model had said its name and something hostile."""
    answer = route.fetch()
    page = answer.json()
    for item in page["data"]:
        item["answer"]["text"] = f"{item['model']} {HOSTILE}{LINK}{TURNED}"
    route.fulfill(response=answer, json=page)


def _answer_with(text: str, route: "Route") -> None:
    """A stream of one token that says it."""
    said = {"token": text, "logprob": -1.0, "top_logprobs": [{"token": text, "logprob": -1.0}]}
    choice = {"index": 0, "delta": {"content": text}, "logprobs": {"content": [said]}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    chunk = {"id": "chatcmpl-hostile", "system_fingerprint": text, "choices": [choice], "usage": usage}
    route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")


def _is_refused(page: "Page", form: "Locator", button: str) -> None:
    form.get_by_role("button", name=button, exact=True).click()
    form.get_by_role("alert").get_by_text("name", exact=False).first.wait_for()
    _is_harmless(page)


def _is_harmless(page: "Page") -> None:
    """Nothing of it is a part of the page, nothing ran, and the page is as wide as it was."""
    assert page.locator("img[src=x], main script, main a[href^='javascript'], dialog a[href^='javascript']").count() == 0
    assert page.evaluate("document.title") != "stolen"
    assert page.evaluate(WIDE) == []
