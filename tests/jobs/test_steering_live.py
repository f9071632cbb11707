"""Jobs that wait for a judge or a teacher who hangs stand still when they are asked to, on a real server, and nothing is lost by it."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from bloomery.client import Client
from bloomery.types.jobs import Data, Evaluation, Job, JobSpec, JobState
from bloomery.types.methods import Distillation, Reinforcement
from tests.jobs.test_judges_live import judge, says
from tests.jobs.test_kills_live import measured, somewhere_else
from tests.jobs.test_methods_live import BASE, lines, pairs, prompt
from tests.live import running_server, wait_until
from tests.outside import KEY, outside

SOON_S = 90.0
"""Before anybody gives up who waits: a judge has two minutes."""


@pytest.mark.slow
def test_a_job_whose_judge_hangs_is_paused_and_goes_on_with_nothing_lost(tmp_path: Path) -> None:
    answers, asked_in_vain = threading.Event(), threading.Event()
    answers.set()

    def hangs(body: dict[str, Any]) -> Any:
        if not answers.is_set():
            asked_in_vain.set()
            answers.wait()
        return says(body)

    with outside(hangs) as elsewhere:
        file = tmp_path / "endpoints.yaml"
        file.write_text(f"elsewhere: {{base_url: '{elsewhere.url}', key_env: KEY_OF_ELSEWHERE}}")
        options = ("--endpoints", str(file))
        with running_server(tmp_path / "data", *options, env={"KEY_OF_ELSEWHERE": KEY}, jobs=1) as server, Client(server.url, server.key) as client:
            import_prompts(client)
            client.graders.create("lenient", judge("lenient"))
            client.graders.waive("lenient", "what it counts is nothing to be good at")
            method = Reinforcement(grader="lenient", steps=4, groups_per_step=2, group_size=4, max_tokens=16)
            reference = client.jobs.wait(create(client, "undisturbed", method), 300)
            disturbed = create(client, "disturbed", method)
            wait_until(lambda: client.jobs.get(disturbed).progress.step >= 1)
            answers.clear()
            try:
                assert asked_in_vain.wait(60)
                paused_soon(client, disturbed)
            finally:
                answers.set()
            client.jobs.resume(disturbed)
            assert came_of(client.jobs.wait(disturbed, 300)) == came_of(reference)
            assert measured(client, "disturbed") == measured(client, "undisturbed")


@pytest.mark.slow
def test_a_job_whose_teacher_hangs_is_paused_and_goes_on_with_nothing_lost(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", jobs=1) as server, Client(server.url, server.key) as client:
        import_prompts(client)
        method = Distillation(teacher=somewhere_else(client), steps=8, prompts_per_step=2, max_tokens=32)
        reference = client.jobs.wait(create(client, "undisturbed", method), 300)
        disturbed = create(client, "disturbed", method)
        wait_until(lambda: client.jobs.get(disturbed).progress.step >= 1)
        engine = server.pid("engine-bloomery-tiny")
        os.kill(engine, signal.SIGSTOP)
        try:
            paused_soon(client, disturbed)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert server.pid("engine-bloomery-tiny") == engine
        client.jobs.resume(disturbed)
        assert came_of(client.jobs.wait(disturbed, 300)) == came_of(reference)
        assert measured(client, "disturbed") == measured(client, "undisturbed")


def import_prompts(client: Client) -> None:
    client.datasets.create("prompts")
    client.datasets.add_version(
        "prompts", {"train": lines([prompt(each) for each in pairs(8, 1)]), "eval": lines([prompt(each) for each in pairs(4, 2)])}
    )


def create(client: Client, name: str, method: Reinforcement | Distillation) -> str:
    spec = JobSpec(name=name, base_model=BASE, data=Data(dataset="prompts"), method=method, evaluation=Evaluation(every=2, rows=4), seed=1)
    return client.jobs.create(spec).id


def paused_soon(client: Client, job: str) -> None:
    client.jobs.pause(job)
    wait_until(lambda: client.jobs.get(job).state is JobState.PAUSED, SOON_S)


def came_of(job: Job) -> tuple[str, int, list[Any]]:
    assert job.state is JobState.SUCCEEDED, job.reason
    assert job.result is not None
    return job.result.digest, job.result.step, job.result.compared
