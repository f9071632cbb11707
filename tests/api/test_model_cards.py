"""Model cards: every fact that the server has of a version, as JSON and as the Markdown that hubs read, and what it does not have said plainly."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from bloomery.client import Client
from bloomery.client.training import TrainingRun
from bloomery.sync.publish import manifest_key
from bloomery.types.errors import Conflict, InvalidInput, NotFound
from bloomery.types.jobs import Begin, Compared, Data, JobPoint, JobProgress, JobResult, JobSpec
from bloomery.types.leases import FinishJob, ReportJob
from bloomery.types.methods import Reinforcement
from bloomery.types.model_cards import Figure
from bloomery.types.operations import SnapshotResult
from tests.api.server import URL, Server, serving
from tests.services.fake_engine import BASE
from tests.sync.test_manifest import manifest

ROW = '{"text": "a", "label": "b"}'
ROWS = Data(dataset="rows")
BETTER = Compared(
    name="loss",
    rows=4,
    before=2.0,
    after=1.0,
    before_interval=(1.5, 2.5),
    after_interval=(0.5, 1.5),
    difference=-1.0,
    difference_interval=(-1.25, -0.75),
    higher_is_better=False,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as server:
        client = server.client()
        client.datasets.create("rows")
        client.datasets.add_version("rows", {"train": ROW})
        yield server


@pytest.fixture
def client(server: Server) -> Client:
    return server.client()


def publish(server: Server, run: TrainingRun, name: str, **changes: Any) -> SnapshotResult:
    """With a manifest, which the engine of these tests writes none of."""
    done = run.save_snapshot(name).result()
    known = manifest(run_id=run.id, step=done.step, base=BASE, rank=16, numerics="trained-here", key=done.key, **changes)
    server.engine.blobs.put(manifest_key(done.version), known.to_json())
    return done


def trained(server: Server, name: str, *, compared: tuple[Compared, ...] = (), data: Data = ROWS, **spec: Any) -> JobResult:
    """What came of a job whose process we are."""
    client = server.client()
    client.jobs.create(JobSpec(name=name, base_model="tiny", data=data, seed=1, **spec))
    lease = client.runner("r").claim(0)
    assert lease is not None
    theirs = Client(URL, lease.token, transport=server.transport)
    run = theirs.create_run("tiny", 16, seed=1)
    publish(server, run, "step-1")
    run.optim_step(1e-3).result()
    kept, published = run.save_checkpoint("final").result(), publish(server, run, "final")
    points = [JobPoint(step=1, values={"loss": 2.0, "evaluation/loss": 3.0}), JobPoint(step=2, values={"loss": 1.5})]
    working = theirs.working(lease.job.id)
    working.report(ReportJob(run=run.id, points=points, progress=JobProgress(step=2, steps=2, tokens=70, seconds=3.25)))
    result = JobResult(
        run=run.id,
        version=published.version,
        checkpoint="final",
        step=published.step,
        digest=kept.digest,
        compared=list(compared),
        base_version="tiny",
        fidelity=theirs.versions.measure_fidelity(published.version),
    )
    working.finish(FinishJob(state="succeeded", result=result))
    return result


def front_matter(text: str) -> Any:
    opening, said, _ = text.split("---\n", 2)
    assert opening == ""
    return yaml.safe_load(said)


def test_a_card_has_what_is_known_of_a_version_from_its_base_to_its_comparison(server: Server, client: Client) -> None:
    first = trained(server, "first")
    second = trained(server, "second", begin=Begin(job="first"), compared=(BETTER,), metadata={"note": "mine | alone"})
    card = client.jobs.card("second")
    version = client.datasets.get("rows").versions[0]
    assert (card.version, card.run, card.digest, card.compared_with) == (second.version, second.run, second.digest, "tiny")
    assert (card.base_model, card.kind, card.rank, card.alpha, card.tokens, card.seconds) == ("tiny", "lora", 16, 32.0, 70, 3.25)
    assert [(each.job, each.method, each.run, each.version) for each in card.lineage] == [("first", "sft", first.run, first.version)]
    assert card.trained_on is not None
    assert (card.trained_on.version, card.trained_on.manifest, card.trained_on.counts) == (version.id, version.manifest, version.counts)
    assert card.compared == [BETTER]
    assert card.fidelity == second.fidelity
    assert card.spec == client.jobs.get("second").spec
    # The weights are those behind the first step of the run, and so is all that is said of them.
    assert card.figures == [Figure(name="evaluation/loss", step=1, value=3.0), Figure(name="loss", step=1, value=2.0)]
    assert client.versions.card(second.version) == card


def test_the_text_is_of_the_same_facts_and_its_front_matter_is_what_hubs_read(server: Server, client: Client) -> None:
    result = trained(server, "told", compared=(BETTER,))
    text = client.jobs.card_text("told")
    assert front_matter(text) == {
        "license": "unknown",
        "base_model": "tiny",
        "base_model_relation": "adapter",
        "datasets": ["rows"],
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["bloomery", "sft", "lora"],
    }
    card = client.jobs.card("told")
    assert card.fidelity is not None
    for fact in (result.version, result.digest, card.numerics, card.base_hash, card.run, "-1 [-1.25, -0.75]", card.fidelity.numerics):
        assert fact in text
    assert '"learning_rate": 0.001' in text
    assert "- the license of the weights\n" in text
    assert client.versions.card_text(result.version) == text


def test_what_was_not_measured_is_said_and_not_left_out(server: Server, client: Client) -> None:
    alone = trained(server, "alone")
    assert client.jobs.card("alone").not_measured[0] == "how it does beside what it began with: no rows were held out"
    assert "## Beside" not in client.jobs.card_text("alone")
    run = client.run(alone.run)
    before = next(kept.version for kept in run.checkpoints() if kept.name == "step-1" and kept.version is not None)
    card = client.versions.card(before)
    assert (card.job, card.compared, card.digest, card.tokens, card.figures) == ("alone", [], None, None, [])
    assert any("only what a job ends with is compared" in each for each in card.not_measured)
    assert any(each.startswith("fidelity: ") for each in card.not_measured)
    by_hand = publish(server, client.create_run("tiny", 8), "mine", kind="full").version
    card = client.versions.card(by_hand)
    assert (card.kind, card.job, card.spec, card.trained_on) == ("full", None, None, None)
    assert card.not_measured[0] == "what it was trained on and how: no managed job made it"
    assert front_matter(client.versions.card_text(by_hand))["library_name"] == "transformers"


def test_a_card_says_what_is_known_of_the_grader_that_training_followed(server: Server, client: Client) -> None:
    rows = [{"messages": [{"role": "user", "content": "Where?"}], "city": city} for city in ("Oslo", "Rome", "Lima", "Bonn", "Bern")]
    client.datasets.create("prompts")
    client.datasets.add_version("prompts", {"train": "\n".join(map(json.dumps, rows))})
    client.graders.create("lengthy", {"type": "function", "source": "def score(output): return len(output) / 20", "entry": "score"})
    trained(server, "rewarded", data=Data(dataset="prompts"), method=Reinforcement(grader="lengthy", max_tokens=8))
    found = client.jobs.card("rewarded").rewarded_by
    assert found is not None
    assert (found.grader, found.version, found.judges, found.verdict, found.waiver) == ("lengthy", 1, {}, None, None)
    assert "whether its grader pays without competence: no attack on the prompts says so" in client.jobs.card("rewarded").not_measured
    attack = client.graders.attack("lengthy", dataset="prompts")
    waiver = client.graders.waive("lengthy", "a story is to be long").waiver
    card, text = client.jobs.card("rewarded"), client.jobs.card_text("rewarded")
    assert card.rewarded_by is not None
    assert (card.rewarded_by.verdict, card.rewarded_by.why, card.rewarded_by.waiver) == ("hackable", attack.why, waiver)
    assert card.rewarded_by.exploits == [exploit.name for exploit in attack.exploits] != []
    assert not any("competence" in each for each in card.not_measured)
    for fact in (attack.why, attack.exploits[0].name, "by development: a story is to be long", card.rewarded_by.hash):
        assert fact in text


def test_a_card_says_the_same_of_the_grader_that_was_held_out(server: Server, client: Client) -> None:
    rows = [{"messages": [{"role": "user", "content": "Whence?"}], "city": city} for city in ("Oslo", "Rome", "Lima", "Bonn", "Bern")]
    client.datasets.create("held-out-prompts")
    client.datasets.add_version("held-out-prompts", {"train": "\n".join(map(json.dumps, rows))})
    for name, measure in (("followed", "len(output) / 21"), ("unfollowed", "len(output) / 22")):
        client.graders.create(name, {"type": "function", "source": f"def score(output): return {measure}", "entry": "score"})
    method = Reinforcement(grader="followed", held_out_grader="unfollowed", max_tokens=8)
    trained(server, "watched", data=Data(dataset="held-out-prompts"), method=method)
    before = client.jobs.card("watched")
    assert before.held_out_by is not None
    assert (before.held_out_by.grader, before.held_out_by.version, before.held_out_by.verdict) == ("unfollowed", 1, None)
    missing = "whether its held-out grader pays without competence: no attack on the prompts says so"
    assert missing in before.not_measured
    attack = client.graders.attack("unfollowed", dataset="held-out-prompts")
    waiver = client.graders.waive("unfollowed", "nobody follows it").waiver
    card, text = client.jobs.card("watched"), client.jobs.card_text("watched")
    assert card.held_out_by is not None
    assert (card.held_out_by.verdict, card.held_out_by.why, card.held_out_by.waiver) == ("hackable", attack.why, waiver)
    assert card.held_out_by.exploits == [exploit.name for exploit in attack.exploits] != []
    assert missing not in card.not_measured
    assert card.rewarded_by is not None
    assert (card.rewarded_by.grader, card.rewarded_by.waiver) == ("followed", None)
    held_out = text.partition("## What else scored its answers, held out of training")[2].partition("\n## ")[0]
    for fact in (attack.why, attack.exploits[0].name, "by development: nobody follows it", card.held_out_by.hash):
        assert fact in held_out


def test_a_card_says_that_its_data_set_is_gone(server: Server, client: Client) -> None:
    client.datasets.create("fleeting")
    client.datasets.add_version("fleeting", {"train": ROW})
    trained(server, "of-fleeting", data=Data(dataset="fleeting"))
    assert client.jobs.card("of-fleeting").trained_on is not None
    client.datasets.delete("fleeting")
    card = client.jobs.card("of-fleeting")
    assert (card.trained_on, card.not_measured[0]) == (None, "what it was trained on: data set `fleeting` was deleted")
    assert "data set `fleeting` was deleted" in client.jobs.card_text("of-fleeting")


def test_what_has_no_card_is_refused(server: Server, client: Client) -> None:
    client.jobs.create(JobSpec(name="waits", base_model="tiny", data=Data(dataset="rows")))
    with pytest.raises(Conflict, match="job `waits` is queued, and no model has come of it"):
        client.jobs.card("waits")
    with pytest.raises(InvalidInput, match="is the base model itself"):
        client.versions.card("tiny")
    with pytest.raises(NotFound):
        client.versions.card("none")
    client.jobs.cancel("waits")
