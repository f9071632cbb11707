"""What a loop trained on, told to the server step by step: groups with prompts, tokens, log-probabilities, advantages, loss masks and rewards.

    grpo.train(client, problems, grade, config, path, steps=30, recorder=Recorder())

A step is told when its gradients were submitted, by a thread of its own while the trainer works: no other groups can become this step's then, and
nothing waits for it. It never ends a loop either: what the server refuses, or does not take in time, is lost, which is said of the first such step
and summed up at the end; where no step will be taken it says that too, and tells no more. A process that is killed may have trained a step and told
nothing of it; the next one says which.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple, Self

import numpy as np
from msgspec import Raw

from bloomery.client import TrainingRun
from bloomery.grade.template import unicode
from bloomery.recipes.advantages import Sorted, Weighed
from bloomery.recipes.rollouts import Failure, Graded, Group, Problem
from bloomery.recipes.segments import Segment
from bloomery.types.arrays import Array
from bloomery.types.errors import BloomeryError, Forbidden, NotFound, NotSupported, Unauthorized
from bloomery.types.rollouts import (
    MAX_REASON_CHARS,
    NO_MESSAGES,
    Dropped,
    NamedSpan,
    RecordedFailure,
    RecordedGroup,
    RecordedRollout,
    RecordedSegment,
    RecordedStep,
    Span,
    fitting,
    packed_messages,
)

log = logging.getLogger(__name__)

_WAITING: Final = 4
"""Steps that may wait to be told; each holds its groups in memory."""
_LAST_S: Final = 10.0
"""How long those that are left at the end of a loop may take."""
_NAME_CHARS: Final = 256
_FOR_GOOD: Final = (NotSupported, Unauthorized, Forbidden, NotFound)
"""The server keeps none, this key may not, or there is no such run. What else is refused may be the matter of one step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorder:
    """That a loop's rollouts are to be recorded."""

    note: Callable[[str], None] = log.warning
    """Told what is lost, from any thread."""
    messages: Callable[[Problem], Sequence[Mapping[str, Any]] | None] = lambda _: None
    """The prompt of a problem as a conversation, where it is one: whoever makes a data set of rollouts needs it. One that is no JSON, or more than a
    group may have, is left out."""


class Taught(NamedTuple):
    """What became of a step's groups. `weighed` are the segments of the trained ones in their order, before the batch's mean is taken."""

    step: int
    groups: Sequence[Group]
    kept: Sorted
    weighed: Sequence[Weighed]
    stale: frozenset[str] = frozenset()
    """Versions whose tokens have no loss."""
    rewarded: bool = True


class Recording:
    """Tells steps of a run while it is entered; without a `recorder`, none. `done`: steps that were trained before."""

    def __init__(self, recorder: Recorder | None, run: TrainingRun, done: int, *, last_s: float = _LAST_S) -> None:
        self._wanted, self._recorder = recorder is not None, recorder or Recorder()
        self._run, self._done, self._last_s = run, done, last_s
        self._queue: queue.Queue[Taught | None] = queue.Queue(_WAITING)
        self._telling: Taught | None = None
        self._lost: list[int] = []
        self._refused = False
        """For good: no more are told."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._tell_all, daemon=True, name="recording")

    def __enter__(self) -> Self:
        if self._wanted:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._wanted:
            return
        deadline = time.monotonic() + self._last_s
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._queue.put(None, timeout=self._last_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        why = f"the server did not take them within {self._last_s:g} s of the loop's end" if self._thread.is_alive() else "who tells them has died"
        self._ending.set()
        self._lose(self._left(), why)
        if len(self._lost) > 1:
            first, last = min(self._lost), max(self._lost)
            self._note(f"the rollouts of {len(self._lost)} steps were not recorded in all, from step {first} to step {last}")

    def of(self, taught: Taught) -> Callable[[], None]:
        """To be called once it is certain that this is what the step is trained on; returns at once."""
        return lambda: self._put(taught)

    def _put(self, taught: Taught) -> None:
        if not self._wanted:
            return
        if self._refused:
            self._lost.append(taught.step)
            return
        try:
            self._queue.put_nowait(taught)
        except queue.Full:
            self._lose([taught.step], f"{_WAITING} steps before it still wait to be taken by the server")

    def _tell_all(self) -> None:
        self._find_missing()
        while (taught := self._queue.get()) is not None:
            self._telling = taught
            if self._ending.is_set():
                # It is among those that are left.
                return
            self._tell(taught)
            self._telling = None

    def _tell(self, taught: Taught) -> None:
        if self._refused:
            self._lost.append(taught.step)
            return
        try:
            self._run.rollouts.add(taught.step, recorded_step(taught, self._recorder.messages))
        except _FOR_GOOD as error:
            self._refused = True
            self._lost.append(taught.step)
            self._note(f"the rollouts of step {taught.step} are not recorded, and none from here on; training goes on: {error.message}")
        except BloomeryError as error:
            self._lose([taught.step], error.message)
        except Exception as error:
            # Groups hold objects of foreign code; whatever is the matter with one, the loop goes on.
            log.exception("step %d cannot be recorded", taught.step)
            self._lose([taught.step], f"they cannot be told ({type(error).__name__})")

    def _find_missing(self) -> None:
        """Steps that the process before this one trained and did not tell; of a loop that recorded none, nothing."""
        try:
            newest = self._run.rollouts.steps(limit=1) if self._done else []
        except Exception as error:
            # Whatever an answer is that is none of the server's: steps can be told all the same.
            log.info("which rollouts are recorded is not known: %s", error)
            return
        if newest and newest[0].step < self._done:
            missing = [*range(newest[0].step + 1, self._done + 1)]
            self._note(f"the rollouts of {_numbers(missing)} were lost with the process that trained on them")

    def _left(self) -> list[int]:
        """Steps that wait, and the one that is being told."""
        left: list[int] = []
        with suppress(queue.Empty):
            while True:
                taught = self._queue.get_nowait()
                left += [] if taught is None else [taught.step]
        telling = self._telling
        return left if telling is None else [telling.step, *left]

    def _lose(self, steps: Sequence[int], why: str) -> None:
        first = not self._lost
        self._lost += steps
        if first and steps:
            self._note(f"the rollouts of {_numbers(steps)} are not recorded, and training goes on: {why}")

    def _note(self, said: str) -> None:
        try:
            self._recorder.note(said)
        except Exception:
            # Foreign code, and no reason for anything to end.
            log.exception("nobody is told that %s", said)


def _numbers(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def recorded_step(taught: Taught, messages: Callable[[Problem], Sequence[Mapping[str, Any]] | None] = lambda _: None) -> RecordedStep:
    """As much of it as a step may hold, group by group."""
    weighed, dropped = iter(taught.weighed), _dropped(taught.kept)
    rows = {group.number: [[next(weighed) for _ in member.rollout.segments] for member in group.members] for group in taught.kept.trained}

    def recorded(group: Group) -> RecordedGroup:
        none: list[Sequence[Weighed] | None] = [None] * len(group.members)
        return RecordedGroup(
            number=group.number,
            problem=_cut(str(group.problem.id), _NAME_CHARS),
            prompt=_ids(group.problem.prompt),
            rollouts=tuple(_rollout(member, row, taught) for member, row in zip(group.members, rows.get(group.number, none), strict=True)),
            failures=tuple(map(_failure, group.failures)),
            dropped=None if group.number in rows else dropped[group.number],
            messages=_messages(messages(group.problem)),
        )

    return fitting(map(recorded, taught.groups))


def _messages(said: Sequence[Mapping[str, Any]] | None) -> Raw:
    try:
        return packed_messages(said)
    except ValueError as error:
        log.info("a prompt is recorded without its messages: %s", error)
        return NO_MESSAGES


def _dropped(kept: Sorted) -> dict[int, Dropped]:
    alike: dict[int, Dropped] = {group.number: "zero_variance" for group in kept.zero_variance}
    return alike | {group.number: "too_small" for group in kept.too_small}


def _rollout(member: Graded, rows: Sequence[Weighed] | None, taught: Taught) -> RecordedRollout:
    rollout = member.rollout
    prompt = 0 if rollout.laid_out else len(rollout.problem.prompt)
    none: list[Weighed | None] = [None] * len(rollout.segments)
    return RecordedRollout(
        id=_cut(rollout.id, _NAME_CHARS),
        segments=tuple(
            _segment(segment, row, prompt, taught.stale) for segment, row in zip(rollout.segments, none if rows is None else rows, strict=True)
        ),
        stopped=rollout.stopped,
        reward=member.reward if taught.rewarded else None,
        parts=dict(member.parts),
        turns={_cut(answer, _NAME_CHARS): reward for answer, reward in member.turns},
        reason=_cut(member.reason, MAX_REASON_CHARS) or None,
    )


def _segment(segment: Segment, row: Weighed | None, prompt: int, stale: frozenset[str]) -> RecordedSegment:
    """Without the `prompt` tokens of the group that it begins with."""
    places = np.asarray(segment.places, dtype=np.int64) - prompt
    versions = _named_spans(places, segment.versions)
    return RecordedSegment(
        tokens=_ids(segment.tokens[prompt:]),
        sampled=tuple((start, stop) for start, stop, _ in _named_spans(places, ("",) * len(places))),
        logprobs=_floats(segment.logprobs),
        advantages=None if row is None else _floats(row.advantages),
        trained=() if row is None else _joined((start, stop) for start, stop, version in versions if version not in stale),
        versions=versions,
        # The one answer of a rollout that is no agent's has its name.
        answers=_named_spans(places, segment.turns) if prompt == 0 else (),
        after_prompt=prompt > 0,
        temperature=float(segment.temperature),
    )


def _named_spans(places: np.ndarray, names: Sequence[str]) -> tuple[NamedSpan, ...]:
    """Runs of neighbouring places with the same name."""
    # Places that rise one by one are as far from their numbers.
    runs = groupby(enumerate(zip(places.tolist(), names, strict=True)), key=lambda each: (each[1][0] - each[0], each[1][1]))
    found = [(name, [place for _, (place, _) in run]) for (_, name), run in runs]
    return tuple((run[0], run[-1] + 1, _cut(name, _NAME_CHARS)) for name, run in found)


def _joined(spans: Iterator[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _failure(failure: Failure) -> RecordedFailure:
    return RecordedFailure(
        id=_cut(failure.rollout_id, _NAME_CHARS), kind=failure.kind, message=_cut(failure.message, MAX_REASON_CHARS), final=failure.final
    )


def _cut(text: str, most: int) -> str:
    """Text whatever foreign code says, and no longer than that."""
    return unicode(text[:most])


def _ids(tokens: Sequence[int]) -> Array:
    return Array.of(np.asarray(tokens, dtype=np.int32))


def _floats(numbers: Sequence[float] | np.ndarray) -> Array:
    return Array.of(np.asarray(numbers, dtype=np.float32))
