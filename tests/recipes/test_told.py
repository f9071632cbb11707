"""Every step of a loop is told, whole, wherever it dies: what a round showed goes with its cursor, the trainer's share with its operations."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bloomery.client import Client
from bloomery.recipes import async_grpo, grpo
from bloomery.recipes.async_grpo import AsyncGrpoConfig
from bloomery.recipes.cursors import CursorFile
from bloomery.recipes.failures import NothingCameBack
from bloomery.recipes.grpo import GrpoConfig, StepReport
from bloomery.recipes.rollouts import RolloutConfig
from tests.live import LiveServer
from tests.recipes.loops import POLICY, PROBLEMS, SMALL, Killed, Record, mortal_client

STEPS = 2
OPERATIONS = 1 + 3 * STEPS + 1
"""The first of both steps is kept under a name."""
WRITES = 3 + 2 * STEPS
"""One where there is a run, one behind its first snapshot, two of each step, and one when all is told."""
COMMON: dict[str, Any] = {"policy": POLICY, "rollouts": SMALL, "groups_per_step": 2, "evaluate_every": 1, "checkpoint_every": 1}
COMMON["evaluation"] = RolloutConfig(group_size=2, max_tokens=4)
LOOPS: dict[str, tuple[Callable[..., Any], GrpoConfig]] = {
    "synchronous": (grpo.train, GrpoConfig(**COMMON)),
    "asynchronous": (async_grpo.train, AsyncGrpoConfig(**COMMON, max_head_offpolicy_versions=0, concurrency=2, max_idle_groups=2)),
}
HELD_OUT = [problem._replace(id=f"held-{problem.id}", prompt=(*problem.prompt, 9)) for problem in PROBLEMS[:2]]
BY_TIME = ("seconds/", "idle/", "overlap/", "grading/seconds", "tokens/sampled_per_s", "tokens/trained_per_s")
SINCE_IT_STARTED = "agreement/drawn_deviation"


class Dies(CursorFile):
    """A file, at the writing of which the loop dies, before or after it is there."""

    def __init__(self, path: Path, write: int, *, kept: bool) -> None:
        super().__init__(path)
        self._left, self._kept = write, kept

    def write(self, text: str) -> None:
        self._left -= 1
        if self._left:
            return super().write(text)
        if self._kept:
            super().write(text)
        raise Killed


class Told:
    """Reports of a loop and of those that went on with it, the last of each step."""

    def __init__(self, dies_at: int = 0) -> None:
        self.reports: dict[int, StepReport] = {}
        self.times: list[int] = []
        self._dies_at = dies_at

    def __call__(self, report: StepReport) -> None:
        if report.step == self._dies_at:
            raise Killed
        self.times.append(report.step)
        self.reports[report.step] = report

    @property
    def measured(self) -> dict[int, tuple[dict[str, float], tuple[Any, ...], bool]]:
        """Without versions, which are of one run, and what only the loop that measured it can know."""
        return {
            step: ({name: value for name, value in report.metrics.items() if follows(name)}, report.failures, report.kept)
            for step, report in self.reports.items()
        }


def follows(name: str) -> bool:
    """Whether a measure follows from what was sampled and trained."""
    return not name.startswith(BY_TIME) and name != SINCE_IT_STARTED


def go(client: Client, loop: str, place: Any, told: Told, grade: Callable[..., Any], steps: int = STEPS) -> Any:
    train, config = LOOPS[loop]
    policy = train(client, PROBLEMS, grade, config, place, steps=steps, held_out=HELD_OUT, on_step=told)
    kept = {(each.kind, each.version if each.kind == "snapshot" else None) for each in policy.run.checkpoints() if each.name == "step-1"}
    assert kept == ({("named", None), ("snapshot", told.reports[1].version)} if 1 in told.reports and told.reports[1].kept else kept)
    return policy


def grader() -> Callable[..., Any]:
    """Of a group that teaches something one member fails, the first time that it is asked."""
    record = Record()

    def grade(rollout: Any) -> float:
        if rollout.id == "1.0":
            raise OSError("no idea")
        return record.grade(rollout)

    return grade


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[Client]:
    with Client(live_server.url, live_server.key) as client:
        yield client


@pytest.fixture(scope="module")
def undisturbed(client: Client, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    told = {loop: Told() for loop in LOOPS}
    for loop, heard in told.items():
        go(client, loop, tmp_path_factory.mktemp("told") / "cursor", heard, grader())
        assert heard.times == [1, 2]
        assert [heard.reports[step].kept for step in heard.times] == [True, False]
        assert {"loss", "gradient_norm", "ratio/k3", "kl/reference", "evaluation/reward", "seconds/step"} <= heard.reports[2].metrics.keys()
        assert heard.reports[1].failures[0].attempts == SMALL.attempts
    return told


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("write", range(3, WRITES + 1))
def test_a_loop_that_dies_at_its_cursor_tells_every_step(
    client: Client, tmp_path: Path, undisturbed: dict[str, Told], loop: str, write: int, kept: bool
) -> None:
    told, path = Told(), tmp_path / "cursor"
    with pytest.raises(Killed):
        go(client, loop, Dies(path, write, kept=kept), told, grader())
    go(client, loop, path, told, grader())
    assert told.measured == undisturbed[loop].measured
    assert len(told.times) <= STEPS + 1


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("operation", range(2, OPERATIONS + 1))
def test_a_loop_that_dies_at_an_operation_tells_every_step(
    live_server: LiveServer, client: Client, tmp_path: Path, undisturbed: dict[str, Told], loop: str, operation: int, heard: bool
) -> None:
    told, path = Told(), tmp_path / "cursor"
    with mortal_client(live_server, operation, heard=heard) as dying, pytest.raises(Killed):
        go(dying, loop, path, told, grader())
    go(client, loop, path, told, grader())
    assert told.measured == undisturbed[loop].measured
    assert len(told.times) <= STEPS + 1


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("step", [1, 2])
def test_a_loop_that_dies_while_it_reports_tells_that_step_again_with_how_long_it_took(
    client: Client, tmp_path: Path, undisturbed: dict[str, Told], loop: str, step: int
) -> None:
    path, told = tmp_path / "cursor", Told()
    with pytest.raises(Killed):
        go(client, loop, path, Told(dies_at=step), grader())
    go(client, loop, path, told, grader())
    assert told.times == [1, 2][step - 1 :]
    assert told.measured == {step: undisturbed[loop].measured[step] for step in told.times}
    assert all("seconds/step" in report.metrics for report in told.reports.values())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_round_that_trained_nothing_is_told_too(client: Client, tmp_path: Path, loop: str) -> None:
    path, told = tmp_path / "cursor", Told()
    with pytest.raises(Killed):
        go(client, loop, path, Told(dies_at=1), lambda _: 1.0)
    go(client, loop, path, told, lambda _: 1.0, steps=1)
    assert told.times == [1]
    assert told.reports[1].metrics["groups/zero_variance_share"] == 1
    assert told.reports[1].metrics["evaluation/reward"] == 1


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_ended_tells_nothing_again(client: Client, tmp_path: Path, loop: str) -> None:
    told = Told()
    for steps in (1, 1, 2):
        go(client, loop, tmp_path / "cursor", told, grader(), steps=steps)
    assert told.times == [1, 2]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_of_few_steps_whose_grader_is_away_says_so_and_makes_the_last_when_it_is_back(client: Client, tmp_path: Path, loop: str) -> None:
    def away(_: object) -> float:
        raise OSError("the judge is away")

    path, told = tmp_path / "cursor", Told()
    for _ in range(2):
        with pytest.raises(NothingCameBack, match=r"left nothing to train on.*the judge is away.*nothing was learnt"):
            go(client, loop, path, told, away, steps=2)
    # The last step is not had.
    assert set(told.times) == {1}
    assert go(client, loop, path, told, grader(), steps=2).step == 1
    assert told.times[-1] == 2
    assert "loss" in told.reports[2].metrics
