"""Jobs of preference, reinforcement and distillation that lose processes at whatever they do end with the weights that they would have had."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.client import Client
from bloomery.types.jobs import Data, Evaluation, Job, JobSample, JobSpec, JobState
from bloomery.types.methods import Batches, DirectPreference, Distillation, EarlyStopping, OddsRatioPreference, Optimizer, Reinforcement, Supervised
from tests.jobs.test_jobs_live import ENGINE, WORKER, kill, wait_until_seen
from tests.jobs.test_methods_live import BASE, GRADER, chat, lines, pairs, preference, prompt
from tests.live import running_server
from tests.services.runs_stage import datum

NEVER_BETTER = EarlyStopping(patience=1, min_delta=1000.0)
METHODS: dict[str, tuple[Any, Any]] = {
    "sft": (chat, Supervised(batches=Batches(epochs=2, rows=4))),
    "dpo": (preference, DirectPreference(optimizer=Optimizer(learning_rate=5e-4), batches=Batches(epochs=2, rows=4))),
    "orpo": (preference, OddsRatioPreference(batches=Batches(epochs=2, rows=4))),
    # Whose second evaluation ends it, at step 6.
    "rft": (prompt, Reinforcement(grader="right", loss="gspo", steps=9, groups_per_step=2, group_size=4, max_tokens=32, early_stopping=NEVER_BETTER)),
    # With no staleness the groups of a step follow from the seed.
    "asynchronous": (
        prompt,
        Reinforcement(grader="right", steps=8, groups_per_step=2, group_size=4, max_tokens=32, asynchronous=True, max_staleness=0),
    ),
    "distill": (prompt, Distillation(teacher=BASE, steps=8, prompts_per_step=2, max_tokens=32)),
}


Moment = Callable[[Client, str], bool]


def attacked(client: Client, job: str) -> bool:
    """Its grader is, and nobody knows yet what comes of that."""
    told = [event.message for event in client.jobs.events(job)]
    return any("asks whether its grader pays" in message for message in told) and not any("to attacks:" in message for message in told)


def stepped(step: int) -> Moment:
    return lambda client, job: client.jobs.get(job).progress.step >= step


def saved(kind: str, name: str) -> Moment:
    """What comes next has just begun."""

    def there(client: Client, job: str) -> bool:
        run = client.jobs.get(job).run
        return run is not None and (kind, name) in {(each.kind, each.name) for each in client.run(run).checkpoints()}

    return there


BEFORE_IT_REINFORCES: list[tuple[Moment, list[str]]] = [(attacked, ["api"]), (attacked, ["jobs"])]
STRIKES: list[tuple[Moment, list[str]]] = [
    (stepped(1), [WORKER]),
    (saved("named", "step-2"), [ENGINE]),
    (stepped(4), ["api", "jobs"]),
    (saved("named", "final"), [ENGINE]),
    # From here on the end is compared with the base.
    (saved("snapshot", "final"), ["api"]),
    (saved("snapshot", "final"), ["jobs"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_job_that_loses_any_of_its_processes_at_any_moment_ends_as_if_nothing_had_happened(tmp_path: Path, method: str) -> None:
    row, asked = METHODS[method]
    with running_server(tmp_path / "data", jobs=1) as server, Client(server.url, server.key) as client:
        client.datasets.create("rows")
        client.datasets.add_version(
            "rows", {"train": lines([row(each) for each in pairs(32, 1)]), "eval": lines([row(each) for each in pairs(4, 2)])}
        )
        client.graders.create("right", {"type": "function", "source": GRADER, "entry": "score"})
        if isinstance(asked, Distillation):
            asked = asked.model_copy(update={"teacher": somewhere_else(client)})

        def create(name: str) -> str:
            evaluation = Evaluation(every=3, served_every=2)
            spec = JobSpec(name=name, base_model=BASE, data=Data(dataset="rows"), method=asked, evaluation=evaluation, seed=1, checkpoint_every=2)
            return client.jobs.create(spec).id

        # The first of the two: what attacks of its grader come to, the second finds known.
        disturbed = create("disturbed")
        for moment, names in (BEFORE_IT_REINFORCES if isinstance(asked, Reinforcement) else []) + STRIKES:
            wait_until_seen(server, lambda asking, moment=moment: asking.jobs.get(disturbed).state.ended or moment(asking, disturbed))  # type: ignore[misc]
            assert not client.jobs.get(disturbed).state.ended, client.jobs.get(disturbed).reason
            kill(server, *names)
        job = client.jobs.wait(disturbed, 300)
        reference = client.jobs.wait(create("undisturbed"), 300)
        assert _came_of(job) == _came_of(reference)
        # Of its own process, and of the runner's twice, or three times.
        assert job.epoch >= 4
        assert kept(client, job) == kept(client, reference)
        assert measured(client, "disturbed") == measured(client, "undisturbed")
        assert job.progress.tokens == reference.progress.tokens
        early = [[event.message for event in client.jobs.events(each.id) if event.message.startswith("ended early")] for each in (job, reference)]
        assert early == [["ended early at step 6: the held-out reward rose no more"] * (method == "rft")] * 2


def kept(client: Client, job: Job) -> list[tuple[str, str | None, int, str | None]]:
    """Of the run, in its order, each once."""
    assert job.result is not None
    found = [(each.kind, each.name, each.step, each.digest) for each in client.run(job.result.run).checkpoints() if each.name]
    assert len([each for each in found if (each[1] or "").startswith("step-")]) >= 2
    return found


def somewhere_else(client: Client) -> str:
    """Weights to learn from."""
    run = client.create_run(BASE, 4, seed=9)
    for _ in range(3):
        run.forward_backward([datum([100 + place for place in range(20)])])
        run.optim_step(2e-2)
    return run.save_snapshot("teacher").result().version


def measured(client: Client, name: str) -> list[tuple[int, dict[str, Any]]]:
    """Of every step, without how long it took and what was asked again meanwhile."""
    by_chance = ("seconds", "idle/", "overlap/", "per_s", "failures/", "grading/", "drawn_deviation")
    return [
        (point.step, {key: value for key, value in point.values.items() if not any(part in key for part in by_chance)})
        for point in client.jobs.points(name)
    ]


def _came_of(job: Job) -> tuple[str, int, list[Any], list[JobSample]]:
    assert job.state is JobState.SUCCEEDED, job.reason
    assert job.result is not None
    assert job.result.samples
    return job.result.digest, job.result.step, job.result.compared, job.result.samples
