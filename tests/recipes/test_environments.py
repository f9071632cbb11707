"""Environments of somebody else's, which raise, hang and give anything: typed and counted in both loops, never a zero reward or an endless wait."""

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.client import Client, Sampler
from bloomery.recipes import grpo
from bloomery.recipes.environments import Bounded
from bloomery.recipes.rollouts import Environment, Failure, Graded, Group, MakesGroups, Problem, Rollout, RolloutConfig
from bloomery.recipes.segments import Segment
from bloomery.types.errors import InvalidInput
from tests.recipes.loops import PROBLEMS, Record
from tests.recipes.test_holding import ROLLOUTS, Loop, ahead, in_step

PATIENT = replace(ROLLOUTS, environment_timeout_s=20.0)
Change = Callable[[Group], Any]


class Changed(MakesGroups):
    """Sound groups, of which that of one number is changed."""

    def __init__(self, sound: MakesGroups, change: Change, number: int) -> None:
        self._sound, self._change, self._number = sound, change, number

    def group(self, number: int, problem: Problem) -> Group:
        group = self._sound.group(number, problem)
        return self._change(group) if number == self._number else group


class Broken(Environment):
    def __init__(self, change: Change, number: int = 0) -> None:
        self._change, self._number = change, number

    def rollouts(self, newest: Callable[[], Sampler], config: RolloutConfig) -> MakesGroups:
        return Changed(grpo.groups_by(newest, Record().grade, config), self._change, self._number)


def rewarded(reward: Any) -> Change:
    """The second member has this reward."""

    def change(group: Group) -> Group:
        first, second, *others = group.members
        return group._replace(members=(first, second._replace(reward=reward), *others))

    return change


def first(change: Callable[[Graded], Graded]) -> Change:
    """The first member is changed."""
    return lambda group: group._replace(members=(change(group.members[0]), *group.members[1:]))


def rollout_of(**fields: Any) -> Callable[[Graded], Graded]:
    return lambda member: member._replace(rollout=member.rollout._replace(**fields))


def raises(_: Group) -> Group:
    raise ValueError("no such level")


def hangs(_: Group) -> Group:
    threading.Event().wait(300)
    raise AssertionError("it was left to itself before")


@pytest.mark.slow
@pytest.mark.parametrize("loop", [in_step, ahead])
@pytest.mark.parametrize(
    ("change", "kind", "lost"),
    [
        (raises, "raised", 4),
        (hangs, "timeout", 4),
        (rewarded(math.nan), "not_finite", 1),
        (rewarded(None), "no_reward", 1),
        (rewarded("good"), "wrong_type", 1),
        (rewarded(1e300), "not_finite", 1),
        (first(rollout_of(problem=PROBLEMS[4]._replace(id="another"))), "foreign_reward", 1),
        (first(rollout_of(tokens=(), logprobs=(), versions=())), "no_tokens", 1),
        (first(rollout_of(laid_out=(Segment((7, 8), (1,), (-1.0,), ("of nobody",), ("",)),))), "foreign_version", 1),
        (lambda group: group._replace(members=group.members[1:]), "no_reward", 1),
        (lambda group: group._replace(members=()), "no_reward", 4),
    ],
    ids=["raises", "hangs", "nan", "none", "text", "huge", "another-problem", "no-tokens", "foreign-tokens-laid-out", "left-out", "empty"],
)
def test_what_is_no_reward_is_a_failure_of_its_kind_and_the_loop_goes_on(
    client: Client, tmp_path: Path, loop: Loop, change: Change, kind: str, lost: int
) -> None:
    # Else the asynchronous loop goes on with other groups, and counts this one when it comes.
    waits = {"max_head_offpolicy_versions": 0} if loop is ahead else {}
    (report,) = loop(client, tmp_path / "cursor", Broken(change), PROBLEMS, rollouts=PATIENT, **waits)
    assert report.step == 1
    assert report.metrics[f"failures/{kind}"] == report.metrics["failures/lost"] == lost
    assert math.isfinite(report.metrics["reward/raw"])
    assert report.metrics["tokens/trained"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("loop", [in_step, ahead])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda group: group._replace(number=7), "the environment gave group 7"),
        (lambda _: None, "the environment gave a NoneType"),
        (lambda group: group._replace(members=(1.0,)), "the environment gave group 0, with members"),
        (lambda group: group._replace(members=None), "the environment gave group 0, with members None"),
        (lambda group: group._replace(problem=PROBLEMS[4]), "the environment gave group 0 of another problem"),
        (lambda group: group._replace(failures=("it broke",)), "the environment gave group 0, with failures"),
        (lambda group: group._replace(members=group.members[:1] * 2), "the environment gave group 0, with two members of one id"),
        (first(lambda member: member._replace(turns=(("an answer",),))), "the environment gave group 0, with members"),
        (first(rollout_of(id=None)), "the environment gave group 0, with members"),
        (first(rollout_of(logprobs=(-1.0,))), "the environment gave rollout 0.0, whose sampled tokens have not"),
        (first(rollout_of(versions=())), "the environment gave rollout 0.0, whose sampled tokens have not"),
        (first(rollout_of(laid_out=(Segment((7, 8), (2,), (-1.0,), ("v",), ("",)),))), "the environment gave rollout 0.0, whose sampled tokens"),
    ],
    ids=[
        "another-number",
        "nothing",
        "other-members",
        "no-members",
        "another-problem",
        "other-failures",
        "one-id",
        "other-turns",
        "no-id",
        "lost-logprobs",
        "no-versions",
        "places-outside",
    ],
)
def test_what_is_no_group_of_the_number_that_was_asked_for_ends_the_loop_with_its_cursor_as_it_was(
    client: Client, tmp_path: Path, loop: Loop, change: Change, what: str
) -> None:
    path = tmp_path / "cursor"
    with pytest.raises(InvalidInput, match=f"{what}.* where group 0 was asked for"):
        loop(client, path, Broken(change), PROBLEMS, rollouts=PATIENT)
    (report,) = loop(client, path, Broken(lambda group: group), PROBLEMS, rollouts=PATIENT)
    assert report.step == 1
    assert report.metrics["failures/lost"] == 0


ALONE = replace(PATIENT, group_size=1)
SOUND = Group(0, PROBLEMS[0], (Graded(Rollout("0.0", PROBLEMS[0], (7, 8), (-1.0, -2.0), ("v", "v"), True), 1.0, {}),), ())


class Given(MakesGroups):
    def __init__(self, given: Any) -> None:
        self._given = given

    def group(self, number: int, problem: Problem) -> Group:
        group: Group = self._given
        return group


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (first(rollout_of(logprobs=(-1.0, math.nan)))(SOUND), "rollout 0.0, whose sampled tokens have not a place, a finite log-probability"),
        (first(rollout_of(logprobs=(-1.0, -1e300)))(SOUND), "rollout 0.0, whose sampled tokens have not a place, a finite log-probability"),
        (first(rollout_of(laid_out=SOUND.members[0].rollout.segments, logprobs=(None,)))(SOUND), "rollout 0.0, whose sampled tokens have not"),
        (first(rollout_of(kept="all"))(SOUND), "group 0, with members"),
        (first(rollout_of(answers=([],)))(SOUND), "group 0, with members"),
        (SOUND._replace(failures=(Failure("0.9", "raised", "it broke", None),)), "group 0, with failures"),  # type: ignore[arg-type]
        (SOUND._replace(failures=(Failure([], "raised", "it broke", True),)), "group 0, with failures"),  # type: ignore[arg-type]
        (SOUND._replace(number=np.arange(2)), "what cannot be read \\(ValueError: The truth value"),  # type: ignore[arg-type]
    ],
    ids=["nan", "beyond-float32", "shown-of-nothing", "kept", "answers", "failure-without-an-end", "failure-of-nobody", "unreadable"],
)
def test_what_would_be_met_behind_the_door_is_refused_there(given: Group, what: str) -> None:
    with pytest.raises(InvalidInput, match=f"the environment gave {what}"):
        Bounded(Given(given), ALONE).group(0, PROBLEMS[0])
    assert Bounded(Given(SOUND), ALONE).group(0, PROBLEMS[0]) == SOUND


def test_only_members_of_which_nothing_is_told_are_missing() -> None:
    failed, retried = Failure("0.1", "raised", "it broke", final=True), Failure("0.2", "raised", "it broke", final=False)
    told = Bounded(Given(SOUND._replace(failures=(failed, retried))), replace(PATIENT, group_size=4)).group(0, PROBLEMS[0])
    assert [(each.rollout_id, each.kind) for each in told.failures if each.final] == [("0.1", "raised"), ("0.2", "no_reward"), ("0.3", "no_reward")]
    # A member may have any name.
    named = first(rollout_of(id="mine"))(SOUND)
    told = Bounded(Given(named), replace(PATIENT, group_size=2)).group(0, PROBLEMS[0])
    assert [(each.rollout_id, each.kind) for each in told.failures] == [("0.0", "no_reward")]
    assert Bounded(Given(named), replace(PATIENT, group_size=1)).group(0, PROBLEMS[0]) == named


def test_a_measurement_has_an_end_too(client: Client) -> None:
    measured = grpo.measure(client.sampler("bloomery-tiny"), PROBLEMS[:2], Broken(hangs), PATIENT)
    assert (len(measured.means), measured.lost) == (1, ROLLOUTS.group_size)


def test_what_is_shown_of_turns_and_parts_stays(client: Client) -> None:
    def with_parts(group: Group) -> Group:
        return group._replace(members=tuple(Graded(each.rollout, each.reward, {"format": 1}, each.turns) for each in group.members))

    sampler = client.sampler("bloomery-tiny")
    made = grpo.groups_by(lambda: sampler, Broken(with_parts), PATIENT).group(0, PROBLEMS[0])
    assert [each.parts for each in made.members] == [{"format": 1.0}] * ROLLOUTS.group_size
