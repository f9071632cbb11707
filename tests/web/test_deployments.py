"""What is live: which weights those are, who made them, and who holds them in memory."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest

from bloomery.client import Client
from bloomery.types.evaluations import Evaluation, EvaluationSpec, Measured
from bloomery.types.jobs import Compared
from tests.live import running_server
from tests.web.conftest import SIZE, WAIT_MS, log_in
from tests.web.world import BASE, World

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
MADE = "what job taught ended with"
STARTED_MS = 180_000
SHOWN = 20
"""Swaps, until somebody asks for more."""
ASKED = [{"role": "user", "content": "red is moon"}]


def test_what_is_live_is_told_by_who_made_it_and_leads_there_and_back(page: "Page", world: World, client: Client) -> None:
    assert world.taught.result is not None
    version = world.taught.result.version
    client.deployments.create("told", BASE)
    client.deployments.promote("told", version, {})
    answered = client.chat("told", ASKED, max_tokens=2)
    page.goto("/deployments/told")
    history = page.get_by_role("region", name="History")
    history.get_by_text(f"the base model {BASE}", exact=True).wait_for()
    history.get_by_role("link", name=MADE).wait_for()
    page.goto(f"/traces/{answered['id']}")
    page.get_by_role("region", name=re.compile("^Request")).get_by_role("link", name=MADE).wait_for()
    page.goto("/")
    item = page.get_by_role("region", name="What is live").locator(".item").filter(has=page.get_by_role("link", name="told", exact=True))
    made = item.get_by_role("link", name=MADE)
    assert made.locator("..").get_attribute("title") == version
    # A line that has no room for it shows three dots in its place, which a click finds just as well.
    line, told = made.locator("../..").bounding_box(), made.locator("..").bounding_box()
    assert line is not None
    assert told is not None
    assert told["x"] + told["width"] <= line["x"] + line["width"]
    made.click()
    page.get_by_role("heading", name="taught", exact=True).wait_for()
    page.get_by_text("as told, revision 2").wait_for()
    page.get_by_role("link", name="told", exact=True).click()
    page.get_by_role("heading", name="told", exact=True).wait_for()
    page.get_by_role("region", name="Live").get_by_role("link", name=MADE).wait_for()


def test_what_versions_are_called_is_read_for_the_first_request_that_is_opened_and_not_for_each(page: "Page", world: World, client: Client) -> None:
    assert world.taught.result is not None
    client.deployments.create("named-once", world.taught.result.version)
    for _ in range(2):
        client.chat("named-once", ASKED, max_tokens=2)
    page.goto("/traces?deployment=named-once")
    rows = page.get_by_role("row").filter(has_text="named-once, rev. 1")
    rows.nth(1).wait_for()
    opened = page.get_by_role("region", name=re.compile("^Request"))
    rows.first.click()
    opened.get_by_role("link", name=MADE).wait_for()
    first = opened.get_attribute("aria-label")
    # Whoever reads it again waits for ever.
    page.route("**/api/v1/snapshots?*", lambda route: None)
    rows.nth(1).click()
    opened.and_(page.locator(f"[aria-label='{first}']")).wait_for(state="detached")
    opened.get_by_role("link", name=MADE).wait_for()


def test_what_is_deployed_by_clicking_has_the_evaluations_that_are_chosen_as_its_evidence(page: "Page", world: World, client: Client) -> None:
    version = client.create_run(BASE, 4, seed=3).save_snapshot("spoken-for").result().version
    first, second = (evaluated(client, f"speaks-for-it-{number}", version) for number in (1, 2))
    page.goto("/deployments")
    page.get_by_role("button", name="New deployment").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name that callers give").fill("spoken-for")
    dialog.get_by_text("What was measured of the version that is chosen.").wait_for()
    dialog.get_by_label("Version").select_option(version)
    offered = dialog.get_by_role("checkbox")
    offered.nth(1).wait_for()
    assert [(each.locator("..").inner_text().strip(), each.is_checked()) for each in offered.all()] == [
        (f"speaks-for-it-2: {said(second)}", True),
        (f"speaks-for-it-1: {said(first)}", False),
    ]
    dialog.get_by_role("checkbox", name="speaks-for-it-2").uncheck()
    dialog.get_by_role("checkbox", name="speaks-for-it-1").check()
    dialog.get_by_role("button", name="Deploy").click()
    live, history = (page.get_by_role("region", name=name) for name in ("Live", "History"))
    for region in (live, history):
        region.get_by_text(f"speaks-for-it-1: {said(first)}", exact=True).wait_for(timeout=60_000)
    assert client.deployments.get("spoken-for").live.evidence == {
        "evaluations": [{"evaluation": first.id, "name": "speaks-for-it-1", "model": version, "scores": [score(first)]}]
    }
    live.get_by_role("link", name="speaks-for-it-1").click()
    page.get_by_role("heading", name="speaks-for-it-1").wait_for()


def test_where_only_the_newest_evaluations_were_looked_through_it_is_not_said_that_none_asked_the_version(page: "Page", world: World) -> None:
    del world

    def others(route: "Route") -> None:
        offset = int(parse_qs(urlsplit(route.request.url).query)["offset"][0])
        data = [{"id": f"eval_{offset + place}", "spec": {"name": "other"}, "result": {"models": []}} for place in range(500)]
        route.fulfill(json={"data": data, "has_more": True})

    page.goto("/deployments")
    page.route("**/evaluations?*", others)
    page.get_by_role("button", name="New deployment").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Version").select_option(BASE)
    dialog.get_by_text("None of the newest 1,000 evaluations has asked this version, and no job has compared it").wait_for()


def test_what_a_job_ended_with_is_deployed_with_what_it_measured_before_and_after(page: "Page", world: World, client: Client) -> None:
    job = world.taught
    assert job.result is not None
    page.goto(f"/runs/{job.id}")
    page.get_by_role("button", name="Deploy", exact=True).click()
    dialog = page.get_by_role("dialog")
    own = dialog.get_by_role("checkbox", name=re.compile("^job taught: "))
    own.wait_for()
    assert own.is_checked()
    for other in dialog.get_by_role("checkbox").all()[1:]:
        other.uncheck()
    dialog.get_by_label("Name that callers give").fill("taught-by-click")
    dialog.get_by_role("button", name="Deploy", exact=True).click()
    live, history = (page.get_by_role("region", name=name) for name in ("Live", "History"))
    for region in (live, history):
        region.get_by_text(differing(job.result.compared), exact=True).wait_for(timeout=60_000)
    assert client.deployments.get("taught-by-click").live.evidence == {
        "jobs": [
            {
                "job": job.id,
                "name": "taught",
                "base_version": job.result.base_version,
                "compared": [each.model_dump(mode="json") for each in job.result.compared],
            }
        ]
    }
    live.get_by_role("link", name="taught", exact=True).click()
    page.get_by_role("heading", name="taught", exact=True).wait_for()
    page.goto("/deployments/taught-by-click")
    page.get_by_label("Version to make live").select_option(world.rewarded.result.version if world.rewarded.result else None)
    page.get_by_role("button", name="Make live").click()
    dialog.get_by_role("checkbox", name=re.compile("^job rewarded: ")).wait_for()
    assert dialog.get_by_role("checkbox", name=re.compile("^job taught: ")).count() == 0, "it measured other weights"


def test_what_a_job_ended_with_is_made_live_under_a_name_that_there_is(page: "Page", world: World, client: Client) -> None:
    assert world.taught.result is not None
    client.deployments.create("there-already", BASE)
    page.goto(f"/runs/{world.taught.id}")
    page.get_by_role("button", name="Deploy", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("A new deployment, with this version as its revision 1.").wait_for()
    dialog.get_by_label("Name that callers give").fill("there-already")
    dialog.get_by_text("This makes revision 2 live; revision 1 can be had back at any time.").wait_for()
    dialog.get_by_role("checkbox", name=re.compile("^compared: ")).check()
    dialog.get_by_role("button", name="Make it live").click()
    page.get_by_role("heading", name="there-already").wait_for(timeout=60_000)
    page.get_by_role("region", name="Live").get_by_text("revision 2").wait_for()
    live = client.deployments.get("there-already").live
    assert live.version == world.taught.result.version
    assert (world.evaluation, world.deployment) in {(each["evaluation"], each["model"]) for each in live.evidence["evaluations"]}


def test_figures_of_traffic_say_of_which_requests_they_are_and_what_time_those_cover(page: "Page", client: Client) -> None:
    client.deployments.create("busy", BASE)
    for _ in range(2):
        client.chat("busy", ASKED, max_tokens=1)
    page.goto("/deployments/busy")
    traffic = page.get_by_role("region", name="Traffic")
    every = r"^Figures and charts are of all 2 requests on record, which came within [\d.]+ (ms|s), the first of them "
    traffic.get_by_text(re.compile(every)).wait_for()
    page.route("**/api/v1/spans?*", of_a_busy_day)
    page.reload()
    traffic.get_by_text("Figures and charts are of the last 1,000 requests alone, which came within 16 min 39 s, the first of them ").wait_for()


def test_a_run_of_a_program_says_where_its_snapshot_is_live(page: "Page", world: World, client: Client) -> None:
    (snapshot,) = [each for each in client.snapshots() if each.run_id == world.program]
    assert snapshot.version is not None
    page.goto(f"/runs/{world.program}")
    facts = page.get_by_role("main").locator(".facts")
    facts.get_by_text("Made", exact=True).wait_for()
    assert facts.get_by_text("Live", exact=True).count() == 0
    client.deployments.create("of-a-program", snapshot.version)
    facts.get_by_text("as of-a-program, revision 1").wait_for()


def test_of_many_swaps_the_newest_are_read_and_the_rest_when_somebody_asks(page: "Page", world: World, client: Client) -> None:
    assert world.taught.result is not None
    client.deployments.create("to-and-fro", BASE)
    client.deployments.promote("to-and-fro", world.taught.result.version, {})
    for number in range(SHOWN):
        client.deployments.rollback("to-and-fro", 1 + number % 2)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/to-and-fro/swaps" in request.url else None)
    page.goto("/deployments/to-and-fro")
    swaps = page.get_by_role("region", name="Swaps")
    every = swaps.get_by_role("button", name="Show every swap")
    every.wait_for()
    assert swaps.locator("tbody tr").count() == SHOWN
    assert {re.findall(r"limit=(\d+)", url)[0] for url in asked} == {str(SHOWN + 1)}
    every.click()
    swaps.get_by_role("cell", name="deployed as revision 1").wait_for()
    assert swaps.locator("tbody tr").count() == SHOWN + 2
    assert every.count() == 0


def test_who_serves_a_deployment_is_told_with_whether_it_holds_the_live_version(browser: "Browser", tmp_path: Path) -> None:
    with running_server(tmp_path / "data", replicas=1) as server, Client(server.url, server.key) as client:
        run = client.create_run(BASE, 4)
        client.deployments.create("replicated", run.save_snapshot("served-here").result().version)
        with browser.new_context(viewport=SIZE, base_url=server.url) as context:
            page = context.new_page()
            page.set_default_timeout(WAIT_MS)
            log_in(page, server.key)
            page.goto("/deployments/replicated")
            rows = page.get_by_role("region", name="Who serves it").locator("tbody tr")
            replica = rows.filter(has=page.get_by_role("cell", name="production", exact=True))
            replica.get_by_text("ready", exact=True).wait_for(timeout=STARTED_MS)
            assert rows.filter(has_text=f"engine of {BASE}").get_by_role("cell", name="training", exact=True).count() == 1
            client.chat("replicated", ASKED, max_tokens=2)
            held = replica.get_by_text("in memory, proved: ")
            held.wait_for()
            roots = {each.process: each.root for each in client.deployments.get("replicated").proved}
            assert held.locator("[title]").get_attribute("title") == roots[replica.locator("td").first.inner_text()]
            page.route("**/api/v1/deployments/replicated", proved_by_nobody)
            page.reload()
            replica.get_by_text("not in memory", exact=True).wait_for()
            assert held.count() == 0


def evaluated(client: Client, name: str, version: str) -> Evaluation:
    """What one model says to two rows, finished."""
    spec = {
        "name": name,
        "data": {"dataset": "prompts", "split": "eval", "rows": 2},
        "models": [version],
        "graders": ["right"],
        "params": {"max_tokens": 4},
    }
    return client.evaluations.wait(client.evaluations.create(EvaluationSpec.model_validate(spec)).id, 300)


def differing(compared: Sequence[Compared]) -> str:
    """What a job measured, as pages say it."""
    return "; ".join(
        f"{each.name} {each.before:.4g} before, {each.after:.4g} after, a difference of {each.difference:.4g}{within(each.difference_interval)}"
        f" on {each.rows} rows"
        for each in compared
    )


def within(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" ({interval[0]:.4g} to {interval[1]:.4g})"


def score(evaluation: Evaluation) -> dict[str, object]:
    """Of its only grader, as evidence has it."""
    mean = mean_of(evaluation)
    return {"grader": "right@1", "rows": 2, "mean": mean.model_dump(mode="json")}


def said(evaluation: Evaluation) -> str:
    """The same as pages say it."""
    mean = mean_of(evaluation)
    assert mean.interval is not None
    low, high = mean.interval
    return f"{mean.value:.4g} ({low:.4g} to {high:.4g}) by right@1 on 2 rows"


def mean_of(evaluation: Evaluation) -> Measured:
    assert evaluation.result is not None
    (summary,) = evaluation.result.models[0].graders
    assert (summary.grader, summary.rows) == ("right@1", 2)
    assert summary.mean is not None
    return summary.mean


def proved_by_nobody(route: "Route") -> None:
    answer = route.fetch()
    route.fulfill(response=answer, json=answer.json() | {"proved": []})


def of_a_busy_day(route: "Route") -> None:
    """More requests than the page reads, one a second."""
    answer = route.fetch(url=re.sub(r"offset=\d+", "offset=0", route.request.url))
    newest = answer.json()["data"][0]
    asked = {name: int(value) for name, value in re.findall(r"(limit|offset)=(\d+)", route.request.url)}
    places = range(asked["offset"], asked["offset"] + asked["limit"])
    made = [newest | {"id": f"{newest['id']}-{place}", "started_us": newest["started_us"] - place * 1_000_000} for place in places]
    route.fulfill(response=answer, json={"data": made, "has_more": True})
