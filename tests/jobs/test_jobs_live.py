"""Managed jobs on a real server: whoever dies, and whoever asks it to stand still, a job ends with the weights that it would have had."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

from bloomery.client import Client
from bloomery.models import tiny
from bloomery.recipes.pairs import SYSTEM, WORDS
from bloomery.types.errors import BloomeryError, Conflict, InvalidInput, NotFound, Unavailable
from bloomery.types.jobs import Begin, Data, Evaluation, Job, JobSample, JobSpec, JobState, Watch
from bloomery.types.methods import Batches, EarlyStopping, Optimizer, Schedule, Supervised
from tests.live import LiveServer, alive, running_server, wait_until

BASE = "bloomery-tiny"
ENGINE = f"engine-{BASE}"
WORKER = "worker"
"""Whatever works at a job."""
STEPS = 30


def rows(count: int, seed: int) -> str:
    """Pairs of words to be written as JSON."""
    random, lines = Random(seed), []
    for _ in range(count):
        words = random.sample(WORDS, 4)
        pairs = dict(zip(words[::2], words[1::2], strict=True))
        asked = ", ".join(f"{key} is {value}" for key, value in pairs.items())
        messages = [("system", SYSTEM), ("user", asked), ("assistant", json.dumps(pairs))]
        lines.append(json.dumps({"messages": [{"role": role, "content": content} for role, content in messages]}))
    return "\n".join(lines)


def import_pairs(client: Client, name: str) -> None:
    client.datasets.create(name)
    client.datasets.add_version(name, {"train": rows(STEPS * 4, seed=1), "eval": rows(12, seed=2)})


def spec(name: str, dataset: str, **changes: Any) -> JobSpec:
    method = Supervised(optimizer=Optimizer(learning_rate=4e-3), batches=Batches(epochs=1, rows=4))
    known: dict[str, Any] = {"name": name, "base_model": BASE, "data": Data(dataset=dataset), "method": method, "seed": 1}
    known |= {"evaluation": Evaluation(every=10, answers=4, max_tokens=48, served_every=15), "checkpoint_every": 10}
    return JobSpec(**known | changes)


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[Client]:
    with Client(live_server.url, live_server.key) as client:
        import_pairs(client, "pairs")
        yield client


def answered_as_they_are_served(client: Client, job: Job, asked: list[Any], max_tokens: int) -> list[JobSample]:
    """The samples of a job, which say what its weights, and those before them, answer to these questions of its held-out rows."""
    assert job.result is not None
    assert job.result.samples
    for sample in job.result.samples:
        for version, said in ((job.result.base_version, sample.before), (job.result.version, sample.after)):
            served = client.chat(version, asked[sample.row], max_tokens=max_tokens, temperature=0)
            assert served["choices"][0]["message"]["content"] == said
        assert sample.asked == asked[sample.row][-1]["content"]
    assert job.result.samples == sorted(job.result.samples, key=lambda each: (each.before == each.after, each.row))
    return job.result.samples


def both_of(samples: list[JobSample]) -> tuple[list[str], list[str]]:
    return [each.before for each in samples], [each.after for each in samples]


@pytest.mark.slow
def test_a_job_trains_publishes_and_is_compared_with_its_base(client: Client) -> None:
    job = client.jobs.wait(client.jobs.create(spec("first", "pairs")).id, 240)
    assert (job.state, job.reason, job.progress.step, job.progress.steps) == (JobState.SUCCEEDED, None, STEPS, STEPS)
    assert job.result is not None
    loss, exact = job.result.compared
    assert (loss.name, loss.rows, exact.name, exact.rows) == ("loss", 12, "exact", 4)
    samples = answered_as_they_are_served(client, job, [json.loads(line)["messages"][:-1] for line in rows(12, seed=2).splitlines()], 48)
    assert len(samples) == 4
    assert [each.reference for each in samples] == [
        json.loads(rows(12, seed=2).splitlines()[each.row])["messages"][-1]["content"] for each in samples
    ]
    assert [fmean(said == each.reference for said, each in zip(answers, samples, strict=True)) for answers in both_of(samples)] == [
        exact.before,
        exact.after,
    ]
    assert loss.difference_interval[1] < 0
    assert loss.after == pytest.approx(loss.before + loss.difference)
    assert job.result.fidelity is not None
    assert job.result.fidelity.verdict == "pass"
    assert client.jobs.card("first").fidelity == job.result.fidelity == client.versions.fidelity(job.result.version)
    points = client.jobs.points("first")
    assert [point.step for point in points] == list(range(1, STEPS + 1))
    assert all({"loss", "learning_rate", "gradient_norm"} <= point.values.keys() for point in points)
    assert [point.step for point in points if "evaluation/loss" in point.values] == [10, 20, 30]
    assert [(point.step, point.values["served/exact"]) for point in points if "served/exact" in point.values] == [(15, pytest.approx(0, abs=1))]
    kept = {checkpoint.name for checkpoint in client.run(job.result.run).checkpoints()}
    assert kept == {"step-10", "step-20", "final"}
    answer = client.chat(job.result.version, [{"role": "user", "content": "red is blue"}], max_tokens=4)
    assert answer["system_fingerprint"] == job.result.version
    with pytest.raises(Conflict, match="there is a job `first` already"):
        client.jobs.create(spec("first", "pairs"))
    with pytest.raises(Conflict, match="has succeeded, and cannot be cancelled"):
        client.jobs.cancel("first")


@pytest.mark.slow
def test_a_job_begins_where_another_ended(client: Client) -> None:
    before = client.jobs.wait(client.jobs.create(spec("base-of-second", "pairs")).id, 240)
    assert before.result is not None
    job = client.jobs.wait(client.jobs.create(spec("second", "pairs", begin=Begin(job="base-of-second"))).id, 240)
    assert job.result is not None
    assert job.spec.begin is not None
    assert (job.spec.begin.run, job.spec.begin.checkpoint) == (before.result.run, "final")
    assert job.result.compared[0].before == pytest.approx(before.result.compared[0].after, abs=1e-6)


@pytest.mark.slow
def test_jobs_that_share_an_engine_go_on_side_by_side_with_the_weights_that_each_has_alone(client: Client) -> None:
    method = Supervised(optimizer=Optimizer(learning_rate=4e-3), batches=Batches(epochs=4, rows=4))
    others: dict[str, Any] = {"method": method, "evaluation": Evaluation(answers=0), "checkpoint_every": 0}
    alone = client.jobs.wait(client.jobs.create(spec("alone", "pairs", **others)).id, 240)
    left, right = (client.jobs.create(spec(name, "pairs", **others)).id for name in ("left", "right"))

    def steps() -> list[int]:
        return [client.jobs.get(job).progress.step for job in (left, right)]

    wait_until(lambda: max(steps()) == 4 * STEPS)
    # Neither waits until the other is done.
    assert min(steps()) > 2 * STEPS
    both = [client.jobs.wait(job, 240) for job in (left, right)]
    assert {_trained(job)[:2] for job in (alone, *both)} == {(alone.result and alone.result.digest, 4 * STEPS)}


@pytest.mark.slow
def test_a_loss_that_falls_no_more_ends_a_job_early(client: Client) -> None:
    method = Supervised(
        optimizer=Optimizer(learning_rate=1e-6), batches=Batches(epochs=1, rows=4), early_stopping=EarlyStopping(patience=2, min_delta=0.5)
    )
    asked = spec("early", "pairs", method=method, evaluation=Evaluation(every=2, answers=0), checkpoint_every=0)
    job = client.jobs.wait(client.jobs.create(asked).id, 240)
    assert job.result is not None
    assert (job.result.step, job.progress.step) == (6, 6)
    assert "ended early at step 6: the held-out loss fell no more" in " ".join(event.message for event in client.jobs.events("early"))


@pytest.mark.slow
def test_a_training_that_goes_wrong_fails_or_stands_still_and_goes_on_where_somebody_wants_it_to(client: Client) -> None:
    lost = Optimizer(learning_rate=100.0, schedule=Schedule(kind="constant", warmup_share=0.0))
    asked = {"method": Supervised(optimizer=lost, batches=Batches(epochs=1, rows=4)), "evaluation": Evaluation(answers=0), "checkpoint_every": 0}
    stopped = client.jobs.wait(client.jobs.create(spec("stopped", "pairs", watch=Watch(action="stop"), **asked)).id, 240)
    assert (stopped.state, stopped.result) == (JobState.FAILED, None)
    assert str(stopped.reason).startswith("stopped by its watch: divergence at step 10: the loss rose from ")
    still = client.jobs.wait(client.jobs.create(spec("still", "pairs", watch=Watch(action="pause"), **asked)).id, 240)
    reasons = []
    while still.state is JobState.PAUSED:
        reasons.append(str(still.reason))
        still = client.jobs.wait(client.jobs.resume("still").id, 240)
    # Each trouble is acted on once.
    assert reasons[0].startswith("divergence at step 10: ")
    assert len({reason.partition(" at step ")[0] for reason in reasons}) == len(reasons)
    assert (still.state, still.reason, still.progress.step) == (JobState.SUCCEEDED, None, STEPS)


def test_rows_that_are_too_long_fail_the_job_by_their_numbers(client: Client) -> None:
    job = client.jobs.wait(client.jobs.create(spec("long", "pairs", max_context=10)).id, 240)
    assert job.state is JobState.FAILED
    assert job.reason is not None
    assert "rows of `train` cannot be used: row 0: " in job.reason
    assert "tokens, and 10 are taken" in job.reason


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"base_model": "nobody"}, NotFound, "base_model"),
        ({"data": Data(dataset="nothing")}, NotFound, "data.dataset"),
        ({"data": Data(dataset="pairs", version="none")}, NotFound, "data.version"),
        ({"data": Data(dataset="pairs", train="validation")}, InvalidInput, "data.train"),
        ({"max_context": 1 << 20}, InvalidInput, "max_context"),
        ({"begin": Begin(job="nobody")}, NotFound, "begin.job"),
        ({"begin": Begin(run="run-none", checkpoint="final")}, NotFound, "begin.checkpoint"),
    ],
    ids=["model", "data", "version", "split", "context", "job", "run"],
)
def test_what_cannot_be_done_is_refused_before_there_is_a_job(client: Client, changes: dict[str, Any], kind: type[BloomeryError], field: str) -> None:
    with pytest.raises(kind) as refused:
        client.jobs.create(spec("refused", "pairs", **changes))
    assert refused.value.field == field
    with pytest.raises(NotFound):
        client.jobs.get("refused")


def workers(server: LiveServer) -> list[int]:
    """The processes of jobs."""
    runner, found = server.pid("jobs"), list[int]()
    # Threads of the runner end while they are looked at, and so may it.
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{runner}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text().split())
    return [pid for pid in found if alive(pid)]


def kill(server: LiveServer, *names: str) -> None:
    """All of these processes at once; those that are starting again are waited for."""
    pids = [server.pid(name) for name in names if name != WORKER]
    working: list[int] = []

    def somebody_works() -> bool:
        working[:] = workers(server)
        return bool(working)

    if WORKER in names:
        wait_until(somebody_works)
    for pid in pids + working:
        os.kill(pid, signal.SIGKILL)


def wait_until_seen(server: LiveServer, condition: Callable[[Client], bool]) -> None:
    """By a client that asks again at once while nobody answers: one that is patient pauses for seconds in the end, and misses what passes by."""
    with Client(server.url, server.key, patience_s=0) as impatient:

        def holds() -> bool:
            try:
                return condition(impatient)
            except Unavailable:
                return False

        wait_until(holds)


@pytest.mark.slow
def test_a_job_ends_with_the_weights_it_would_have_had_whoever_dies(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", jobs=1) as server, ExitStack() as stack:
        client = stack.enter_context(Client(server.url, server.key))
        import_pairs(client, "pairs")
        # Long enough that whoever is asked to pause still has steps to take.
        long = Supervised(optimizer=Optimizer(learning_rate=4e-3), batches=Batches(epochs=4, rows=4))
        reference = client.jobs.wait(client.jobs.create(spec("undisturbed", "pairs", method=long)).id, 240)
        disturbed = client.jobs.create(spec("disturbed", "pairs", method=long)).id

        def at(step: int) -> None:
            wait_until_seen(server, lambda asking: asking.jobs.get(disturbed).progress.step >= step)

        for step, name in ((2, WORKER), (25, "jobs"), (45, ENGINE), (60, "api")):
            at(step)
            kill(server, name)
        for step, names in ((70, []), (80, ["api", "jobs"])):
            at(step)
            client.jobs.pause(disturbed)
            kill(server, *names)
            paused = client.jobs.wait(disturbed, 120)
            assert paused.state is JobState.PAUSED
            client.jobs.resume(disturbed)
            # The process that paused is gone once another has taken a step.
            at(paused.progress.step + 1)
        kill(server, WORKER)
        job = client.jobs.wait(disturbed, 300)
        assert _trained(job) == _trained(reference)
        assert [(point.step, point.values) for point in client.jobs.points(disturbed)] == [
            (point.step, point.values) for point in client.jobs.points("undisturbed")
        ]
        assert job.epoch > 4


@pytest.mark.slow
def test_a_job_whose_base_model_is_not_served_any_more_stands_still_until_it_is(tmp_path: Path) -> None:
    with running_server(tmp_path / "data") as server, Client(server.url, server.key) as client:
        import_pairs(client, "pairs")
        client.jobs.create(spec("orphan", "pairs", evaluation=Evaluation(answers=0)))
    with running_server(tmp_path / "data", "--model", f"other={tiny.PATH}", jobs=1) as server, Client(server.url, server.key) as client:
        wait_until(lambda: client.jobs.get("orphan").state not in (JobState.QUEUED, JobState.RUNNING))
        job = client.jobs.get("orphan")
        assert job.state is JobState.PAUSED
        assert any("start the server with it, and resume the job" in event.message for event in client.jobs.events("orphan"))
    with running_server(tmp_path / "data", jobs=1) as server, Client(server.url, server.key) as client:
        client.jobs.resume("orphan")
        assert client.jobs.wait("orphan", 240).state is JobState.SUCCEEDED


def _trained(job: Job) -> tuple[str, int, list[Any], list[JobSample] | None]:
    assert job.result is not None, job.reason
    return job.result.digest, job.result.step, job.result.compared, job.result.samples
