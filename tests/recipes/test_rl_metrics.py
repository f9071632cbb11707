"""What steps show beside rewards: the distance to the first weights, how long graders take, what overlaps, and how held-out problems do."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.client import Client
from bloomery.recipes import async_grpo, grpo
from bloomery.recipes.admission import Admission
from bloomery.recipes.async_grpo import AsyncGrpoConfig
from bloomery.recipes.deadlines import Deadlines
from bloomery.recipes.grpo import GrpoConfig, StepReport, measure
from bloomery.recipes.rollouts import Rollout, RolloutConfig
from bloomery.types.errors import InvalidInput
from tests.recipes.loops import POLICY, PROBLEMS, SMALL, Record

WAIT_S = 120.0
HELD_OUT = [problem._replace(id=f"held-{problem.id}", prompt=(*problem.prompt, 9)) for problem in PROBLEMS]
SYNCHRONOUS = GrpoConfig(policy=POLICY, rollouts=SMALL, groups_per_step=2)
ASYNCHRONOUS = AsyncGrpoConfig(policy=POLICY, rollouts=SMALL, groups_per_step=2, concurrency=2)


def reports_of(client: Client, path: Path, config: GrpoConfig, grade: Callable[[Rollout], Any], steps: int, **other: Any) -> list[StepReport]:
    reports: list[StepReport] = []
    loop: Any = async_grpo.train if isinstance(config, AsyncGrpoConfig) else grpo.train
    loop(client, PROBLEMS, grade, config, path, steps=steps, on_step=reports.append, **other)
    for report in reports:
        assert json.dumps(report.metrics, allow_nan=False)
    return reports


@pytest.mark.slow
@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_the_distance_to_the_first_weights_is_nothing_at_first_and_what_their_scores_say_later(
    client: Client, tmp_path: Path, coefficient: float
) -> None:
    record = Record()
    every = replace(SYNCHRONOUS, kl_coefficient=coefficient, kl_rollouts=6)
    reports = reports_of(client, tmp_path / "cursor", every, record.grade, 2)
    assert reports[0].metrics["kl/reference"] == 0
    first = client.sampler(json.loads((tmp_path / "cursor").read_text())["first"])
    prompts = {problem.id: problem.prompt for problem in PROBLEMS}
    d: list[float] = []
    for group in (2, 3):
        for member in range(SMALL.group_size):
            ((problem, tokens, logprobs),) = record.seen[f"{group}.{member}"]
            scored = first.score(prompts[problem] + tokens).prompt_logprobs()[len(prompts[problem]) :]
            d += [then - now for then, now in zip(scored, logprobs, strict=True)]
    assert 0 < reports[1].metrics["kl/reference"] == pytest.approx(np.mean(np.exp(d) - 1 - np.array(d)), rel=1e-6)


def test_who_does_not_want_to_see_the_distance_pays_nothing_for_it(client: Client, tmp_path: Path) -> None:
    (report,) = reports_of(client, tmp_path / "cursor", replace(SYNCHRONOUS, kl_rollouts=0), Record().grade, 1)
    assert "kl/reference" not in report.metrics


def test_graders_are_timed_one_by_one_and_what_they_get_wrong_is_a_share_of_what_they_were_asked(client: Client, tmp_path: Path) -> None:
    waited: list[float] = []
    others = threading.Semaphore(0)

    def grade(rollout: Rollout) -> float | None:
        if rollout.id == "0.0":
            began = time.monotonic()
            assert all(others.acquire(timeout=WAIT_S) for _ in range(5))
            waited.append(time.monotonic() - began)
        others.release()
        return None if rollout.id == "1.1" else float(sum(rollout.tokens))

    config = replace(SYNCHRONOUS, rollouts=replace(SMALL, attempts=1))
    (report,) = reports_of(client, tmp_path / "cursor", config, grade, 1)
    assert waited[0] <= report.metrics["grading/seconds_max"] <= report.metrics["seconds/rollouts"]
    assert report.metrics["grading/seconds_mean"] < report.metrics["grading/seconds_max"]
    assert report.metrics["grading/invalid_share"] == pytest.approx(1 / 6)
    assert report.metrics["reward/raw_low"] < report.metrics["reward/raw"] < report.metrics["reward/raw_high"]


def test_a_call_that_is_late_took_as_long_as_it_was_waited_for() -> None:
    release = threading.Event()
    deadlines = Deadlines()
    deadlines.all([lambda: release.wait(30), lambda: None], 0.1)
    release.set()
    late, prompt = deadlines.take_times_s()
    assert prompt <= late
    # Waited for, and not until it came.
    assert 0.1 <= late < 30
    assert deadlines.take_times_s() == []


def test_busy_is_who_makes_at_least_one_group_however_many() -> None:
    now_s = 100.0
    admission = Admission(2, clock=lambda: now_s)
    with admission.making():
        now_s = 101.0
        with admission.making():
            now_s = 103.0
            assert admission.take_busy_s() == 3
            now_s = 107.0
        now_s = 108.0
    now_s = 116.0
    assert admission.take_busy_s() == 5
    now_s = 132.0
    assert admission.take_busy_s() == 0


@pytest.mark.slow
def test_rollouts_overlap_with_training_where_the_trainer_may_be_ahead_and_nowhere_else(client: Client, tmp_path: Path) -> None:
    def reports_where_groups_last_until_a_step_is_done(name: str, config: GrpoConfig) -> list[StepReport]:
        reports: list[StepReport] = []
        trained = threading.Event()

        def grade(rollout: Rollout) -> float:
            # The first step has the groups 0 and 1.
            assert int(rollout.id.partition(".")[0]) < 2 or trained.wait(WAIT_S)
            return float(sum(rollout.tokens))

        def note(report: StepReport) -> None:
            reports.append(report)
            trained.set()

        loop: Any = async_grpo.train if isinstance(config, AsyncGrpoConfig) else grpo.train
        loop(client, PROBLEMS, grade, config, tmp_path / name, steps=2, on_step=note)
        return reports

    ahead = reports_where_groups_last_until_a_step_is_done("ahead", ASYNCHRONOUS)
    in_turn = reports_where_groups_last_until_a_step_is_done("turn", replace(ASYNCHRONOUS, max_head_offpolicy_versions=0))
    synchronous = reports_where_groups_last_until_a_step_is_done("sync", SYNCHRONOUS)
    assert max(report.metrics["overlap/share"] for report in ahead) > 0.01
    assert [report.metrics["overlap/share"] for report in in_turn] == [0, 0]
    assert [report.metrics["overlap/share"] for report in synchronous] == [0, 0]


@pytest.mark.slow
def test_rollouts_that_wait_while_held_out_problems_are_measured_are_idle_in_no_step(client: Client, tmp_path: Path) -> None:
    def grade(rollout: Rollout) -> float:
        if rollout.problem.id == HELD_OUT[0].id:
            # Many times a step: as much waiting would be more than all of it.
            time.sleep(1)
        return float(sum(rollout.tokens))

    once = RolloutConfig(group_size=1, max_tokens=4, seed=3)
    in_turn = replace(ASYNCHRONOUS, max_head_offpolicy_versions=0, evaluate_every=1, evaluation=once)
    reports = reports_of(client, tmp_path / "cursor", in_turn, grade, 3, held_out=HELD_OUT)
    assert all(report.metrics["seconds/evaluation"] >= 1 for report in reports)
    assert all(0 < report.metrics["idle/rollouts_share"] <= 1 for report in reports)


@pytest.mark.slow
@pytest.mark.parametrize("config", [SYNCHRONOUS, ASYNCHRONOUS], ids=["synchronous", "asynchronous"])
def test_held_out_problems_are_measured_every_so_many_steps_as_measure_does(client: Client, tmp_path: Path, config: GrpoConfig) -> None:
    evaluation = RolloutConfig(group_size=2, max_tokens=4, seed=3, reuse=True)
    grade = Record().grade
    measuring = replace(config, evaluate_every=2, evaluation=evaluation)
    reports = reports_of(client, tmp_path / "cursor", measuring, grade, 4, held_out=HELD_OUT)
    assert ["evaluation/reward" in report.metrics for report in reports] == [False, True, False, True]
    for report in reports[1::2]:
        again = measure(client.sampler(report.version), HELD_OUT, grade, evaluation)
        assert report.metrics["evaluation/reward"] == again.mean
        assert (report.metrics["evaluation/reward_low"], report.metrics["evaluation/reward_high"]) == again.interval
        assert report.metrics["evaluation/lost"] == 0
        assert report.metrics["seconds/evaluation"] > 0
    # Looking decides nothing of what is trained: the same cursor goes on without.
    reports_of(client, tmp_path / "cursor", config, grade, 5)


@pytest.mark.parametrize(
    ("options", "held_out", "field"),
    [
        ({"evaluate_every": 1}, [], "held_out"),
        ({}, HELD_OUT, "evaluate_every"),
        ({"evaluate_every": -1}, HELD_OUT, "evaluate_every"),
        ({"kl_rollouts": -1}, [], "kl_rollouts"),
        ({"evaluation": RolloutConfig(group_size=0)}, [], "group_size"),
    ],
)
def test_what_would_be_measured_never_or_of_nothing_is_refused_at_once(
    client: Client, tmp_path: Path, options: dict[str, Any], held_out: list[Any], field: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        grpo.train(client, PROBLEMS, Record().grade, replace(SYNCHRONOUS, **options), tmp_path / "cursor", steps=1, held_out=held_out)
    assert refused.value.field == field
    assert not (tmp_path / "cursor").exists()
