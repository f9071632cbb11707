"""Ratios to a snapshot of the old policy: what they are where rollouts are older, and that nothing changes where they are not."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.client import Client
from bloomery.recipes.advantages import Weighed, anchor_at
from bloomery.recipes.async_grpo import AsyncGrpoConfig, anchored, train, truncated
from bloomery.recipes.grpo import StepReport
from bloomery.recipes.rollouts import Rollout
from bloomery.recipes.segments import single
from bloomery.types.errors import InvalidInput
from tests.recipes.loops import POLICY, PROBLEMS, SMALL, Record
from tests.services.runs_stage import datum

AHEAD = AsyncGrpoConfig(policy=POLICY, rollouts=SMALL, groups_per_step=1, max_head_offpolicy_versions=2, concurrency=2)
SNAPSHOT = replace(AHEAD, anchor="snapshot")


def test_the_ratio_of_the_snapshot_to_the_rollout_is_a_weight_that_ends_at_the_cap_and_the_loss_begins_from_the_snapshot() -> None:
    row = Weighed(single((1, 2), "a", (3, 4, 5), (-1.0, -2.0, -3.0), ("v",) * 3), np.float32([1.0, -2.0, 4.0]))
    old = (-1.0, -2.0 + np.log(1.5), -3.0 + np.log(9.0))
    made = anchor_at(row, old, cap=2.0)
    assert made.advantages.tolist() == pytest.approx([1.0, -3.0, 8.0])
    assert made.datum.inputs["logprobs"].numpy().tolist() == pytest.approx([0, *old])
    assert row.datum.inputs["logprobs"].numpy().tolist() == [0, -1, -2, -3]


@pytest.mark.slow
def test_only_rollouts_of_older_weights_are_scored_and_those_of_the_snapshot_keep_every_bit(client: Client) -> None:
    run = client.create_run("bloomery-tiny", rank=4, seed=1)
    first = client.sampler(run.save_snapshot().result().version)
    run.forward_backward([datum([*PROBLEMS[0].prompt])])
    run.optim_step(1e-2)
    newest = client.sampler(run.save_snapshot().result().version)
    rows = []
    for sampler in (first, newest):
        (told,) = sampler.sample(PROBLEMS[0].prompt, max_tokens=6, seed=4, stop=()).result().sequences
        segment = single(PROBLEMS[0].prompt, "a", told.tokens, told.logprobs, (sampler.model,) * 6)
        rows.append(Weighed(segment, np.ones(6, dtype=np.float32)))
    stale, fresh = anchored(rows, newest, SNAPSHOT)
    begun = len(PROBLEMS[0].prompt)
    assert stale.anchor == newest.score(rows[0].segment.tokens).prompt_logprobs()[begun:]
    assert stale.anchor != rows[0].segment.logprobs
    assert (fresh.anchor, fresh.advantages.tolist()) == (rows[1].segment.logprobs, [1.0] * 6)
    # With importance sampling the anchor decides nothing: the gradient is that of the ratio to the rollout.
    norms = []
    for row, config in ((rows[0], AHEAD), (anchor_at(rows[0], stale.anchor, 1e6), SNAPSHOT)):
        policy = truncated(replace(config, importance_cap=1e6))
        run.forward_backward([row.datum], policy.loss, dict(policy.loss_config))
        norms.append(run.optim_step(0.0).result().metrics["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def steps_of(client: Client, path: Path, config: AsyncGrpoConfig, steps: int) -> tuple[str, list[StepReport]]:
    reports: list[StepReport] = []
    later, record = threading.Event(), Record()

    def grade(rollout: Rollout) -> float:
        if rollout.id.startswith("0.") and config.max_head_offpolicy_versions:
            # Made by the first version, and trained where another is the newest.
            assert later.wait(30)
        return record.grade(rollout)

    def note(report: StepReport) -> None:
        reports.append(report)
        later.set()

    policy = train(client, PROBLEMS, grade, config, path, steps=steps, on_step=note)
    return policy.run.save_checkpoint("end").result().digest, reports


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_where_the_trainer_is_ahead_its_forward_is_held_to_the_snapshot_token_by_token(client: Client, tmp_path: Path, loss: str) -> None:
    config = replace(SNAPSHOT, policy=replace(POLICY, loss=loss))
    _, reports = steps_of(client, tmp_path / "cursor", config, 4)
    late = [report.metrics for report in reports if report.metrics["lag/max"] > 0]
    assert late
    assert all(metrics["staleness/k3"] > 0 for metrics in late)
    for report in reports:
        assert report.metrics["ratio/largest_difference"] == 0
        assert report.metrics["agreement/trainer_tokens"] > 0
        assert (report.metrics["staleness/k3"] > 0) is (report.metrics["lag/max"] > 0)


@pytest.mark.slow
def test_without_staleness_the_anchor_decides_nothing(client: Client, tmp_path: Path) -> None:
    config: Any = replace(AHEAD, policy=replace(POLICY, loss="ppo"), max_head_offpolicy_versions=0, groups_per_step=2)
    rollout, _ = steps_of(client, tmp_path / "rollout", config, 2)
    snapshot, reports = steps_of(client, tmp_path / "snapshot", replace(config, anchor="snapshot"), 2)
    assert snapshot == rollout
    assert [report.metrics["staleness/mean"] for report in reports] == [1, 1]


def test_an_anchor_that_there_is_not_is_refused_at_once(client: Client, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match='must be "rollout" or "snapshot"') as refused:
        train(client, PROBLEMS, Record().grade, replace(AHEAD, anchor="reference"), tmp_path / "cursor", steps=1)  # type: ignore[arg-type]
    assert refused.value.field == "anchor"
