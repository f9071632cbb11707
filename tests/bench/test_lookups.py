"""What the benchmark of the agent with a tool tells is what its program found, of each seed and over them."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from bench import lookups
from bench.lookups import Learnt
from tests.live import LiveServer

ASKED = argparse.Namespace(steps=1, examples=16, held_out=2, learning_rate=1e-3)


def learnt(seed: int, after: float, steps: list[float]) -> Learnt:
    measured: dict[str, dict[str, Any]] = {kind: {"reward": 0.0, "interval": [0.0, 0.0]} for kind in lookups.MEASURED}
    measured["after"] = {"reward": after, "interval": [after, after]}
    return Learnt(seed, measured, steps, seconds=1.0, lost=0.0, largest_k3=0.0)


def test_means_and_intervals_are_over_the_seeds() -> None:
    found = lookups.shown([learnt(0, 0.4, [0.1, 0.4]), learnt(1, 0.5, [0.1, 0.5]), learnt(2, 0.6, [0.1, 0.6])])
    # As in the test of `rl_chart.mean`, which has it by hand.
    assert found["held_out"]["after"] == {"reward": 0.5, "interval": [0.2516, 0.7484]}
    assert found["step_rewards"] == [{"reward": 0.1, "interval": [0.1, 0.1]}, {"reward": 0.5, "interval": [0.2516, 0.7484]}]
    assert [each["seed"] for each in found["seeds"]] == [0, 1, 2]


def test_of_one_seed_there_is_no_interval() -> None:
    assert lookups.shown([learnt(0, 0.4, [0.1])])["step_rewards"] == [{"reward": 0.1}]


@pytest.mark.slow
def test_the_program_runs_with_a_seed_and_all_that_it_prints_is_told(live_server: LiveServer, tmp_path: Path) -> None:
    found = lookups.learn(live_server.url, live_server.key, 5, tmp_path / "cursor", ASKED)
    assert found.seed == 5
    assert list(found.held_out) == list(lookups.MEASURED)
    assert all(low <= each["reward"] <= high for each in found.held_out.values() for low, high in [each["interval"]])
    assert len(found.step_rewards) == ASKED.steps
    assert found.largest_k3 in (0, None)
    assert found.lost == 0
