"""Jobs of preference, reinforcement and distillation that lose their process and their engine end with the weights that they would have had."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bloomery.client import Client
from bloomery.types.jobs import (
    Batches,
    Data,
    DirectPreference,
    Distillation,
    Evaluation,
    Job,
    JobSpec,
    JobState,
    OddsRatioPreference,
    Optimizer,
    Reinforcement,
)
from tests.jobs.test_jobs_live import kill_worker
from tests.jobs.test_methods_live import BASE, GRADER, lines, pairs, preference, prompt
from tests.live import running_server, wait_until
from tests.services.runs_stage import datum

METHODS: dict[str, tuple[Any, Any]] = {
    "dpo": (preference, DirectPreference(optimizer=Optimizer(learning_rate=5e-4), batches=Batches(epochs=2, rows=4))),
    "orpo": (preference, OddsRatioPreference(batches=Batches(epochs=2, rows=4))),
    "rft": (prompt, Reinforcement(grader="right", loss="gspo", steps=8, groups_per_step=2, group_size=4, max_tokens=32)),
    "distill": (prompt, Distillation(teacher=BASE, steps=8, prompts_per_step=2, max_tokens=32)),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_job_that_loses_its_process_and_its_engine_ends_as_if_nothing_had_happened(tmp_path: Path, method: str) -> None:
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

        reference = client.jobs.wait(create("undisturbed"), 300)
        disturbed = create("disturbed")
        for step, strike in ((1, kill_worker), (3, lambda server: os.kill(server.pid("engine-bloomery-tiny"), signal.SIGKILL)), (5, kill_worker)):
            wait_until(lambda step=step: client.jobs.get(disturbed).progress.step >= step)  # type: ignore[misc]
            strike(server)
        job = client.jobs.wait(disturbed, 300)
        assert _came_of(job) == _came_of(reference)
        assert job.epoch >= 3
        assert kept(client, job) == kept(client, reference)
        assert measured(client, "disturbed") == measured(client, "undisturbed")
        assert job.progress.tokens == reference.progress.tokens


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


def _came_of(job: Job) -> tuple[str, int, list[Any]]:
    assert job.state is JobState.SUCCEEDED, job.reason
    assert job.result is not None
    return job.result.digest, job.result.step, job.result.compared
