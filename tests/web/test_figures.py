"""What pages tell of measured things is what the server has of them: the use of a day, tokens, rows, means with intervals, cards, times."""

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bloomery.client import Client
from bloomery.types.arrays import Array
from bloomery.types.evaluations import Measured
from bloomery.types.graders import LabelledRow
from bloomery.types.rollouts import RecordedFailure, RecordedGroup, RecordedRollout, RecordedSegment, RecordedStep
from tests.live import wait_until
from tests.web.conftest import WAIT_MS
from tests.web.world import BASE, World, trained

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Route

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]


def test_home_adds_up_what_was_used_and_leads_to_what_it_names(page: "Page", world: World, client: Client) -> None:
    used = sum(job.progress.tokens for job in client.jobs.list())
    assert used > 0
    page.goto("/")
    _figure(page, "tokens trained by jobs, in").get_by_text(f"{used:,}", exact=True).wait_for()
    served = _figure(page, "in 24 h").locator("b")
    wait_until(lambda: served.inner_text() == f"{client.spans.totals(kinds=['chat', 'completion', 'embedding']).total.requests:,}")
    newest = trained(client)[0]
    page.get_by_role("region", name="What trains").get_by_role("link", name=newest, exact=True).click()
    page.get_by_role("heading", name=newest, exact=True).wait_for()
    page.go_back()
    page.get_by_role("region", name="What is live").get_by_role("link", name=world.deployment, exact=True).click()
    page.get_by_role("heading", name=world.deployment, exact=True).wait_for()


@pytest.mark.parametrize(
    ("words", "title", "address"),
    [
        ("live", "Deployments", "/deployments"),
        ("training now", "Runs", "/runs"),
        ("tokens trained by jobs", "Runs", "/runs"),
        ("in 24 h", "Traces", "/traces?since=day"),
    ],
)
def test_a_figure_of_the_home_page_leads_to_what_it_counts(page: "Page", words: str, title: str, address: str) -> None:
    _figure(page, words).get_by_role("link").click()
    page.get_by_role("heading", name=title, level=1, exact=True).wait_for()
    assert page.url.endswith(address)


def test_tokens_of_a_rollout_are_coloured_by_what_is_asked_for_and_its_parts_reason_and_versions_stand_below(page: "Page", client: Client) -> None:
    run = client.create_run(BASE, 4, name="recorded")
    run.rollouts.add(1, _recorded())
    page.goto(f"/rollouts/{run.id}")
    rollout = page.get_by_role("article", name="rollout 0.0")
    tokens = rollout.get_by_role("group", name="tokens of rollout 0.0").locator("span")
    for colour, tinted in {"log-probability": 1, "advantage": 3, "loss mask": 2, "version": 4}.items():
        page.get_by_label("Colour by").select_option(colour)
        _expect(rollout.locator(".tokens .tinted"), tinted)
    _expect(rollout.locator(".tokens .masked"), 4)
    first, same, between, _, second, alike = tokens.evaluate_all("all => all.map((each) => getComputedStyle(each).backgroundColor)")
    assert first == same != second == alike
    assert between not in (first, second), "what nobody sampled is of no version"
    last = (tokens.last.get_attribute("title") or "").split("\n")
    assert last[1:] == ["log-probability -0.05, 95.1 %", "advantage 0.01", "no loss here", f"version {'b' * 12}"]
    assert tokens.count() == 6
    for told in ("advantage 0.25", "polite 0.25", "short 1", "turn 1 0.5", f"{'a' * 12} → {'b' * 12}", "it says please", "4 tokens, cut off"):
        rollout.get_by_text(told, exact=True).wait_for()
    page.get_by_text("raised, given up: KeyError: x", exact=True).wait_for()
    page.get_by_role("region", name="group 0").get_by_text("trained on", exact=True).wait_for()
    page.get_by_role("region", name="group 1").get_by_text("left out: too many failed").wait_for()


def test_a_version_says_where_its_rows_went_how_long_they_are_and_how_labels_are_spread(page: "Page", client: Client) -> None:
    rows = [json.dumps({"text": f"line {number}", "label": "abaa"[number % 4]}) for number in range(12)]
    client.datasets.create("counted")
    client.datasets.upload("counted", "\n".join([*rows, rows[0], "{", "[]"]).encode(), format="jsonl", on_error="skip")
    version = client.datasets.get("counted").versions[0]
    measured = client.datasets.statistics("counted", version.id, model=BASE)
    page.goto("/datasets/counted")
    went, tokens = page.get_by_role("region", name="Where the rows went"), page.get_by_role("region", name="Tokens of train")
    tokens.get_by_text("the longest has").wait_for()
    told = {row.locator("th").inner_text(): row.locator("td.number").all_inner_texts() for row in went.locator("tbody tr").all()}
    assert told == {
        "given": ["15"],
        "broken": ["\N{MINUS SIGN}2"],
        "there already": ["\N{MINUS SIGN}1"],
        "in the version": ["12"],
        "a": ["9", "75 %"],
        "b": ["3", "25 %"],
    }
    lengths = {row.locator("th").inner_text(): row.locator("td.number").inner_text() for row in tokens.locator(".lengths tr").all()}
    assert lengths["the longest has"] == str(measured.longest)
    assert lengths["50 % have at most"] == str(measured.percentiles["p50"])
    _figure(tokens, "carry loss").get_by_text(f"{measured.trained_tokens:,}", exact=True).wait_for()


def test_what_stands_below_labels_keeps_its_place_when_they_come(page: "Page", client: Client) -> None:
    rows = [json.dumps({"text": f"number {number}", "label": "abc"[number % 3]}) for number in range(12)]
    client.datasets.create("labelled-late")
    client.datasets.upload("labelled-late", "\n".join(rows).encode(), format="jsonl")
    held: list[Route] = []
    let_go: list[bool] = []
    page.route("**/statistics*", lambda route: route.continue_() if let_go else held.append(route))
    page.goto("/datasets/labelled-late")
    below = page.get_by_role("listbox", name="rows of train")
    below.get_by_role("option").nth(11).wait_for()
    wait_until(lambda: page.evaluate("true") and bool(held))
    before = below.bounding_box()
    let_go.append(True)
    for each in held:
        each.continue_()
    page.get_by_text("33.3 %").first.wait_for()
    assert below.bounding_box() == before


def test_the_leaderboard_has_each_model_in_its_place_with_its_interval(page: "Page", world: World, client: Client) -> None:
    board = client.evaluations.leaderboard("prompts", "right")
    assert {world.deployment, BASE} <= {line.summary.model for line in board.data}
    page.goto("/evaluations/leaderboard?dataset=prompts&grader=right@1")
    page.get_by_text(f"{board.rows} rows each").wait_for()
    lines = page.get_by_role("table").locator("tbody tr")
    _expect(lines, len(board.data))
    told = [(line.locator("td.place").inner_text(), line.locator("td.figures").first.inner_text()) for line in lines.all()]
    assert told == [(str(line.place), _said(line.summary.graders[0].mean)) for line in board.data]
    assert page.get_by_role("table").locator(".interval .line").count() == len(board.data)


def test_what_a_judge_is_worth_is_shown_of_the_version_that_is_chosen(page: "Page", client: Client) -> None:
    judge = {
        "type": "score_model",
        "name": "judge",
        "model": BASE,
        "range": [0, 1],
        "input": [{"role": "user", "content": "{{ sample.output_text }}"}],
    }
    for temperature in (0.0, 1.0):
        client.graders.create("judge", {**judge, "sampling_params": {"max_completions_tokens": 4, "temperature": temperature}})
    card = client.graders.calibrate("judge", [LabelledRow(output=output, label=output == "good") for output in ("good", "bad")], version=1)
    assert card.why is not None
    page.goto("/evaluations/judges?grader=judge")
    page.get_by_text("Nobody has measured it").wait_for()
    page.get_by_label("version").select_option("1")
    shown = page.get_by_role("region", name="card of")
    shown.get_by_text("may not gate", exact=True).wait_for()
    shown.get_by_text(card.why).wait_for()
    shown.get_by_text("2 answers with labels of people").wait_for()
    page.get_by_role("link", name="The grader").click()
    page.get_by_text("What is known of version 2").wait_for()


def test_a_deployment_says_how_fast_it_answered_and_on_what_evidence_each_version_went_live(page: "Page", client: Client, world: World) -> None:
    assert world.taught.result is not None
    client.deployments.create("timed", BASE)
    for tokens in (1, 2, 3):
        client.chat("timed", [{"role": "user", "content": "red is moon"}], max_tokens=tokens, ignore_eos=True)
    split = {"gained": 5, "lost": 1, "p_value": 0.21875}
    client.deployments.promote("timed", world.taught.result.version, {"why": "it is better", "mcnemar": split, "evaluations": ["mine"]})
    wait_until(lambda: len(client.spans.list(deployment="timed")) == 3)
    page.goto("/deployments/timed")
    traffic = page.get_by_role("region", name="Traffic")
    traffic.get_by_text("the last 3 requests").wait_for()
    traffic.locator("canvas").nth(1).wait_for()
    times = traffic.locator(".figures b").all_inner_texts()
    assert times[-1] == "0"
    assert all(time.endswith("s") for time in times[:-1])
    newest, first = page.get_by_role("region", name="History").locator("tbody tr").all()
    assert [row.locator("td").first.inner_text() for row in (newest, first)] == ["2", "1"]
    first.get_by_text("none", exact=True).wait_for()
    newest.get_by_text("why: it is better", exact=True).wait_for()
    newest.get_by_text("right where the version before was not 5 times, wrong where it was right once (p = 0.2188)", exact=True).wait_for()
    newest.get_by_text("evaluations", exact=True).click()
    newest.get_by_text('"mine"').wait_for()


def _figure(within: "Page | Locator", words: str) -> "Locator":
    """A number with words below it."""
    return within.locator(".figures > div").filter(has_text=words)


def _recorded() -> RecordedStep:
    """A rollout of which a tool said the middle, before and behind which two versions sampled; and a group that failed."""
    segment = RecordedSegment(
        tokens=_numbers([5, 6, 7, 8, 9, 10], "int32"),
        sampled=((0, 2), (4, 6)),
        logprobs=_numbers([0, -0.1, -7, -0.05], "float32"),
        advantages=_numbers([1, -0.5, 0.3, 0.01], "float32"),
        trained=((0, 2),),
        versions=((0, 2, "a" * 64), (4, 6, "b" * 64)),
    )
    rollout = RecordedRollout(
        id="0.0",
        segments=(segment,),
        stopped=False,
        reward=0.625,
        parts={"polite": 0.25, "short": 1.0},
        turns={"first": 0.5},
        reason="it says please",
    )
    failure = RecordedFailure(id="1.0", kind="raised", message="KeyError: x", final=True)
    prompt = _numbers([5], "int32")
    failed = RecordedGroup(number=1, problem="two", prompt=prompt, rollouts=(), failures=(failure,), dropped="too_small")
    return RecordedStep(groups=(RecordedGroup(number=0, problem="one", prompt=prompt, rollouts=(rollout,)), failed))


def _numbers(given: list[float], kind: str) -> Array:
    return Array.of(np.asarray(given, kind))


def _said(mean: Measured | None) -> str:
    assert mean is not None
    assert mean.interval is not None
    low, high = mean.interval
    return f"{mean.value:.4g} ({low:.4g} to {high:.4g})"


def _expect(found: "Locator", count: int) -> None:
    """So many, soon."""
    from playwright.sync_api import expect

    expect(found).to_have_count(count, timeout=WAIT_MS)
