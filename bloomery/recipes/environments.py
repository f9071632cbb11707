"""Groups of an environment of somebody else's, which may raise, hang and give anything: what is no group is refused, and what is no reward of its
rollout is a failure of its kind.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, pairwise
from numbers import Integral, Real
from typing import Any, get_args

import numpy as np

from bloomery.client import Sampler
from bloomery.recipes.deadlines import Deadlines, check_times, times_of
from bloomery.recipes.rewards import FailureKind, Reward
from bloomery.recipes.rollouts import (
    Environment,
    Failure,
    Grade,
    Graded,
    Group,
    MakesGroups,
    Problem,
    Rollout,
    RolloutConfig,
    Rollouts,
    judge,
    told_by,
)
from bloomery.recipes.segments import Segment
from bloomery.types.errors import BloomeryError, InvalidInput


def groups_by(newest: Callable[[], Sampler], grade: Grade | Environment, config: RolloutConfig) -> MakesGroups:
    """Of single continuations that are graded, or of an environment."""
    check_times(**times_of(config))
    if not isinstance(grade, Environment):
        return Rollouts(newest, grade, config)
    made = grade.rollouts(newest, config)
    return made if made.bounds_itself else Bounded(made, config)


class Bounded(MakesGroups):
    """An environment's groups, each in its time and with failures by their kind."""

    bounds_itself = True

    def __init__(self, made: MakesGroups, config: RolloutConfig) -> None:
        self._made, self._config = made, config
        self._deadlines = Deadlines()

    def group(self, number: int, problem: Problem) -> Group:
        """That of the environment. An error with a category is raised; InvalidInput where it gives no group, or another one."""
        (given,) = self._deadlines.all([partial(self._made.group, number, problem)], self._config.environment_timeout_s)
        if isinstance(given, BloomeryError) or (isinstance(given, BaseException) and not isinstance(given, Exception)):
            raise given
        if isinstance(given, Exception):
            kind: FailureKind = "timeout" if isinstance(given, TimeoutError) else "raised"
            message = f"{type(given).__name__}: {told_by(given)}"
            return Group(number, problem, (), tuple(Failure(f"{number}.{member}", kind, message, True) for member in range(self._config.group_size)))
        try:
            other = _other_than(given, number, problem)
        except Exception as error:
            # What is in it may be of classes of foreign code, too.
            other = f"what cannot be read ({type(error).__name__}: {told_by(error)})"
        if other is not None:
            wanted = "give a `Group` of that number and problem, whose members are `Graded` rollouts as they were served"
            raise InvalidInput(f"the environment gave {other} where group {number} was asked for: {wanted}", field="grade")
        judged = [_judged(each, problem) for each in given.members]
        failed = tuple(each._replace(final=True) for each in judged if isinstance(each, Failure))
        members = tuple(each for each in judged if isinstance(each, Graded))
        return Group(number, problem, members, (*given.failures, *failed, *_untold(given, self._config.group_size)))

    def take_times_s(self) -> list[float]:
        """Of the environment, a group each."""
        return self._deadlines.take_times_s()


def _judged(each: Graded, problem: Problem) -> Graded | Failure:
    rollout = each.rollout
    if rollout.problem.id != problem.id:
        return Failure(rollout.id, "foreign_reward", f"the rollout is of problem {rollout.problem.id}, and its group of {problem.id}", final=True)
    if not any(segment.places for segment in rollout.segments):
        return Failure(rollout.id, "no_tokens", "no token of it was sampled, so there is nothing to train on", final=True)
    return judge(rollout, Reward(rollout.id, each.reward, each.parts, dict(each.turns), each.reason))


def _untold(given: Group, size: int) -> list[Failure]:
    """Members that the environment says nothing of: whoever leaves out what is difficult would choose among rollouts, and nobody would see it."""
    told = {member.rollout.id for member in given.members} | {failure.rollout_id for failure in given.failures if failure.final}
    others = (name for member in range(size) if (name := f"{given.number}.{member}") not in told)
    message = "the environment gave neither this rollout nor a failure of it"
    return [Failure(name, "no_reward", message, final=True) for name in islice(others, max(0, size - len(told)))]


def _other_than(given: Any, number: int, problem: Problem) -> str | None:
    """What was given, where that is not the group of this number."""
    if not isinstance(given, Group):
        return f"a {type(given).__name__}"
    if given.number != number:
        return f"group {given.number}"
    if not isinstance(given.problem, Problem) or given.problem.id != problem.id:
        return f"group {number} of another problem, {given.problem!r:.80}"
    if not isinstance(given.members, list | tuple) or not all(map(_is_graded, given.members)):
        return f"group {number}, with members {given.members!r:.80}"
    if not isinstance(given.failures, list | tuple) or not all(map(_is_failure, given.failures)):
        return f"group {number}, with failures {given.failures!r:.80}"
    ids = [member.rollout.id for member in given.members]
    if len(set(ids)) < len(ids):
        return f"group {number}, with two members of one id, {max(ids, key=ids.count)!r:.80},"
    broken = (member.rollout.id for member in given.members if not _is_told(member.rollout))
    if (broken_id := next(broken, None)) is not None:
        return f"rollout {broken_id}, whose sampled tokens have not a place, a finite log-probability and a version each,"
    return None


def _is_graded(member: Any) -> bool:
    if not isinstance(member, Graded) or not isinstance(member.rollout, Rollout):
        return False
    rollout = member.rollout
    turns = isinstance(member.turns, tuple) and all(isinstance(turn, tuple) and len(turn) == 2 and isinstance(turn[0], str) for turn in member.turns)
    laid_out = isinstance(rollout.laid_out, tuple) and all(isinstance(segment, Segment) for segment in rollout.laid_out)
    told = all(isinstance(each, tuple) for each in (rollout.tokens, rollout.logprobs, rollout.versions, rollout.answers))
    named = isinstance(rollout.id, str) and isinstance(rollout.problem, Problem) and all(isinstance(answer, str) for answer in rollout.answers)
    return turns and laid_out and told and named and isinstance(rollout.kept, Integral) and isinstance(rollout.temperature, Real)


def _is_failure(failure: Any) -> bool:
    return (
        isinstance(failure, Failure)
        and isinstance(failure.rollout_id, str)
        and failure.kind in get_args(FailureKind)
        and isinstance(failure.message, str)
        and isinstance(failure.final, bool)
    )


def _is_told(rollout: Rollout) -> bool:
    """All that is trained on, and what of an agent is only shown."""
    typed = all(isinstance(each, Real) for each in rollout.logprobs) and all(isinstance(each, str) for each in rollout.versions)
    return typed and all(map(_is_whole, rollout.segments)) and _are_finite(rollout.logprobs)


def _is_whole(segment: Segment) -> bool:
    """One of each for every sampled token, at places that others lie before, and log-probabilities that are finite."""
    sampled = {len(segment.places), len(segment.logprobs), len(segment.versions), len(segment.turns)}
    types = ((segment.tokens, Integral), (segment.places, Integral), (segment.logprobs, Real), (segment.versions, str))
    placed = all(place > 0 for place in segment.places[:1]) and all(place < len(segment.tokens) for place in segment.places[-1:])
    ascending = all(before < behind for before, behind in pairwise(segment.places))
    typed = all(isinstance(each, kind) for many, kind in types for each in many)
    return len(sampled) == 1 and typed and placed and ascending and _are_finite(segment.logprobs) and isinstance(segment.temperature, Real)


def _are_finite(logprobs: Sequence[float]) -> bool:
    # As they are sent: what float32 has no number for is no log-probability.
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.asarray(logprobs, dtype=np.float32)).all())
