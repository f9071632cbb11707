"""Recorded rollouts as they are shown: what their tokens say, and those that a filter leaves. Pure, and slow enough for a thread."""

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from bloomery.services.engines.texts import Texts
from bloomery.services.training.recorded import mask_of, sampled_tokens
from bloomery.types.arrays import Array
from bloomery.types.rollouts import (
    RecordedGroup,
    RecordedRollout,
    RecordedSegment,
    RecordedStep,
    Rollout,
    RolloutFailure,
    RolloutFilter,
    RolloutGroup,
    RolloutSegment,
    messages_of,
)

PAGE_TOKENS: Final = 1 << 15
"""A page ends before it has more, if it has a group: each takes some sixty bytes of JSON. What else a group has counts as so many."""
_EXPORT_TOKENS: Final = 1 << 16
"""As much of a step is made at a time where it is exported, and one rollout more."""
_PIECE_TOKENS: Final = 16
"""Of a rollout, a segment or a failure, its tokens apart."""
_TOKEN_BYTES: Final = 4


class Shown(NamedTuple):
    """Groups of a page, and whether there are more behind them."""

    groups: list[RolloutGroup]
    has_more: bool


def page(step: RecordedStep, wanted: RolloutFilter, texts: Texts, *, limit: int, offset: int) -> Shown:
    """At most so many groups behind the first `offset`, and at least one where there is one."""
    found = islice(filtered(step, wanted, texts), offset, None)
    shown: list[RolloutGroup] = []
    tokens = 0
    for group in found:
        size = _size(group)
        if len(shown) == limit or (shown and tokens + size > PAGE_TOKENS):
            return Shown(shown, True)
        tokens += size
        shown.append(shown_group(group, texts))
    return Shown(shown, False)


class Place(NamedTuple):
    """In an export of a step: before which rollout of which group, as they lie there and are wanted."""

    group: int
    rollout: int


START: Final = Place(0, 0)


class Exported(NamedTuple):
    """Some rollouts as they are exported, each with what its group says, and where the next are; None where there are none."""

    rollouts: list[dict[str, Any]]
    next: Place | None


def filtered(step: RecordedStep, wanted: RolloutFilter, texts: Texts) -> Iterator[RecordedGroup]:
    """Groups with the rollouts that are wanted of them."""
    for group in step.groups:
        if wanted.group not in (None, group.number) or wanted.trained not in (None, group.dropped is None):
            continue
        chosen = _chosen(group, wanted, texts)
        # Nothing is chosen among rollouts: a group all of which failed is there, too.
        if chosen or (wanted.min_reward, wanted.max_reward, wanted.search) == (None, None, None):
            yield msgspec.structs.replace(group, rollouts=chosen)


def _chosen(group: RecordedGroup, wanted: RolloutFilter, texts: Texts) -> tuple[RecordedRollout, ...]:
    low = -math.inf if wanted.min_reward is None else wanted.min_reward
    high = math.inf if wanted.max_reward is None else wanted.max_reward
    bounded = (wanted.min_reward, wanted.max_reward) != (None, None)
    chosen = [each for each in group.rollouts if not bounded or (each.reward is not None and low <= each.reward <= high)]
    if wanted.search is None:
        return tuple(chosen)
    sought = wanted.search.casefold()

    def says(tokens: Array) -> bool:
        return sought in (texts.of(tokens.numpy().tolist()).text or "").casefold()

    return tuple(chosen) if says(group.prompt) else tuple(each for each in chosen if any(says(segment.tokens) for segment in each.segments))


def exported(step: RecordedStep, wanted: RolloutFilter, texts: Texts, place: Place = START) -> Exported:
    """Some rollouts from a place on."""
    made: list[dict[str, Any]] = []
    tokens = 0
    for number, group in enumerate(step.groups[place.group :], place.group):
        for chosen in filtered(msgspec.structs.replace(step, groups=(group,)), wanted, texts):
            head = msgspec.structs.replace(chosen, rollouts=(), failures=())
            whose = shown_group(head, texts).model_dump(exclude={"prompt_texts", "failures", "rollouts"})
            for which in range(place.rollout if number == place.group else 0, len(chosen.rollouts)):
                if tokens > _EXPORT_TOKENS:
                    return Exported(made, Place(number, which))
                rollout = chosen.rollouts[which]
                tokens += _size(msgspec.structs.replace(head, rollouts=(rollout,)))
                # Texts of single tokens would be most of the line, and say nothing that the others do not.
                made.append(whose | shown_rollout(rollout, texts).model_dump(exclude={"segments": {"__all__": {"texts"}}}))
    return Exported(made, None)


def _size(group: RecordedGroup) -> int:
    """In tokens."""
    segments = [segment for rollout in group.rollouts for segment in rollout.segments]
    pieces = len(segments) + len(group.rollouts) + len(group.failures)
    return group.prompt.shape[0] + sum(segment.tokens.shape[0] for segment in segments) + _PIECE_TOKENS * pieces + len(group.messages) // _TOKEN_BYTES


def shown_group(group: RecordedGroup, texts: Texts) -> RolloutGroup:
    """With texts."""
    prompt = group.prompt.numpy().tolist()
    spelled = texts.of(prompt)
    return RolloutGroup(
        group=group.number,
        problem=group.problem,
        prompt_tokens=prompt,
        prompt=spelled.text,
        prompt_texts=spelled.pieces,
        messages=messages_of(group.messages),
        trained=group.dropped is None,
        dropped=group.dropped,
        rollouts=[shown_rollout(rollout, texts) for rollout in group.rollouts],
        failures=[RolloutFailure(**msgspec.structs.asdict(failure)) for failure in group.failures],
    )


def shown_rollout(rollout: RecordedRollout, texts: Texts) -> Rollout:
    """With texts."""
    return Rollout(
        id=rollout.id,
        reward=rollout.reward,
        parts=rollout.parts,
        turns=rollout.turns,
        reason=rollout.reason,
        advantage=_mean_advantage(rollout),
        stopped=rollout.stopped,
        tokens=sampled_tokens(rollout),
        answer=_answer(rollout, texts),
        segments=[_shown_segment(segment, texts) for segment in rollout.segments],
    )


def _shown_segment(segment: RecordedSegment, texts: Texts) -> RolloutSegment:
    tokens = segment.tokens.numpy().tolist()
    spelled, sampled = texts.of(tokens), mask_of(segment.sampled, len(tokens))
    return RolloutSegment(
        after_prompt=segment.after_prompt,
        temperature=segment.temperature,
        text=spelled.text,
        tokens=tokens,
        texts=spelled.pieces,
        sampled=sampled.tolist(),
        logprobs=_spread(segment.logprobs, sampled),
        advantages=_spread(segment.advantages, sampled),
        trained=mask_of(segment.trained, len(tokens)).tolist(),
        versions=list(segment.versions),
        answers=list(segment.answers),
    )


def _spread(numbers: Array | None, sampled: np.ndarray) -> list[float | None]:
    """Those of sampled tokens at their places; what is not finite is none."""
    spread = np.full(len(sampled), np.nan)
    if numbers is not None:
        spread[sampled] = numbers.numpy()
    return [number if math.isfinite(number) else None for number in spread.tolist()]


def _mean_advantage(rollout: RecordedRollout) -> float | None:
    found = [
        advantage
        for segment in rollout.segments
        if segment.advantages is not None
        for advantage in segment.advantages.numpy()[
            mask_of(segment.trained, segment.tokens.shape[0])[mask_of(segment.sampled, segment.tokens.shape[0])]
        ]
    ]
    mean = float(np.mean(found)) if found else math.nan
    return mean if math.isfinite(mean) else None


def _answer(rollout: RecordedRollout, texts: Texts) -> str | None:
    spoken = [segment for segment in rollout.segments if segment.sampled]
    if not spoken:
        return None
    start, stop = spoken[-1].sampled[-1]
    return texts.of(spoken[-1].tokens.numpy()[start : stop - rollout.stopped].tolist()).text
