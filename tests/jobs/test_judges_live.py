"""Judges as rewards: a job of reinforcement whose scores models give, one of them held out, on a real server that asks them elsewhere."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bloomery.client import Client
from bloomery.types.jobs import Data, Evaluation, JobSpec, JobState
from bloomery.types.methods import Reinforcement
from tests.jobs.test_methods_live import BASE, lines, pairs, prompt
from tests.live import running_server
from tests.outside import KEY, Outside, outside

SILENT = "e"
"""Of outputs that end with it the judge says nothing."""


AWAY = threading.Event()
"""Judges who are away refuse whoever asks."""


def says(body: dict[str, Any]) -> Any:
    """How many different characters an output has; the other judge counts its blanks."""
    if AWAY.is_set():
        return 400
    said = body["messages"][-1]["content"].removeprefix("Judge: ")
    if body["model"] == "strict":
        return {"steps": [], "result": min(1.0, said.count(" ") / 8)}
    return 400 if said.endswith(SILENT) else {"steps": [{"description": "counted", "conclusion": "done"}], "result": min(1.0, len(set(said)) / 24)}


def judge(model: str) -> dict[str, Any]:
    asked = [{"role": "user", "content": "Judge: {{ sample.output_text }}"}]
    return {"type": "score_model", "name": model, "model": f"elsewhere:{model}", "input": asked, "range": [0, 1]}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Outside]]:
    folder: Path = tmp_path_factory.mktemp("judged")
    with outside(says) as elsewhere:
        file = folder / "endpoints.yaml"
        file.write_text(f"elsewhere: {{base_url: '{elsewhere.url}', key_env: KEY_OF_ELSEWHERE}}")
        options = ("--endpoints", str(file))
        with running_server(folder / "data", *options, env={"KEY_OF_ELSEWHERE": KEY}, jobs=1) as server, Client(server.url, server.key) as client:
            client.datasets.create("prompts")
            client.datasets.add_version(
                "prompts", {"train": lines([prompt(each) for each in pairs(8, 1)]), "eval": lines([prompt(each) for each in pairs(4, 2)])}
            )
            for name in ("lenient", "strict"):
                client.graders.create(name, judge(name))
            yield client, elsewhere


@pytest.mark.slow
def test_rewards_are_what_a_judge_says_and_another_one_looks_on(judged: tuple[Client, Outside]) -> None:
    client, elsewhere = judged
    for name in ("lenient", "strict"):
        client.graders.waive(name, "what it counts is nothing to be good at")
    method = Reinforcement(
        grader="lenient", held_out_grader="strict", held_out_share=1.0, steps=4, groups_per_step=2, group_size=4, max_tokens=16, loss="dapo"
    )
    spec = JobSpec(name="judged", base_model=BASE, data=Data(dataset="prompts"), method=method, evaluation=Evaluation(rows=4), seed=1)
    job = client.jobs.wait(client.jobs.create(spec).id, 300)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert job.result is not None
    points = client.jobs.points("judged")
    assert [point.step for point in points] == [1, 2, 3, 4]
    for point in points:
        assert 0 < (point.values["reward/raw"] or 0) <= 1
        assert 0 <= (point.values["reward/held_out"] or 0) <= 1
    assert [each.name for each in job.result.compared] == ["reward", "held_out_reward"]
    assert {body["model"] for body in elsewhere.asked} == {"lenient", "strict"}
    # Both were asked for verdicts in their form, and whoever gave none is a failure and no zero.
    assert all(body["response_format"]["type"] == "json_schema" for body in elsewhere.asked)
    lost = sum(point.values["failures/lost"] or 0 for point in points)
    assert (lost > 0) == any("no_score" in event.message for event in client.jobs.events("judged"))
    told = json.dumps([event.message for event in client.jobs.events("judged")])
    assert KEY not in told


@pytest.mark.slow
def test_a_job_of_one_step_whose_judge_is_away_stands_still_and_makes_it_when_the_judge_is_back(judged: tuple[Client, Outside]) -> None:
    client, _ = judged
    client.graders.waive("strict", "what it counts is nothing to be good at")
    method = Reinforcement(grader="strict", steps=1, groups_per_step=2, group_size=4, max_tokens=16)
    spec = JobSpec(name="short", base_model=BASE, data=Data(dataset="prompts"), method=method, evaluation=Evaluation(rows=4), seed=1)
    reference = client.jobs.wait(client.jobs.create(spec.model_copy(update={"name": "reference"})).id, 300)
    assert reference.result is not None, reference.reason
    AWAY.set()
    try:
        job = client.jobs.create(spec).id
        for _ in range(2):
            stands = client.jobs.wait(job, 300)
            assert stands.state is JobState.PAUSED
            assert "a round left nothing to train on" in str(stands.reason)
            client.jobs.resume(job)
        assert client.jobs.wait(job, 300).state is JobState.PAUSED
    finally:
        AWAY.clear()
    client.jobs.resume(job)
    made = client.jobs.wait(job, 300)
    assert made.result is not None, made.reason
    assert (made.result.digest, made.result.compared) == (reference.result.digest, reference.result.compared)
