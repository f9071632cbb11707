"""Groups: what is a reward and what is a failure, retries that change nothing, deadlines, and tokens of several versions."""

import math
import threading
from collections import Counter
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.client import Client, Sampler
from bloomery.recipes.advantages import sort_groups, weigh
from bloomery.recipes.cursors import Cursor, CursorFile, Shown, write_cursor
from bloomery.recipes.deadlines import Deadlines
from bloomery.recipes.rewards import MAX_PART_CHARS, MAX_PARTS, MAX_REWARD, FailureKind, Reward
from bloomery.recipes.rl_metrics import MAX_SHOWN_PARTS, round_metrics
from bloomery.recipes.rollouts import Failure, Graded, Group, Problem, Rollout, RolloutConfig, Rollouts, derived_seed, judge, without_foreign
from bloomery.types.errors import InvalidInput, Unavailable
from bloomery.types.jobs import JobPoint
from bloomery.types.leases import ReportJob
from tests.api.server import serving
from tests.services.runs_stage import datum

BASE = "bloomery-tiny"
PROBLEM = Problem("p", tuple(range(100, 120)))
CONFIG = RolloutConfig(group_size=4, max_tokens=6, grade_timeout_s=20, seed=5)
ONE = Rollout("3.1", PROBLEM, (1, 2), (-0.5, -0.25), ("v", "v"), stopped=True)


@pytest.fixture
def sampler(client: Client) -> Sampler:
    return client.sampler(BASE)


class Unspeakable(Exception):
    """An error of foreign code that raises where it is asked what it is."""

    def __str__(self) -> str:
        raise RuntimeError("not even that")


class Unreadable(float):
    """A number of foreign code that raises where it is read."""

    def __float__(self) -> float:
        raise RuntimeError("no such column")


@pytest.mark.parametrize("outcome", [1, 0.5, True, np.float32(2), Reward("3.1", -1.0, {"format": 1.0})])
def test_a_finite_number_is_a_reward(outcome: Any) -> None:
    graded = judge(ONE, outcome)
    assert isinstance(graded, Graded)
    assert graded.reward == float(outcome.value if isinstance(outcome, Reward) else outcome)


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (None, "no_reward"),
        ("1.0", "wrong_type"),
        ([1.0], "wrong_type"),
        (math.nan, "not_finite"),
        (math.inf, "not_finite"),
        (Reward("3.1", math.nan), "not_finite"),
        (Reward("3.2", 1.0), "foreign_reward"),
        (ValueError("no such file"), "raised"),
        (TimeoutError("late"), "timeout"),
        pytest.param(10**400, "not_finite", id="beyond floats"),
        pytest.param(-(10**5000), "not_finite", id="beyond what can be written"),
        (1e308, "not_finite"),
        (Reward("3.1", -2e12), "not_finite"),
        (Reward("3.1", 1.0, {"x": "bad"}), "wrong_type"),
        (Reward("3.1", 1.0, {"x": None}), "wrong_type"),  # type: ignore[dict-item]
        (Reward("3.1", 1.0, {"x": [1.0]}), "wrong_type"),  # type: ignore[dict-item]
        (Reward("3.1", 1.0, {"x": math.nan}), "not_finite"),
        (Reward("3.1", 1.0, {"x": 10**400}), "not_finite"),
        (Reward("3.1", 1.0, {"x": 1e308}), "not_finite"),
        (Reward("3.1", 1.0, {1: 1.0}), "wrong_type"),  # type: ignore[dict-item]
        (Reward("3.1", 1.0, {"half \ud83d": 1.0}), "wrong_type"),
        (Reward("3.1", 1.0, {"x" * (MAX_PART_CHARS + 1): 1.0}), "wrong_type"),
        pytest.param(Reward("3.1", 1.0, {str(number): 1.0 for number in range(MAX_PARTS + 1)}), "wrong_type", id="too many parts"),
        (Reward("3.1", 1.0, None), "wrong_type"),  # type: ignore[arg-type]
        (Reward("3.1", 1.0, turns=None), "wrong_type"),  # type: ignore[arg-type]
        (Reward("3.1", 1.0, turns=[1.0]), "wrong_type"),  # type: ignore[arg-type]
        (Reward("3.1", 1.0, turns={1: 1.0, "a": 2.0}), "wrong_type"),  # type: ignore[dict-item]
        (Unspeakable(), "raised"),
        (Unreadable(1.0), "wrong_type"),
        (Reward("3.1", 1.0, {"x": Unreadable(1.0)}), "wrong_type"),
        (Reward(np.array([3, 1]), 1.0), "wrong_type"),  # type: ignore[arg-type]
    ],
)
def test_whatever_else_a_grader_gives_is_a_failure_of_its_own_kind(outcome: Any, kind: FailureKind) -> None:
    failure = judge(ONE, outcome)
    assert isinstance(failure, Failure)
    assert (failure.rollout_id, failure.kind) == ("3.1", kind)


@pytest.mark.parametrize(
    ("told", "kind", "message"),
    [
        (Reward("3.1", 1.0, {"form": "bad"}), "wrong_type", "`parts.form` is a str, not a number"),
        (Reward("3.1", 10**400), "not_finite", "`reward` is a number that no float can hold: it must be finite, from -1e+12 to 1e+12"),
        (Reward("3.1", 1e308), "not_finite", "`reward` is 1e+308: it must be finite, from -1e+12 to 1e+12"),
        (Reward("3.1", 1.0, turns=None), "wrong_type", "`turns` is a NoneType, not a mapping of names to numbers"),  # type: ignore[arg-type]
    ],
)
def test_a_reward_that_is_none_says_which_of_its_numbers_and_why(told: Reward, kind: FailureKind, message: str) -> None:
    assert judge(ONE, told) == Failure("3.1", kind, message, final=False)


def test_the_largest_rewards_that_are_taken_have_advantages_and_statistics() -> None:
    least, most = (judge(ONE, Reward("3.1", value, {"x": value})) for value in (-MAX_REWARD, MAX_REWARD))
    assert isinstance(least, Graded)
    assert isinstance(most, Graded)
    made = Group(3, PROBLEM, (least, most), ())
    (low, high) = weigh([made], by_deviation=False)
    assert (low.advantages.tolist(), high.advantages.tolist()) == ([np.float32(-1e12)] * 2, [np.float32(1e12)] * 2)
    assert np.isfinite(np.square(high.advantages)).all()
    found = round_metrics([made], sort_groups([made], 2), [low, high], lambda _: 0)
    assert (found["reward/raw"], found["reward/part/x"], found["reward/group_std"]) == (0, 0, MAX_REWARD)


def test_parts_that_every_rollout_calls_otherwise_are_no_more_than_a_job_can_keep(tmp_path: Path) -> None:
    """Of what a step shows a job's cursor and its points are made."""
    widest = [str(place).ljust(MAX_PART_CHARS, "\N{GRINNING FACE}") for place in range(2 * MAX_SHOWN_PARTS)]
    rewards = [
        judge(ONE, Reward("3.1", 1.0, {name: 1.0 for name in (*widest[place : place + MAX_PARTS - 1], "right")})) for place in range(0, 1000, 100)
    ]
    made = [Group(0, PROBLEM, tuple(each for each in rewards if isinstance(each, Graded)), ())]
    assert len(made[0].members) == len(rewards)
    found = round_metrics(made, sort_groups(made, 2), [], lambda _: 0)
    assert len([name for name in found if name.startswith("reward/part/")]) == MAX_SHOWN_PARTS
    assert (found["reward/part/right"], found["reward/parts_left_out"]) == (1, len(widest) + 1 - MAX_SHOWN_PARTS)
    kept = tmp_path / "cursor.json"
    cursor = Cursor(run_id="run", fingerprint="", step=0, round=0, seq=0, version="", first="", had_below=0, shown=Shown(found))
    write_cursor(CursorFile(kept), cursor)
    said = ReportJob(cursor=kept.read_text(), points=[JobPoint(step=1, values=dict(found))])
    assert ReportJob.model_validate_json(said.model_dump_json()) == said


def test_a_group_is_the_same_group_every_time(sampler: Sampler) -> None:
    def group(number: int) -> Group:
        return Rollouts(lambda: sampler, lambda rollout: float(rollout.tokens[0]), CONFIG).group(number, PROBLEM)

    first = group(3)
    assert group(3) == first
    assert [member.rollout.id for member in first.members] == ["3.0", "3.1", "3.2", "3.3"]
    assert [member.rollout.tokens for member in group(4).members] != [member.rollout.tokens for member in first.members]
    assert all(len(rollout.tokens) == len(rollout.logprobs) == len(rollout.versions) for rollout in (member.rollout for member in first.members))


def test_a_retry_grades_the_same_tokens_again(sampler: Sampler) -> None:
    seen: dict[str, list[tuple[int, ...]]] = {}

    def shaky(rollout: Rollout) -> float:
        attempts = seen.setdefault(rollout.id, [])
        attempts.append(rollout.tokens)
        if len(attempts) < 3:
            raise OSError("the judge is busy")
        return 1.0

    group = Rollouts(lambda: sampler, shaky, CONFIG).group(0, PROBLEM)
    assert [member.reward for member in group.members] == [1.0] * 4
    assert Counter((failure.kind, failure.final) for failure in group.failures) == {("raised", False): 8}
    assert all(len(attempts) == 3 and len(set(attempts)) == 1 for attempts in seen.values())


def test_a_member_that_keeps_failing_is_lost_and_never_a_zero(sampler: Sampler) -> None:
    def grade(rollout: Rollout) -> float:
        return math.nan if rollout.id.endswith(".2") else 1.0

    group = Rollouts(lambda: sampler, grade, CONFIG).group(7, PROBLEM)
    assert [(member.rollout.id, member.reward) for member in group.members] == [("7.0", 1.0), ("7.1", 1.0), ("7.3", 1.0)]
    assert [(failure.rollout_id, failure.kind, failure.final) for failure in group.failures] == [
        ("7.2", "not_finite", False),
        ("7.2", "not_finite", False),
        ("7.2", "not_finite", True),
    ]


def test_a_grader_that_hangs_loses_its_member_at_the_deadline_and_nobody_elses(sampler: Sampler) -> None:
    release = threading.Event()

    def grade(rollout: Rollout) -> float:
        if rollout.id.endswith(".1"):
            release.wait(300)
        return 1.0

    config = RolloutConfig(group_size=4, max_tokens=2, attempts=1, grade_timeout_s=20)
    group = Rollouts(lambda: sampler, grade, config).group(0, PROBLEM)
    release.set()
    assert [member.rollout.id for member in group.members] == ["0.0", "0.2", "0.3"]
    assert [(failure.rollout_id, failure.kind, failure.final) for failure in group.failures] == [("0.1", "timeout", True)]


def test_calls_that_never_end_are_counted_and_named_before_they_take_the_machine() -> None:
    release = threading.Event()
    deadlines = Deadlines(max_hung=3)
    hanging: list[Callable[[], Any]] = [lambda: release.wait(60)]
    for _ in range(3):
        (late,) = deadlines.all(hanging, 0.0)
        assert isinstance(late, TimeoutError)
    with pytest.raises(Unavailable, match="4 calls of the grader are past their deadline and still run"):
        deadlines.all(hanging, 0.0)
    release.set()


def test_a_server_that_is_away_is_a_failure_of_every_member_and_no_reward(tmp_path: Path) -> None:
    with serving(tmp_path) as server, server.client(patience_s=0.1) as client:
        sampler = client.sampler("tiny")
        server.stop()
        config = RolloutConfig(group_size=2, max_tokens=2, attempts=2)
        group = Rollouts(lambda: sampler, lambda _: 1.0, config).group(0, Problem("p", (1, 2)))
    assert group.members == ()
    assert Counter((failure.rollout_id, failure.kind, failure.final) for failure in group.failures) == {
        (member, "sampling", final): 1 for member in ("0.0", "0.1") for final in (False, True)
    }


def test_a_mistake_of_the_callers_is_raised_and_not_counted(sampler: Sampler) -> None:
    with pytest.raises(InvalidInput, match="ids are from 0 to"):
        Rollouts(lambda: sampler, lambda _: 1.0, CONFIG).group(0, Problem("p", (1 << 20,)))


def test_a_rollout_goes_on_with_new_weights_and_each_token_keeps_its_version(client: Client) -> None:
    run = client.create_run(BASE, rank=4, seed=1)
    old = client.sampler(run.save_snapshot().result().version)
    run.forward_backward([datum([*PROBLEM.prompt])])
    run.optim_step(1e-2)
    new = client.sampler(run.save_snapshot().result().version)
    turns = cycle([old, new])
    config = RolloutConfig(group_size=1, max_tokens=6, piece_tokens=3, seed=2)
    (member,) = Rollouts(lambda: next(turns), lambda _: 1.0, config).group(0, PROBLEM).members
    rollout = member.rollout
    assert rollout.versions[:3] == (old.model,) * 3
    assert set(rollout.versions[3:]) == {new.model}
    scored = {sampler.model: sampler.score(PROBLEM.prompt + rollout.tokens).prompt_logprobs()[len(PROBLEM.prompt) :] for sampler in (old, new)}
    assert rollout.logprobs == tuple(scored[version][place] for place, version in enumerate(rollout.versions))


def test_a_rollout_that_fills_the_context_ends_there(client: Client, sampler: Sampler) -> None:
    context = client.models()[0].context
    problem = Problem("long", (100,) * (context - 6))
    for piece_tokens, lengths in ((None, {6}), (4, {6}), (3, {6})):
        config = RolloutConfig(group_size=2, max_tokens=32, piece_tokens=piece_tokens, seed=1)
        members = Rollouts(lambda: sampler, lambda _: 1.0, config).group(0, problem).members
        assert {len(member.rollout.tokens) for member in members if not member.rollout.stopped} <= lengths
        assert len(members) == 2


def test_tokens_of_weights_that_nobody_published_are_a_failure() -> None:
    foreign = ONE._replace(id="3.2", versions=("v", "w"))
    group = without_foreign(Group(3, PROBLEM, (Graded(ONE, 1.0, {}), Graded(foreign, 1.0, {})), ()), {"v"}.__contains__)
    assert [member.rollout.id for member in group.members] == ["3.1"]
    assert [(failure.rollout_id, failure.kind, failure.final) for failure in group.failures] == [("3.2", "foreign_version", True)]


def test_seeds_of_different_places_have_nothing_in_common() -> None:
    seeds = {derived_seed(seed, group, member) for seed in range(4) for group in range(8) for member in range(8)}
    assert len(seeds) == 256
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert derived_seed(1, 23) != derived_seed(12, 3)
