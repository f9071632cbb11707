"""What people, programs and models wrote or are called: none of it runs, none of it breaks the page, and what is no name is refused in words."""

import json
from random import Random
from typing import TYPE_CHECKING, Final

import pytest

from bloomery.client import Client
from bloomery.recipes.pairs import WORDS
from bloomery.types.jobs import Data, JobSpec
from bloomery.types.methods import Batches, Optimizer, Supervised
from tests.live import LiveServer
from tests.web.conftest import SIZE, WAIT_MS, log_in
from tests.web.test_data_pages import dropped
from tests.web.world import BASE, HOSTILE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

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


def _is_refused(page: "Page", form: "Locator", button: str) -> None:
    form.get_by_role("button", name=button, exact=True).click()
    form.get_by_role("alert").get_by_text("name", exact=False).first.wait_for()
    _is_harmless(page)


def _is_harmless(page: "Page") -> None:
    """Nothing of it is a part of the page, nothing ran, and the page is as wide as it was."""
    assert page.locator("img[src=x], main script, main a[href^='javascript'], dialog a[href^='javascript']").count() == 0
    assert page.evaluate("document.title") != "stolen"
    assert page.evaluate(WIDE) == []
