"""Loops that end because what is held out becomes no better: by themselves, whoever dies, and not a round before."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bloomery.client import Client
from bloomery.recipes import async_grpo, distill, grpo
from bloomery.recipes.async_grpo import AsyncGrpoConfig
from bloomery.recipes.cursors import Cursor, CursorStore, fingerprint, parsed, store_of
from bloomery.recipes.distill import DistillConfig
from bloomery.recipes.grpo import GrpoConfig, StepReport
from bloomery.recipes.policy import Policy
from bloomery.recipes.stopping import Stopping
from bloomery.types.errors import InvalidInput
from tests.recipes.loops import BASE, POLICY, PROBLEMS, SMALL, Killed, Record
from tests.recipes.test_told import Dies

CURSOR = Cursor(run_id="run", fingerprint="f", step=0, round=0, seq=2, version="v", first="v", had_below=0)
HELD_OUT = [problem._replace(id=f"held-{problem.id}", prompt=(*problem.prompt, 9)) for problem in PROBLEMS[:2]]
LOOPED: dict[str, Any] = {"policy": POLICY, "rollouts": SMALL, "evaluation": SMALL, "evaluate_every": 1}
NEVER_BETTER: dict[str, Any] = {"patience": 2, "min_delta": 1e6}
"""Ends with the third measurement, whatever that says."""
STEPS = 5
LOOPS = {
    "grpo": GrpoConfig(groups_per_step=2, **LOOPED),
    "async_grpo": AsyncGrpoConfig(groups_per_step=2, max_head_offpolicy_versions=0, **LOOPED),
    "distill": DistillConfig(teacher=BASE, mode="teacher_answers", prompts_per_step=2, **LOOPED),
}


def train(client: Client, config: Any, place: Path | CursorStore, told: list[int], steps: int = STEPS) -> Policy:
    def tell(report: StepReport) -> None:
        told.append(report.step)

    if isinstance(config, DistillConfig):
        return distill.train(client, PROBLEMS, config, place, steps=steps, held_out=HELD_OUT, on_step=tell)
    loop: Any = async_grpo.train if isinstance(config, AsyncGrpoConfig) else grpo.train
    return loop(client, PROBLEMS, Record().grade, config, place, steps=steps, held_out=HELD_OUT, on_step=tell)


def ends(values: Sequence[float | None], patience: int, min_delta: float = 0.0, *, higher_is_better: bool = True) -> int | None:
    """At which of the rounds, whose measurements these are."""
    stopping, cursor = Stopping(measure="m", higher_is_better=higher_is_better, patience=patience, min_delta=min_delta), CURSOR
    for number, value in enumerate(values, 1):
        cursor = stopping.counted(replace(cursor, round=number), {} if value is None else {"m": value})
        # Told once more by whoever goes on.
        assert stopping.counted(cursor, {"m": -99.0}) == cursor or value is None
        if stopping.ends(cursor):
            return number
    return None


def test_measurements_in_a_row_that_are_no_better_end_a_loop() -> None:
    assert ends([1, 2, 2, 3, 3, 2, 4], patience=2) == 6
    assert ends([1, 2, 2, 3, 3, 2, 4], patience=3) is None
    assert ends([3, 2, 2, 1, 1, 2], patience=2, higher_is_better=False) == 6
    assert ends([1, 1.5, 2, 2.5, 3], patience=2, min_delta=0.6) is None
    assert ends([1, 1.5, 1.55, 2.5], patience=2, min_delta=0.6) == 3
    assert ends([1, None, 1, None, None, 1], patience=2) == 6, "rounds without a measurement are no worse"
    assert ends([1, 0, 0, 0, 0], patience=0) is None


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_ends_early_whoever_dies_stays_ended_and_goes_on_with_more_patience(client: Client, tmp_path: Path, loop: str) -> None:
    config = replace(LOOPS[loop], **NEVER_BETTER)
    digests = []
    # A cursor is written twice at first, and of a round when it is submitted, when it is trained and when it is counted.
    for number, (write, kept) in enumerate([(0, False), (5, False), (5, True), (8, False), (8, True), (10, True), (11, False), (11, True)]):
        path, told = tmp_path / f"cursor-{number}", list[int]()
        if write:
            with pytest.raises(Killed):
                train(client, config, Dies(path, write, kept=kept), told)
        policy = train(client, config, path, told)
        assert (policy.cursor.round, sorted({*told})) == (3, [1, 2, 3]), (write, kept)
        digests.append(policy.run.save_checkpoint("end").result().digest)
    assert len(set(digests)) == 1
    again: list[int] = []
    assert train(client, config, path, again).cursor.round == 3
    assert not again
    assert train(client, replace(config, patience=4), path, again).cursor.round == STEPS


def test_what_ends_a_loop_is_no_other_loop_and_a_cursor_of_before_it_was_counted_goes_on(tmp_path: Path) -> None:
    config = LOOPS["grpo"]
    assert fingerprint(PROBLEMS, config) == fingerprint(PROBLEMS, replace(config, **NEVER_BETTER))
    before = '{"run_id": "run", "fingerprint": "f", "step": 0, "round": 0, "seq": 2, "version": "v", "first": "v", "had_below": 0}'
    assert parsed(before, store_of(tmp_path / "cursor")) == CURSOR


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"patience": -1}, "patience"),
        ({"patience": 2, "evaluate_every": 0}, "patience"),
        ({"min_delta": 0.1}, "min_delta"),
        ({"patience": 1, "min_delta": -0.1}, "min_delta"),
        ({"patience": 1, "min_delta": float("nan")}, "min_delta"),
    ],
)
def test_what_would_end_nothing_is_refused_at_once(loop: str, changes: dict[str, Any], field: str) -> None:
    config: Any = replace(LOOPS[loop], **changes)
    check = distill.check if loop == "distill" else lambda problems, config, held_out: grpo.check(problems, Record().grade, config, held_out)
    with pytest.raises(InvalidInput) as refused:
        check(PROBLEMS, config, HELD_OUT if config.evaluate_every else [])
    assert refused.value.field == field
