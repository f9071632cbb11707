"""What pages do, beyond what they show: each is clicked, and looked for where the server keeps it."""

import re
from typing import TYPE_CHECKING

import httpx
import pytest

from bloomery.client import Client
from bloomery.types.evaluations import EvaluationSpec
from bloomery.types.jobs import Data, JobSpec
from bloomery.types.methods import Batches, Supervised
from bloomery.types.rollouts import RolloutGroup
from tests.live import LiveServer, wait_until
from tests.web.conftest import WAIT_MS
from tests.web.world import BASE, World

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

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
    price.get_by_text("$1000.00 + $500000.00").wait_for()
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
    page.get_by_role("status", name="what these requests come to").get_by_text(re.compile(r"^1 request: ")).wait_for()
    rows.first.click()
    page.get_by_role("region", name=re.compile("^Request")).get_by_text(f"tokens · ${cost:.2f}").wait_for()
    assert client.spans.get(before["id"]).span.cost_usd is None
    page.goto("/deployments/priced")
    price.get_by_role("button", name="Change the price").click()
    price.get_by_role("button", name="Forget it").click()
    price.get_by_text("Nobody said what its tokens cost").wait_for()
    assert client.deployments.get("priced").price is None


def test_a_job_is_paused_resumed_cloned_with_other_fields_and_cancelled(page: "Page", world: World, client: Client) -> None:
    long = Supervised(batches=Batches(epochs=1000, rows=8))
    job = client.jobs.create(JobSpec(name="long", base_model=BASE, data=Data(dataset="chats"), method=long, seed=1))
    page.goto(f"/runs/{job.id}")
    page.get_by_text("running", exact=True).wait_for(timeout=60_000)
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.url.endswith("/pause") else None)
    page.get_by_role("button", name="Pause").dblclick()
    page.get_by_text("paused", exact=True).wait_for(timeout=60_000)
    assert len(sent) == 1
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("button", name="Pause").wait_for()
    assert client.jobs.get(job.id).state in ("queued", "running")
    page.get_by_role("button", name="Clone").click()
    page.get_by_role("heading", name="Clone a job").wait_for()
    page.get_by_label("Name", exact=True).fill("cloned")
    page.get_by_label("Epochs").fill("2")
    page.get_by_label("Epochs").press("Tab")
    page.get_by_role("complementary", name="What it would take").locator("dl[aria-busy=false]").wait_for()
    page.get_by_role("button", name="Start the job").click()
    page.get_by_role("heading", name="cloned").wait_for()
    made = client.jobs.get("cloned")
    assert isinstance(made.spec.method, Supervised)
    assert (made.spec.method.batches.epochs, made.spec.method.batches.rows, made.spec.data) == (2, 8, job.spec.data)
    for place in ("cloned", "long"):
        page.goto("/runs")
        page.get_by_role("link", name=place, exact=True).click()
        page.get_by_role("heading", name=place, exact=True).wait_for()
        page.get_by_role("button", name="Cancel").click()
        page.get_by_text("cancelled", exact=True).first.wait_for(timeout=60_000)


def test_rollouts_are_filtered_searched_and_turned_by_the_arrow_keys(page: "Page", world: World, client: Client) -> None:
    run = client.run(world.rewarded.run or "")
    first = run.rollouts.steps()[-1]
    groups = list(run.rollouts.groups(first.step))
    rewards = sorted(rollout.reward for group in groups for rollout in group.rollouts if rollout.reward is not None)
    middle = rewards[len(rewards) // 2]
    page.goto(f"/rollouts/{run.id}?step={first.step}")
    rollouts = page.get_by_role("article", name=re.compile("^rollout "))
    rollouts.nth(len(rewards) - 1).wait_for()
    page.get_by_role("img", name=re.compile(f"^reward of a rollout: {len(rewards)} values")).wait_for()
    page.get_by_label("Reward from").fill(str(middle))
    page.get_by_label("Reward from").press("Tab")
    rollouts.nth(sum(reward >= middle for reward in rewards) - 1).wait_for()
    _expect(rollouts, sum(reward >= middle for reward in rewards))
    page.get_by_label("Reward from").fill("")
    page.get_by_label("Reward from").press("Tab")
    _choice(page, "Groups").select_option("trained on")
    _expect(rollouts, sum(len(group.rollouts) for group in groups if group.trained))
    _choice(page, "Groups").select_option("all")
    word = asked(groups[0])
    page.get_by_label("Search prompts and answers").fill(word)
    page.get_by_label("Search prompts and answers").press("Enter")
    found = list(run.rollouts.groups(first.step, search=word))
    _expect(rollouts, sum(len(group.rollouts) for group in found))
    assert len(found) < len(groups)
    with page.expect_download() as told:
        page.get_by_role("button", name="Export the step").click()
    assert len(told.value.path().read_text().splitlines()) == sum(len(group.rollouts) for group in found)
    page.get_by_role("heading", level=1).click()
    page.keyboard.press("ArrowRight")
    page.wait_for_url(re.compile(rf"step={first.step + 1}(&|$)"))
    page.keyboard.press("ArrowLeft")
    page.wait_for_url(re.compile(rf"step={first.step}(&|$)"))


def asked(group: RolloutGroup) -> str:
    """What only this group's prompt says: its last message."""
    assert group.messages is not None
    return str(group.messages[-1]["content"])


def test_rows_are_curated_from_traffic(page: "Page", world: World, client: Client) -> None:
    client.deployments.create("taught-by-traffic", BASE)
    given = client.chat("taught-by-traffic", [{"role": "user", "content": "grey is rain"}], max_tokens=4, headers={"x-bloomery-consent": "train"})
    client.feedback(given["id"], "correction", "it is", type="demonstration")
    client.datasets.create("curated")
    client.datasets.upload("curated", b'{"text": "a", "label": "b"}', format="jsonl")
    page.goto("/datasets/curated")
    page.get_by_role("button", name="Curate from traffic").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Traffic of").select_option("taught-by-traffic")
    dialog.get_by_role("button", name="Make the version").click()
    page.wait_for_url(re.compile("version=2"))
    (row,) = [
        row for row in client.datasets.rows("curated", client.datasets.get("curated").versions[1].id, "train") if row.source_span == given["id"]
    ]
    assert row.label_source == "correction"


def test_two_evaluations_are_chosen_and_compared_and_one_at_work_is_cancelled(page: "Page", world: World, client: Client) -> None:
    spec = {
        "data": {"dataset": "prompts", "split": "eval", "rows": 8},
        "graders": ["right"],
        "params": {"max_tokens": 48, "seed": 3, "temperature": 1.0},
    }
    other = client.evaluations.create(EvaluationSpec.model_validate({"name": "beside", "models": [BASE], **spec}))
    client.evaluations.wait(other.id, 120)
    page.goto("/evaluations")
    for name in ("compared", "beside"):
        page.get_by_role("checkbox", name=f"compare {name}", exact=True).check()
    page.get_by_role("link", name="Compare 2").click()
    page.get_by_role("heading", name="Compare evaluations").wait_for()
    differing = page.get_by_role("table").filter(has=page.get_by_role("columnheader", name="What differs")).locator("tbody tr")
    differing.filter(has_text="seed").wait_for()
    first, second = (client.evaluations.get(name) for name in ("compared", "beside"))
    assert [line.locator("td").all_inner_texts() for line in differing.all()] == [
        ["models", f"{world.deployment}, {BASE}", BASE],
        ["weights", *(", ".join(map(str, each.versions)) for each in (first, second))],
        ["graders", "right@1, short@1", "right@1"],
        ["temperature", "0", "1"],
        ["seed", "0", "3"],
    ]
    _choice(page, "First").select_option(label=f"{BASE}, in compared")
    _choice(page, "second").select_option(label=f"{BASE}, in beside")
    expected = client.evaluations.pairs("compared", model=BASE, other=BASE, against="beside")
    rows = page.get_by_role("region", name="rows")
    rows.get_by_role("row").nth(1).wait_for()
    summed = f"better {expected.wins} times, worse {expected.losses} and alike {expected.ties};"
    page.get_by_label("what these rows come to").filter(has_text=summed).get_by_text("exact").wait_for()
    page.get_by_role("article").get_by_role("region", name=f"answer of {BASE}, in beside").wait_for()
    long = {"name": "long", "models": [BASE], **spec, "params": {"max_tokens": 400, "samples": 64, "temperature": 1.5}}
    client.evaluations.create(EvaluationSpec.model_validate(long))
    page.goto("/evaluations/long")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="End it").click()
    page.get_by_text("cancelled", exact=True).wait_for()


def test_a_version_is_deployed_under_a_new_name_and_another_made_live(page: "Page", world: World, client: Client) -> None:
    assert world.taught.result is not None
    assert world.rewarded.result is not None
    page.goto("/deployments")
    page.get_by_role("button", name="New deployment").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name that callers give").fill("by-hand")
    dialog.get_by_label("Version").select_option(world.taught.result.version)
    dialog.get_by_role("button", name="Deploy").click()
    page.get_by_role("region", name="Live").get_by_text("revision 1").wait_for(timeout=60_000)
    others, make_live = page.get_by_label("Version to make live"), page.get_by_role("button", name="Make live")
    others.select_option(world.rewarded.result.version)
    make_live.click()
    dialog.get_by_text(f"Who asks by-hand is answered by what job {world.rewarded.spec.name} ended with").wait_for()
    dialog.get_by_role("button", name="Make live").click()
    page.get_by_role("region", name="Live").get_by_text("revision 2").wait_for(timeout=60_000)
    assert client.deployments.get("by-hand").live.version == world.rewarded.result.version
    dialog.wait_for(state="detached")
    assert (others.input_value(), make_live.is_disabled()) == ("", True), "nothing is chosen any more"
    base = client.models()[0].base_hash
    assert f"the base model {BASE} ({base[:12]})" in others.inner_text()
    others.select_option(BASE)
    make_live.click()
    dialog.get_by_role("checkbox", name=re.compile("^compared: ")).check()
    dialog.get_by_role("button", name="Make live").click()
    page.get_by_role("region", name="Live").get_by_text("revision 3").wait_for(timeout=60_000)
    dialog.wait_for(state="detached")
    assert f"the base model {BASE}" not in others.inner_text(), "it is live"
    assert ("compared", BASE) in {(each["name"], each["model"]) for each in client.deployments.get("by-hand").live.evidence["evaluations"]}


def test_traces_are_filtered_by_what_the_address_keeps(page: "Page", world: World, client: Client) -> None:
    client.deployments.create("filtered", BASE)
    said = [{"role": "user", "content": "red is moon"}]
    client.chat("filtered", said, max_tokens=2, headers={"x-bloomery-episode": "an-episode"})
    client.chat("filtered", said, max_tokens=2)
    page.goto("/traces")
    rows = page.get_by_role("region", name="requests", exact=True).locator("tbody tr")
    _choice(page, "of").select_option("filtered")
    _expect(rows, 2)
    page.get_by_label("episode").fill("an-episode")
    page.get_by_label("episode").press("Enter")
    _expect(rows, 1)
    page.get_by_label("episode").fill("")
    page.get_by_label("episode").press("Enter")
    page.get_by_label("since").select_option("an hour ago")
    _choice(page, "by").select_option(client.deployments.get("filtered").live.version)
    _expect(rows, 2)
    _choice(page, "that").select_option("failed")
    page.get_by_text("Nothing is recorded that fits").wait_for()
    page.reload()
    page.get_by_text("Nothing is recorded that fits").wait_for()
    assert all(each in page.url for each in ("deployment=filtered", "status=error", "since=hour"))
    client.chat(BASE, said, max_tokens=2)
    page.goto("/traces")
    _choice(page, "of").select_option(f"{BASE}, the base itself")
    page.wait_for_url(f"**base={BASE}")
    rows.first.wait_for()
    _expect(rows.filter(has_not_text=BASE), 0)
    _choice(page, "of").select_option("every model")
    _choice(page, "Show").select_option("samples of training")
    page.wait_for_url("**kinds=samples")
    rows.first.wait_for()


def test_of_a_request_for_embeddings_its_kind_is_told_and_no_answer_is_asked_for(page: "Page", server: LiveServer, client: Client) -> None:
    client.deployments.create("embedding", BASE)
    headers = {"x-api-key": server.key, "x-bloomery-consent": "train"}
    asked = httpx.post(f"{server.url}/v1/embeddings", json={"model": "embedding", "input": "red is moon"}, headers=headers, timeout=60)
    assert asked.status_code == 200
    wait_until(lambda: len(client.spans.list(deployment="embedding")) == 1)
    page.goto("/traces?deployment=embedding")
    row = page.get_by_role("region", name="requests", exact=True).locator("tbody tr").first
    row.get_by_role("cell", name="embedding", exact=True).wait_for()
    row.click()
    request = page.get_by_role("region", name=re.compile("^Request"))
    request.get_by_text(" · embedding · embedding, revision 1").wait_for()
    request.get_by_role("button", name="Good").wait_for()
    for absent in (request.get_by_label("What would have been right"), request.get_by_role("link", name="Curate")):
        assert absent.count() == 0


def test_pairs_are_judged_by_keyboard_and_measure_a_judge(page: "Page", world: World, client: Client) -> None:
    page.goto(f"/labelling?evaluation={world.evaluation}&mode=pairs&grader=short")
    page.get_by_role("region", name="answers to compare").wait_for()
    items = list(client.evaluations.items(world.evaluation))
    texts = {(item.row, item.model): item.answer.text for item in items}
    different = sum(texts[row, world.deployment] != texts[row, BASE] for row in range(8))
    assert different >= 4
    for given in ("1", "2", "0", "s"):
        page.keyboard.press(given)
    page.get_by_text(f"4 / {different}").wait_for()
    page.keyboard.press("u")
    page.get_by_text(f"3 / {different}").wait_for()
    page.get_by_role("button", name="With 3 pairs").click()
    card = page.get_by_role("status").get_by_role("region", name=re.compile("^card of"))
    card.get_by_text("3 pairs that people compared").wait_for()
    kept = client.graders.calibrations("short")[0]
    assert kept.pairs is not None
    assert (kept.rows, kept.pairs.people_ties, kept.pairs.people_first.hits, kept.pairs.people_first.total) == (3, 1, 1, 2)


def test_what_attacks_find_of_a_grader_is_waived_with_a_reason(page: "Page", world: World, client: Client) -> None:
    client.graders.create("pays", {"type": "function", "source": "def score(output):\n    return float(len(output) > 3)\n", "entry": "score"})
    assert client.graders.attack("pays", dataset="prompts").verdict == "hackable"
    page.goto("/graders/pays")
    page.get_by_role("button", name="Waive…").click()
    page.get_by_role("dialog").get_by_label("Reason").fill("a test is to be long")
    page.get_by_role("dialog").get_by_role("button", name="Waive").click()
    page.get_by_text("a test is to be long").wait_for()
    waiver = client.graders.get("pays").waiver
    assert waiver is not None
    assert waiver.reason == "a test is to be long"


def _choice(page: "Page", label: str) -> "Locator":
    """A list in a label, whose name goes on with what is chosen."""
    return page.get_by_role("combobox", name=re.compile(f"^{label}( |$)"))


def _expect(rows: "Locator", count: int) -> None:
    """So many, soon."""
    from playwright.sync_api import expect

    expect(rows).to_have_count(count, timeout=WAIT_MS)
