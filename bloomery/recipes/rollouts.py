"""Rollouts in groups: sampled with token ids, log-probabilities and versions, graded by a callable, and typed where they fail.

`Rollouts.group` gives the group of a number. A member that fails is tried again, a bounded number of times, and as itself: its seed gives the same
tokens under the same weights, so that no difficult rollout is ever exchanged for an easy one. One that keeps failing is a `Failure`, never a reward.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import filterfalse
from typing import Any, ClassVar, NamedTuple

from bloomery.client import Sampler
from bloomery.client.sampling import Sampled
from bloomery.recipes.deadlines import Deadlines
from bloomery.recipes.reuse import Earlier, Tokens
from bloomery.recipes.rewards import FailureKind, Reward, fault_of
from bloomery.recipes.segments import Segment, single
from bloomery.types.errors import BloomeryError, InvalidInput

SEED_BITS = 63


class Problem(NamedTuple):
    """A prompt as tokens and what its grader needs to know."""

    id: str
    prompt: tuple[int, ...]
    data: Any = None


class Rollout(NamedTuple):
    """One continuation as it was sampled; `logprobs` of the distribution drawn from and `versions` of the weights, of each token."""

    id: str
    problem: Problem
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[str, ...]
    stopped: bool
    """By an end token; otherwise its length cut it off."""
    laid_out: tuple[Segment, ...] = ()
    """Of an agent: how its tokens, all that were sampled, lie among those that others said. Empty: behind the prompt of the problem."""
    answers: tuple[str, ...] = ()
    """Ids of an agent's answers, in the order in which they were asked for."""
    kept: int = 0
    """Tokens that an earlier rollout had right, with `reuse`."""
    temperature: float = 1.0
    """At which its tokens were drawn; what is `laid_out` says that of itself."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What is trained on."""
        return self.laid_out or (single(self.problem.prompt, self.id, self.tokens, self.logprobs, self.versions, self.temperature),)


Grade = Callable[[Rollout], "float | Reward"]
"""A plain number, or a `Reward`."""


class Graded(NamedTuple):
    """A rollout with its reward."""

    rollout: Rollout
    reward: float
    parts: Mapping[str, float]
    turns: tuple[tuple[str, float], ...] = ()
    """Rewards of single answers, in the order in which they were asked for."""
    reason: str = ""
    """What the grader says of it."""


class Failure(NamedTuple):
    """One failed attempt at a rollout; `final` where there was no further one."""

    rollout_id: str
    kind: FailureKind
    message: str
    final: bool


class Group(NamedTuple):
    """The rollouts of one problem, and all that failed on the way: members are fewer than asked for by the final failures."""

    number: int
    problem: Problem
    members: tuple[Graded, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """How groups are made. Rollouts are drawn from all of the distribution at one temperature, which is the one that the losses compute."""

    group_size: int = 8
    max_tokens: int = 64
    temperature: float = 1.0
    """What is trained is drawn at 0.01 to 100; an evaluation may also take the likeliest tokens, at 0."""
    piece_tokens: int | None = None
    """Sample so many tokens at a time, each piece of the newest weights; None samples a rollout at once, of one version."""
    reuse: bool = False
    """Whether an answer of before is verified in one pass, and sampled on from where it goes wrong. Seeds follow from the prompt then, and not from
    the group: the same noise meets a problem in every epoch, and epochs are correlated."""
    attempts: int = 3
    sample_timeout_s: float = 120.0
    grade_timeout_s: float = 30.0
    environment_timeout_s: float = 600.0
    """For a group of an environment that does not bound its own calls, as agents do."""
    seed: int = 0


class MakesGroups(ABC):
    """Whatever makes the group of a number."""

    bounds_itself: ClassVar[bool] = False
    """Whether a group always comes, with failures by their kind; others are held to both by `Bounded`."""

    @abstractmethod
    def group(self, number: int, problem: Problem) -> Group:
        """Sampled and graded; threads may ask side by side."""

    def take_times_s(self) -> list[float]:
        """Seconds of each call of foreign code, a grader or an agent, since this was asked last; empty where nobody measures them."""
        return []


class Environment(ABC):
    """What takes the place of a grader where rollouts are more than one continuation of a prompt."""

    @abstractmethod
    def rollouts(self, newest: Callable[[], Sampler], config: RolloutConfig) -> MakesGroups:
        """Groups by the newest weights; InvalidInput for settings that mean nothing here."""


class Rollouts(MakesGroups):
    """Makes groups; `newest` gives the sampler of the newest weights. Threads may share it."""

    bounds_itself = True

    def __init__(self, newest: Callable[[], Sampler], grade: Grade, config: RolloutConfig) -> None:
        self._newest, self._grade, self._config = newest, grade, config
        self._deadlines = Deadlines()
        self._earlier = Earlier() if config.reuse else None

    def group(self, number: int, problem: Problem) -> Group:
        """Sample and grade. An error that is the caller's, a prompt that is too long say, is raised."""
        failures: list[Failure] = []
        place = number if self._earlier is None else derived_seed(self._config.seed, *problem.prompt)
        sampled = [*self._sample(number, place, problem, failures)]
        if self._earlier is not None:
            self._earlier.keep((place,), [rollout.tokens for rollout in sampled])
        graded = self._grade_all(sampled, failures)
        return Group(number, problem, tuple(graded), tuple(failures))

    def take_times_s(self) -> list[float]:
        """Of the grader."""
        return self._deadlines.take_times_s()

    def _sample(self, number: int, place: int, problem: Problem, failures: list[Failure]) -> Iterator[Rollout]:
        ids = [f"{number}.{member}" for member in range(self._config.group_size)]
        none: list[Tokens] = [()] * len(ids)
        earlier = none if self._earlier is None else self._earlier.of((place,), len(ids))
        first = self._piece(problem.prompt, 0, (place,), ids, failures, [tokens[: self._room(0)] for tokens in earlier])
        if first is None:
            return
        begun = [
            Rollout(
                rollout_id,
                problem,
                sequence.tokens,
                sequence.logprobs,
                (first.version,) * len(sequence.tokens),
                sequence.stopped,
                kept=kept,
                temperature=self._config.temperature,
            )
            for rollout_id, sequence, kept in zip(ids, first.sequences, first.kept or [0] * len(ids), strict=True)
        ]
        if self._config.piece_tokens is None:
            yield from begun
            return
        with ThreadPoolExecutor(len(begun)) as pool:
            numbers = range(len(begun))
            whole = pool.map(lambda member, rollout: self._whole(rollout, (place, member), earlier[member], failures), numbers, begun)
            yield from (rollout for rollout in whole if rollout is not None)

    def _whole(self, rollout: Rollout, place: tuple[int, ...], earlier: Tokens, failures: list[Failure]) -> Rollout | None:
        """Piece by piece to its end, each by the newest weights: what was sampled before keeps its version and log-probabilities."""
        fresh = len(rollout.tokens)
        # A piece that is shorter than it may be, and has no end, has filled the model's context.
        while not rollout.stopped and fresh == self._room(len(rollout.tokens) - fresh) and self._room(len(rollout.tokens)):
            begun = len(rollout.tokens)
            draft = earlier[begun : begun + self._room(begun)] if earlier[:begun] == rollout.tokens else ()
            try:
                piece = self._piece(rollout.problem.prompt + rollout.tokens, begun, (*place, begun), [rollout.id], failures, [draft])
            except InvalidInput as error:
                if error.field != "prompt":
                    raise
                # What was taken before, and sampled tokens behind it: all that such a prompt can lack is room in the model's context.
                return rollout
            if piece is None:
                return None
            (more,) = piece.sequences
            fresh = len(more.tokens)
            rollout = rollout._replace(
                tokens=rollout.tokens + more.tokens,
                logprobs=rollout.logprobs + more.logprobs,
                versions=rollout.versions + (piece.version,) * fresh,
                stopped=more.stopped,
                kept=rollout.kept + sum(piece.kept),
            )
        return rollout

    def _room(self, begun: int) -> int:
        """Tokens of the next piece, behind so many."""
        left = self._config.max_tokens - begun
        return left if self._config.piece_tokens is None else min(left, self._config.piece_tokens)

    def _piece(
        self,
        tokens: Sequence[int],
        begun: int,
        place: tuple[int, ...],
        ids: Sequence[str],
        failures: list[Failure],
        drafts: Sequence[Tokens],
    ) -> Sampled | None:
        """One request; None where the server failed at it time and again."""
        config = self._config
        for attempt in range(config.attempts):
            try:
                sampler = self._newest()
                pending = sampler.sample(
                    tokens,
                    max_tokens=self._room(begun),
                    seed=derived_seed(config.seed, *place),
                    num_samples=len(ids),
                    temperature=config.temperature,
                    drafts=drafts if any(drafts) else None,
                )
                return pending.result(config.sample_timeout_s)
            except BloomeryError as error:
                if error.category == "user":
                    raise
                final = attempt + 1 == config.attempts
                failures += [Failure(rollout_id, "sampling", error.message, final) for rollout_id in ids]
        return None

    def _grade_all(self, rollouts: Sequence[Rollout], failures: list[Failure]) -> list[Graded]:
        graded: dict[str, Graded] = {}
        waiting = list(rollouts)
        for attempt in range(self._config.attempts):
            outcomes = self._deadlines.all([partial(self._grade, rollout) for rollout in waiting], self._config.grade_timeout_s)
            judged = [judge(rollout, outcome) for rollout, outcome in zip(waiting, outcomes, strict=True)]
            graded |= {one.rollout.id: one for one in judged if isinstance(one, Graded)}
            final = attempt + 1 == self._config.attempts
            failures += [one._replace(final=final) for one in judged if isinstance(one, Failure)]
            waiting = [rollout for rollout in waiting if rollout.id not in graded]
            if not waiting:
                break
        return [graded[rollout.id] for rollout in rollouts if rollout.id in graded]


def judge(rollout: Rollout, outcome: Any) -> Graded | Failure:
    """What a grader's answer means: only finite numbers, of this very rollout, are a reward."""
    if isinstance(outcome, TimeoutError):
        return Failure(rollout.id, "timeout", told_by(outcome), final=False)
    if isinstance(outcome, BaseException):
        return Failure(rollout.id, "raised", f"{type(outcome).__name__}: {told_by(outcome)}", final=False)
    try:
        return _judged(rollout, outcome if isinstance(outcome, Reward) else Reward(rollout.id, outcome))
    except Exception as error:
        # Numbers and mappings may be classes of foreign code, like the rest of a grader.
        return Failure(rollout.id, "wrong_type", f"the reward cannot be read: {type(error).__name__}: {told_by(error)}", final=False)


def _judged(rollout: Rollout, told: Reward) -> Graded | Failure:
    if told.rollout_id != rollout.id:
        return Failure(rollout.id, "foreign_reward", f"the reward is of rollout {told.rollout_id}", final=False)
    if (fault := fault_of(told)) is not None:
        return Failure(rollout.id, fault.kind, fault.message, final=False)
    if others := sorted(told.turns.keys() - set(rollout.answers)):
        return Failure(rollout.id, "foreign_reward", f"the reward is of answers that this rollout did not get: {', '.join(others)}", final=False)
    turns = tuple((answer, float(told.turns[answer])) for answer in rollout.answers if answer in told.turns)
    return Graded(rollout, float(told.value), {name: float(part) for name, part in told.parts.items()}, turns, told.reason)


def told_by(error: BaseException) -> str:
    """What it says of itself, if it can."""
    try:
        return str(error)
    except Exception:
        # It is foreign code like the rest of a grader.
        return "an error that cannot say what it is"


def without_foreign(group: Group, knows: Callable[[str], bool]) -> Group:
    """Without members that have tokens of unknown weights: nothing can be said of how they were drawn."""
    return _only(group, knows, "weights that this loop did not publish")


def without_outdated(group: Group, is_fresh: Callable[[str], bool]) -> Group:
    """Without members that have tokens of weights which nobody should have sampled with any more when their group began: newer ones do not arrive."""
    return _only(group, is_fresh, "weights that were out of date when the group began")


def _only(group: Group, is_right: Callable[[str], bool], others: str) -> Group:
    """With those members alone whose tokens are all of the right versions."""
    wrong = {member.rollout.id: sorted(filterfalse(is_right, _versions(member.rollout))) for member in group.members}
    failures = [
        Failure(rollout_id, "foreign_version", f"tokens of {others}: {', '.join(versions)}", final=True)
        for rollout_id, versions in wrong.items()
        if versions
    ]
    members = tuple(member for member in group.members if not wrong[member.rollout.id])
    return group._replace(members=members, failures=(*group.failures, *failures))


def _versions(rollout: Rollout) -> set[str]:
    return {*rollout.versions, *(version for segment in rollout.segments for version in segment.versions)}


def derived_seed(seed: int, *place: int) -> int:
    """A seed of its own for each place in a loop: the same ones after a restart, and none that follows from a neighbour's."""
    digest = hashlib.sha256(" ".join(map(str, (seed, *place))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)
