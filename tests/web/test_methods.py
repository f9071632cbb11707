"""Jobs that learn from pairs or from a teacher, each filled in, looked at, started and seen to its end by clicking."""

import re
from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from bloomery.types.keys import SCOPES
from tests.jobs.test_methods_live import lines, pairs, preference, prompt
from tests.live import LiveServer
from tests.web.test_journeys import TRAINED_MS
from tests.web.world import BASE

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(900)]
FEW = {"evaluation.rows": "2", "evaluation.answers": "0"}
OF_PAIRS = FEW | {"method.batches.epochs": "1", "method.batches.rows": "4", "rank": "4"}
METHODS = {
    "dpo": ("Direct preferences", "few-pairs", OF_PAIRS | {"method.beta": "0.5"}),
    "orpo": ("Preferences by odds", "few-pairs", OF_PAIRS | {"method.odds_weight": "0.2"}),
    "distill": (
        "Distillation",
        "few-prompts",
        FEW | {"method.steps": "2", "method.prompts_per_step": "2", "method.samples": "2", "method.max_tokens": "8", "rank": "4"},
    ),
}

UNEXPLAINED = """() => {
    const help = (field) => document.getElementById(field.getAttribute("aria-describedby")).textContent.trim();
    const usual = (field) => field.placeholder ?? field.options[0].text;
    return [...document.querySelectorAll("form [aria-describedby]")].filter((field) => !help(field) || !usual(field)).map((field) => field.id);
}"""


@pytest.fixture(scope="module")
def key(server: LiveServer) -> str:
    """Of a project of their own, in which no job has ended."""
    with Client(server.url, server.key) as admin:
        return admin.keys.create("methods", SCOPES, project="methods").key


@pytest.fixture(scope="module")
def client(server: LiveServer, key: str) -> Iterator[Client]:
    with Client(server.url, key) as client:
        yield client


@pytest.fixture(scope="module")
def data(client: Client) -> None:
    for name, of in (("few-pairs", preference), ("few-prompts", prompt)):
        client.datasets.create(name)
        client.datasets.add_version(name, {"train": lines([of(each) for each in pairs(8, 71)]), "eval": lines([of(each) for each in pairs(2, 72)])})


def test_each_field_of_every_method_is_explained_with_what_it_is_by_itself(page: "Page", data: None) -> None:
    page.goto("/jobs")
    methods = page.get_by_role("radiogroup", name="Method").get_by_role("radio")
    methods.first.wait_for()
    assert [method.get_attribute("value") for method in methods.all()] == ["sft", "dpo", "orpo", "rft", "distill"]
    for method in methods.all():
        method.check(force=True)
        _everything_is_explained(page)


@pytest.mark.parametrize("kind", METHODS)
def test_a_job_is_filled_in_started_and_seen_to_its_end(page: "Page", client: Client, data: None, kind: str) -> None:
    title, dataset, fields = METHODS[kind]
    page.goto("/jobs")
    page.get_by_role("radio", name=re.compile(title)).check(force=True)
    page.get_by_label("Name", exact=True).fill(f"by-{kind}")
    page.get_by_label("Data set").select_option(dataset)
    if kind == "distill":
        page.get_by_text("Choose a teacher, and it is worked out here.").wait_for()
        page.get_by_label("Teacher", exact=True).select_option(BASE)
    for path, value in fields.items():
        page.locator(f'[id="field-{path}"]').fill(value)
        page.locator(f'[id="field-{path}"]').press("Tab")
    page.get_by_label("Price of an hour").fill("3600")
    taken = _taken(page)
    assert (taken["Rows"], taken["Steps"]) == ("8", "2")
    assert (taken["Time"], taken["Cost"]) == ("not known yet", "not known yet")
    page.get_by_role("button", name="Start the job").click()
    page.get_by_role("heading", name=f"by-{kind}").wait_for()
    page.get_by_role("region", name="What came of it").wait_for(timeout=TRAINED_MS)
    page.get_by_text("succeeded", exact=True).first.wait_for()
    job = client.jobs.get(f"by-{kind}")
    assert job.spec.method.kind == kind
    assert job.progress.step == job.progress.steps == 2
    for path, value in fields.items():
        assert _at(job.spec, path) == float(value)
    assert job.result is not None
    compared = page.get_by_role("region", name="What came of it").locator("tbody tr")
    assert compared.count() == len(job.result.compared) > 0
    page.get_by_role("button", name="Clone").click()
    page.get_by_role("heading", name="Clone a job").wait_for()
    page.get_by_label("Price of an hour").fill("3600")
    taken = _taken(page)
    page.get_by_text("At the pace of 1 job like it.").wait_for()
    assert taken["Time"].endswith((" s", "ms"))
    assert float(taken["Cost"]) > 0


def _everything_is_explained(page: "Page") -> None:
    """Each field says what it does, and what it is where nobody fills it in."""
    page.locator('[id="field-rank"]').wait_for()
    assert page.evaluate(UNEXPLAINED) == []
    assert page.locator('[id="field-rank"]').get_attribute("placeholder") == "16"


def _taken(page: "Page") -> dict[str, str]:
    """What it would take, once that is said of what stands there."""
    told = page.get_by_role("complementary", name="What it would take").locator("dl[aria-busy=false]")
    told.get_by_text("Cost", exact=True).wait_for()
    return dict(zip(told.locator("dt").all_inner_texts(), told.locator("dd").all_inner_texts(), strict=True))


def _at(whole: object, path: str) -> float:
    found = reduce(getattr, path.split("."), whole)
    assert isinstance(found, int | float)
    return float(found)
