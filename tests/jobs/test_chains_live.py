"""Chains on a real server: supervised fine-tuning, preferences, reinforcement, each where the one before it ended, whoever dies between them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bloomery.cli.eject import script
from bloomery.client import Client
from bloomery.types.jobs import Begin, Data, Evaluation, Gate, Job, JobSpec, JobState
from bloomery.types.methods import Batches, DirectPreference, Optimizer, Reinforcement, Supervised
from tests.jobs.test_jobs_live import ENGINE, WORKER, kill
from tests.jobs.test_methods_live import BASE, GRADER, chat, lines, pairs, preference, prompt
from tests.live import LiveServer, running_server, wait_until

SFT = Supervised(optimizer=Optimizer(learning_rate=4e-3), batches=Batches(epochs=1, rows=8))
DPO = DirectPreference(optimizer=Optimizer(learning_rate=5e-4), batches=Batches(epochs=0.5, rows=8))
RFT = Reinforcement(grader="right", steps=2, groups_per_step=2, group_size=4, max_tokens=24)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with running_server(tmp_path_factory.mktemp("chains") / "data", jobs=1) as server, Client(server.url, server.key) as client:
        for name, of in (("chats", chat), ("preferences", preference), ("prompts", prompt)):
            client.datasets.create(name)
            client.datasets.add_version(
                name, {"train": lines([of(each) for each in pairs(64, 1)]), "eval": lines([of(each) for each in pairs(8, 2)])}
            )
        client.graders.create("right", {"type": "function", "source": GRADER, "entry": "score"})
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.url, server.key, patience_s=120) as client:
        yield client


def chain(name: str, *gates: Gate | None) -> list[JobSpec]:
    methods: list[tuple[str, Any]] = [("chats", SFT), ("preferences", DPO), ("prompts", RFT)]
    begins = [None, *(Begin(job=f"{name}-{place}", gate=gate) for place, gate in enumerate(gates, start=1))]
    return [
        JobSpec(
            name=f"{name}-{place}", base_model=BASE, data=Data(dataset=dataset), method=method, evaluation=Evaluation(answers=0), begin=begin, seed=1
        )
        for place, ((dataset, method), begin) in enumerate(zip(methods, begins, strict=True), start=1)
    ]


def ended(client: Client, name: str) -> list[Job]:
    return [client.jobs.wait(f"{name}-{place}", 300) for place in (1, 2, 3)]


@pytest.mark.slow
def test_three_stages_begin_where_the_one_before_ended_whoever_dies_between_them(server: LiveServer, client: Client, tmp_path: Path) -> None:
    client.jobs.create_chain(chain("calm", Gate(measure="loss"), Gate(measure="margin", bound=-100.0)))
    calm = ended(client, "calm")
    assert [job.state for job in calm] == [JobState.SUCCEEDED] * 3, [job.reason for job in calm]
    client.jobs.create_chain(chain("hit", Gate(measure="loss"), Gate(measure="margin", bound=-100.0)))
    for stage, whoever in ((1, ["api"]), (2, ["api", "jobs", ENGINE])):
        wait_until(lambda stage=stage: client.jobs.get(f"hit-{stage}").progress.step >= 1)  # type: ignore[misc]
        kill(server, WORKER)
        wait_until(lambda stage=stage: client.jobs.get(f"hit-{stage}").state.ended, 300)  # type: ignore[misc]
        kill(server, *whoever)
    hit = ended(client, "hit")
    assert [_came_of(job) for job in hit] == [_came_of(job) for job in calm]
    for before, after in pairwise(hit):
        assert before.result is not None
        assert after.spec.begin is not None
        assert (after.spec.begin.run, after.spec.begin.checkpoint) == (before.result.run, "final")
    assert [each.job for each in client.jobs.card("hit-3").lineage] == ["hit-1", "hit-2"]
    environment = {**os.environ, "BLOOMERY_URL": server.url, "BLOOMERY_API_KEY": server.key}
    code = script(hit[1].spec)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, code + done.stderr
    assert done.stdout.split()[-1] == _came_of(hit[1])[0]


@pytest.mark.slow
def test_a_gate_that_does_not_open_ends_the_chain_behind_it(client: Client) -> None:
    client.jobs.create_chain(chain("shut", Gate(measure="loss", bound=0.0), None))
    first, second, third = ended(client, "shut")
    assert (first.state, second.state, third.state) == (JobState.SUCCEEDED, JobState.FAILED, JobState.FAILED)
    assert "its gate does not hold: `loss` of job `shut-1` is " in str(second.reason)
    assert (second.epoch, third.epoch) == (0, 0)
    assert str(third.reason).startswith("job `shut-2`, where it begins, has failed: its gate does not hold")


def _came_of(job: Job) -> tuple[str, list[Any]]:
    assert job.state is JobState.SUCCEEDED, job.reason
    assert job.result is not None
    return job.result.digest, job.result.compared
