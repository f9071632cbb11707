"""The form of a job and the page of one, of a project with a single data set: prompts, of which none is held out."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from bloomery.types.jobs import Data, JobSpec, JobState
from bloomery.types.keys import SCOPES
from bloomery.types.methods import Distillation, Method, Reinforcement
from tests.jobs.test_methods_live import lines, pairs, prompt
from tests.live import LiveServer
from tests.web.conftest import SIZE, WAIT_MS, log_in
from tests.web.test_journeys import TRAINED_MS
from tests.web.test_presses import hold, told
from tests.web.world import BASE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(900)]
ROWS = 12
MUTE = {"type": "function", "source": "def score(output):\n    return 0.0\n", "entry": "score"}


@pytest.fixture(scope="module")
def key(server: LiveServer) -> str:
    with Client(server.url, server.key) as admin:
        return admin.keys.create("forms", SCOPES, project="forms").key


@pytest.fixture(scope="module")
def client(server: LiveServer, key: str) -> Iterator[Client]:
    with Client(server.url, key) as client:
        client.datasets.create("questions")
        client.datasets.add_version("questions", {"train": lines([prompt(each) for each in pairs(ROWS, 91)])})
        yield client


@pytest.fixture
def tried(browser: "Browser", server: LiveServer, key: str) -> "Iterator[Page]":
    """A page that is refused something, of which the console complains."""
    with browser.new_context(viewport=SIZE, base_url=server.url) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        log_in(page, key)
        yield page


def test_a_data_set_leads_to_the_form_with_its_version_and_a_method_that_takes_its_rows(page: "Page", client: Client) -> None:
    page.goto("/datasets/questions")
    page.get_by_role("link", name="Train on this").click()
    page.get_by_role("heading", name="New job").wait_for()
    assert page.url.endswith("/jobs?dataset=questions")
    begins_with(page, "")
    version = client.datasets.get("questions").versions[0].id
    page.goto(f"/jobs?dataset=questions&version={version}")
    begins_with(page, version)
    # With a single data set there is nothing to choose.
    page.goto("/jobs")
    begins_with(page, "")


def test_of_prompts_it_is_not_said_that_training_on_their_tokens_takes_something(page: "Page", client: Client) -> None:
    page.goto("/datasets/questions")
    training, tokens = page.get_by_role("region", name="Training on it"), page.get_by_role("region", name="Tokens of train")
    tokens.get_by_text("tokens of all prompts").wait_for()
    training.get_by_text("No token of a prompt is trained on").wait_for()
    assert training.get_by_label("Epochs").count() == 0
    assert tokens.get_by_text("carry loss").count() == 0
    training.get_by_role("link", name="the form of a job").click()
    begins_with(page, "")


def test_what_it_would_take_follows_what_is_typed_and_what_is_known_to_be_wrong_is_not_started(tried: "Page", client: Client) -> None:
    page, steps, estimated = tried, tried.locator('[id="field-method.steps"]'), taken(tried).locator("dl[aria-busy=false]")
    distillation(page)
    say(estimated, "Held out\n0")
    taken(page).get_by_text("compared with nothing").wait_for()
    steps.press_sequentially("3")
    say(estimated, "Steps\n3")
    start = page.get_by_role("button", name="Start the job")
    assert start.is_enabled()
    for typed, problem in (("0", "greater than or equal to 1"), ("e", "valid integer")):
        steps.fill("")
        steps.press_sequentially(typed)
        taken(page).get_by_role("alert").filter(has_text=problem).wait_for()
        steps.press("Enter")
        assert taken(page).locator("dl").count() == 0
        assert start.is_disabled()
        assert steps.get_attribute("aria-invalid") == "true"
    steps.fill("")
    steps.press_sequentially("4")
    say(estimated, "Steps\n4")
    assert start.is_enabled()
    context = page.locator('[id="field-max_context"]')
    context.fill("20")
    page.locator('[id="field-method.max_tokens"]').fill("8")
    taken(page).get_by_text(f"It would fail: 0 rows are refused by the model's template, {ROWS} are too long.").wait_for()
    assert start.is_disabled()
    assert "typed" not in {job.spec.name for job in client.jobs.list()}


def test_what_was_wrong_before_it_was_mended_holds_no_job_back_while_the_server_cannot_say_more(tried: "Page", client: Client) -> None:
    from playwright.sync_api import expect

    page, steps = tried, tried.locator('[id="field-method.steps"]')
    distillation(page)
    steps.fill("0")
    taken(page).get_by_role("alert").filter(has_text="greater than or equal to 1").wait_for()
    start = page.get_by_role("button", name="Start the job")
    assert start.is_disabled()
    refusal = {"error": {"code": "overloaded", "message": "ask a little later", "field": None}}
    page.route(re.compile("/api/v1/jobs/resolve"), lambda route: route.fulfill(status=503, json=refusal))
    steps.fill("3")
    taken(page).get_by_role("alert").filter(has_text="ask a little later").wait_for()
    expect(start).to_be_enabled(timeout=WAIT_MS)
    assert taken(page).get_by_text("greater than or equal to 1").count() == 0
    assert steps.get_attribute("aria-invalid") != "true"


def test_a_number_that_is_being_written_is_left_as_it_is_written(page: "Page", client: Client) -> None:
    page.goto("/jobs")
    rate = page.get_by_label("Learning rate", exact=True)
    for written in ("0.0005", "1e-10"):
        rate.fill("")
        rate.press_sequentially(written)
        assert rate.input_value() == written
    page.get_by_text('"learning_rate": 1e-10').wait_for(state="attached")


def test_what_is_seldom_changed_of_an_optimizer_is_folded_and_says_what_was(tried: "Page", client: Client) -> None:
    page = tried
    distillation(page)
    decay, fold = page.locator('[id="field-method.optimizer.weight_decay"]'), page.get_by_text("Seldom changed:")
    fold.get_by_text("weight decay, grad clip norm, beta1, beta2, eps, schedule").wait_for()
    assert not decay.is_visible()
    fold.press("Enter")
    decay.fill("0.25")
    fold.press("Enter")
    decay.wait_for(state="hidden")
    fold.get_by_text("weight decay 0.25", exact=True).wait_for()
    taken(page).locator("dl[aria-busy=false]").wait_for()
    held = hold(page, "**/api/v1/jobs/resolve", method="POST")
    fold.press("Enter")
    decay.fill("-1")
    fold.press("Enter")
    decay.wait_for(state="hidden")
    told(page, held)
    decay.wait_for()
    assert decay.get_attribute("aria-invalid") == "true"


def test_that_agents_could_not_be_read_is_said(tried: "Page", client: Client) -> None:
    refusal = {"error": {"code": "internal", "message": "nobody knows the agents", "field": None}}
    tried.route(re.compile("/api/v1/agents"), lambda route: route.fulfill(status=500, json=refusal))
    tried.goto("/jobs")
    tried.get_by_role("alert").get_by_text("nobody knows the agents").wait_for()
    tried.get_by_role("radiogroup", name="Method").wait_for()


def test_why_a_job_stands_still_is_said_once_and_for_whom_has_the_page(page: "Page", client: Client) -> None:
    client.graders.create("mute", MUTE)
    job = client.jobs.wait(made(client, "silent", Reinforcement(grader="mute", steps=1, max_tokens=8)), TRAINED_MS / 1000)
    assert job.state is JobState.PAUSED
    page.goto(f"/runs/{job.id}")
    happened = page.get_by_role("region", name="What happened")
    happened.get_by_text("is paused", exact=True).wait_for()
    said = page.get_by_role("main").inner_text()
    assert said.count("teaches nothing") == 1
    assert "`" not in said
    assert "bloomery job" not in said
    page.get_by_role("button", name="Resume").wait_for()
    page.get_by_role("link", name="mute, version 1").click()
    page.get_by_role("button", name="Waive…").wait_for()


def test_a_key_that_may_train_alone_sees_the_page_of_a_job_without_where_it_is_live(browser: "Browser", server: LiveServer, client: Client) -> None:
    job = made(client, "watched", Distillation(teacher=BASE, steps=1, prompts_per_step=2, samples=2, max_tokens=8))
    client.jobs.wait(job, TRAINED_MS / 1000)
    with Client(server.url, server.key) as admin:
        trains = admin.keys.create("trains", ["train"], project="forms").key
    with browser.new_context(viewport=SIZE, base_url=server.url) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        log_in(page, trains)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"/runs/{job}")
        page.get_by_role("heading", name="watched", exact=True).wait_for()
        page.locator(".facts").get_by_text("not known: ").wait_for()
        page.get_by_role("region", name="What came of it").wait_for()
        assert page.get_by_role("main").get_by_role("alert").count() == 0
        assert not [url for url in asked if "/api/v1/snapshots" in url], "those of other runs say nothing of this one"


def test_what_was_compared_with_nothing_says_so_instead_of_an_empty_table(page: "Page", client: Client) -> None:
    job = made(client, "uncompared", Distillation(teacher=BASE, steps=1, prompts_per_step=2, samples=2, max_tokens=8))
    client.jobs.wait(job, TRAINED_MS / 1000)
    page.goto(f"/runs/{job}")
    came = page.get_by_role("region", name="What came of it")
    came.get_by_text("no row was held out in eval").wait_for()
    assert came.get_by_role("table").count() == 0


def made(client: Client, name: str, method: Method) -> str:
    return client.jobs.create(JobSpec(name=name, base_model=BASE, data=Data(dataset="questions"), method=method, rank=4, seed=1)).id


def begins_with(page: "Page", version: str) -> None:
    """The only data set, and the method that takes its rows."""
    from playwright.sync_api import expect

    expect(page.get_by_label("Data set")).to_have_value("questions", timeout=WAIT_MS)
    expect(page.get_by_role("radio", name=re.compile("Reinforcement"))).to_be_checked(timeout=WAIT_MS)
    assert page.locator('[id="field-data.version"]').input_value() == version


def distillation(page: "Page") -> None:
    """A form that lacks nothing, and the estimate of it."""
    page.goto("/jobs")
    page.get_by_role("radio", name=re.compile("Distillation")).check(force=True)
    page.get_by_label("Name", exact=True).fill("typed")
    page.get_by_label("Teacher", exact=True).select_option(BASE)
    taken(page).locator("dl[aria-busy=false]").wait_for()


def taken(page: "Page") -> "Locator":
    return page.get_by_role("complementary", name="What it would take")


def say(place: "Locator", words: str) -> None:
    """Soon."""
    from playwright.sync_api import expect

    expect(place).to_contain_text(words.replace("\n", " "), timeout=WAIT_MS, use_inner_text=True)
