"""What the fields of a job of reinforcement are to its loop."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from bloomery.cli.eject import script
from bloomery.jobs.reinforced import grpo_config
from bloomery.recipes.async_grpo import AsyncGrpoConfig
from bloomery.recipes.grpo import GrpoConfig
from bloomery.recipes.policy import at_temperature
from bloomery.recipes.sft import AdamConfig
from bloomery.types.jobs import Begin, Data, Evaluation, JobSpec
from bloomery.types.methods import Clip, EarlyStopping, Optimizer, Reinforcement, Schedule


def spec(**method: Any) -> JobSpec:
    return JobSpec(name="a", base_model="tiny", data=Data(dataset="rows"), method=Reinforcement(grader="g", **method), rank=4, seed=7)


def config(begin: Begin | None = None, checkpoint_every: int = 0, **method: Any) -> GrpoConfig:
    return grpo_config(spec(**method).model_copy(update={"begin": begin, "checkpoint_every": checkpoint_every}), {"name": "a"}, "job 1")


@pytest.mark.parametrize(("loss", "theirs"), [("grpo", "ppo"), ("dapo", "dapo"), ("gspo", "gspo")])
def test_each_method_is_a_loss_of_the_server_with_its_own_thresholds_or_those_that_are_given(loss: str, theirs: str) -> None:
    usual = config(loss=loss).policy
    assert (usual.loss, usual.loss_config) == (theirs, ())
    assert config(loss=loss, clip=Clip(high=1.3)).policy.loss_config == (("clip_high_threshold", 1.3),)
    both = config(loss=loss, clip=Clip(low=0.7, high=1.5)).policy
    assert dict(both.loss_config) == {"clip_low_threshold": 0.7, "clip_high_threshold": 1.5}


def test_every_knob_reaches_the_loop() -> None:
    optimizer = Optimizer(learning_rate=2e-3, schedule=Schedule(kind="cosine", warmup_share=0.2, floor=0.1), weight_decay=0.3, grad_clip_norm=0.5)
    many: dict[str, Any] = {
        "steps": 9,
        "groups_per_step": 3,
        "group_size": 5,
        "max_tokens": 17,
        "temperature": 0.8,
        "kl_coefficient": 0.2,
        "by_deviation": False,
        "zero_variance": "keep",
    }
    found = config(optimizer=optimizer, checkpoint_every=4, begin=Begin(run="run-1", checkpoint="final", optimizer=True), **many)
    assert (found.groups_per_step, found.rollouts.group_size, found.rollouts.max_tokens, found.rollouts.seed) == (3, 5, 17, 7)
    # Held-out prompts are answered at 1, whatever is trained.
    assert (found.rollouts.temperature, found.evaluation.temperature, config().rollouts.temperature) == (0.8, 1.0, 1.0)
    assert (found.kl_coefficient, found.by_deviation, found.checkpoint_every) == (0.2, False, 4)
    assert (found.zero_variance, config().zero_variance) == ("keep", "drop")
    assert (found.policy.base_model, found.policy.rank, found.policy.seed) == ("tiny", 4, 7)
    assert found.policy.start is not None
    assert tuple(found.policy.start) == ("run-1", "final", True)
    assert found.policy.optimizer is not None
    adam = AdamConfig(learning_rate=2e-3, decay="cosine", warmup_share=0.2, floor=0.1, weight_decay=0.3, grad_clip_norm=0.5)
    assert (found.policy.optimizer.adam, found.policy.optimizer.rounds) == (adam, 9)
    assert dict(found.policy.run) == {"name": "a", "idempotency_key": "job 1"}


@pytest.mark.parametrize("temperature", [0, -1, 0.001, 101, "nan", "inf", True, "warm", None])
def test_a_temperature_that_nothing_is_trained_at_is_refused_by_its_name(temperature: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        Reinforcement(grader="g", temperature=float(temperature) if temperature in ("nan", "inf") else temperature)
    assert [error["loc"] for error in refused.value.errors()] == [("temperature",)]


def test_thresholds_and_temperature_go_to_the_loss_together() -> None:
    policy = at_temperature(config(loss="dapo", clip=Clip(high=1.3), temperature=0.8).policy, 0.8)
    assert (policy.loss, dict(policy.loss_config)) == ("dapo", {"clip_high_threshold": 1.3, "temperature": 0.8})


def test_the_ejected_script_says_the_temperature() -> None:
    assert "temperature=0.8" in script(spec(temperature=0.8))


def test_what_ends_a_job_early_is_the_loops_and_measured_as_often_in_its_script() -> None:
    usual = spec()
    stopped = usual.model_copy(update={"method": usual.method.model_copy(update={"early_stopping": EarlyStopping(patience=3, min_delta=0.1)})})
    stopped = stopped.model_copy(update={"evaluation": Evaluation(every=5)})
    found = [grpo_config(each, {}, "job 1") for each in (usual, stopped)]
    assert [(each.evaluate_every, each.patience, each.min_delta) for each in found] == [(0, 0, 0.0), (5, 3, 0.1)]
    assert "held_out=held_out" in script(stopped)
    assert "held_out" not in script(usual)


def test_the_ejected_script_says_what_becomes_of_groups_rewarded_alike() -> None:
    assert "zero_variance='keep'" in script(spec(zero_variance="keep"))


def test_a_job_that_samples_while_it_trains_has_its_staleness() -> None:
    found = config(asynchronous=True, max_staleness=3)
    assert isinstance(found, AsyncGrpoConfig)
    assert found.max_head_offpolicy_versions == 3
    assert type(config()) is GrpoConfig


def test_two_graders_have_the_time_of_two() -> None:
    alone, both = config().rollouts, config(held_out_grader="h").rollouts
    assert both == replace(alone, grade_timeout_s=2 * alone.grade_timeout_s)
