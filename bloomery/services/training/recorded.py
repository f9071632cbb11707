"""Recorded steps as bytes: checked when they come in, summed up, compressed, and read again. Pure: no database, no disk."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from statistics import fmean
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import zstandard
from blake3 import blake3
from msgspec import Meta, Raw

from bloomery.types.arrays import Array
from bloomery.types.errors import Corrupt, InvalidInput, TooLarge
from bloomery.types.rollouts import (
    MAX_ATTEMPTS,
    MAX_GROUPS,
    MAX_REWARD,
    MAX_SEGMENTS,
    MAX_STEP_ATTEMPTS,
    MAX_STEP_BYTES,
    MAX_STEP_SPANS,
    RecordedGroup,
    RecordedRollout,
    RecordedSegment,
    RecordedStep,
    messages_of,
)
from bloomery.types.wire import encode


class _Rollout(RecordedRollout, frozen=True, kw_only=True):
    segments: Annotated[tuple[Raw, ...], Meta(max_length=MAX_SEGMENTS)]  # type: ignore[assignment]


class _Group(RecordedGroup, frozen=True, kw_only=True):
    rollouts: Annotated[tuple[Raw, ...], Meta(max_length=MAX_ATTEMPTS)]  # type: ignore[assignment]


class _Step(RecordedStep, frozen=True, kw_only=True):
    groups: Annotated[tuple[Raw, ...], Meta(max_length=MAX_GROUPS)]  # type: ignore[assignment]


_decoder: Final = msgspec.msgpack.Decoder(RecordedStep)
# The same piece by piece: what a body becomes in memory is known before it is there.
_step: Final = msgspec.msgpack.Decoder(_Step)
_group: Final = msgspec.msgpack.Decoder(_Group)
_rollout: Final = msgspec.msgpack.Decoder(_Rollout)
_segment: Final = msgspec.msgpack.Decoder(RecordedSegment)
_MAX_PLAIN_BYTES: Final = 2 * MAX_STEP_BYTES
"""Of a step that is kept: what its sender left out is written there."""

T = TypeVar("T")


class Packed(NamedTuple):
    """A step as it is kept: `values` are those of its row."""

    values: dict[str, Any]
    blob: bytes


def pack(body: bytes) -> Packed:
    """What a caller sends, checked; InvalidInput says what is wrong with it."""
    if len(body) > MAX_STEP_BYTES:
        raise TooLarge(f"the step has {len(body)} bytes, and {MAX_STEP_BYTES} are kept: leave groups out, and count them in `left_out`", field="body")
    _check(body)
    step = _decoder.decode(body)
    # Equal steps are equal here, in whatever order a caller writes their fields.
    plain = encode(step)
    blob = zstandard.compress(plain)
    return Packed(_summary(step) | {"hash": blake3(plain).hexdigest(), "size_bytes": len(blob)}, blob)


def unpack(blob: bytes, digest: str) -> RecordedStep:
    """The step of that hash; Corrupt where the bytes are another."""
    try:
        # A frame that tells its size is given as much memory, whatever the limit.
        if zstandard.frame_content_size(blob) > _MAX_PLAIN_BYTES:
            raise Corrupt(f"it says that it has more than {_MAX_PLAIN_BYTES} bytes")
        plain = zstandard.ZstdDecompressor().decompress(blob, max_output_size=_MAX_PLAIN_BYTES)
        if blake3(plain).hexdigest() != digest:
            raise Corrupt("its bytes are not those that were written")
        return _decoder.decode(plain)
    except (zstandard.ZstdError, msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise Corrupt(f"its bytes cannot be read ({type(error).__name__})") from None


def _summary(step: RecordedStep) -> dict[str, Any]:
    rollouts = [rollout for group in step.groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return {
        "groups": len(step.groups),
        "left_out": step.left_out,
        "rollouts": len(rollouts),
        "failures": sum(len(group.failures) for group in step.groups),
        "tokens": sum(sampled_tokens(rollout) for rollout in rollouts),
        "reward_mean": fmean(rewards) if rewards else None,
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
    }


def sampled_tokens(rollout: RecordedRollout) -> int:
    """How many there are."""
    return sum(len(segment.logprobs.data) // 4 for segment in rollout.segments)


def _check(body: bytes) -> None:
    try:
        groups = _decoded(_step, body).groups
    except ValueError as problem:
        raise InvalidInput(f"the body is no `RecordedStep`: {problem}", field="body") from None
    numbers: set[int] = set()
    sizes: Counter[str] = Counter()
    for place, raw in enumerate(groups):
        try:
            group = _decoded(_group, raw)
            _check_group(group, sizes)
        except ValueError as problem:
            raise InvalidInput(f"group {place} of the body: {problem}", field=f"groups.{place}") from None
        if group.number in numbers:
            raise InvalidInput("two groups have the same number", field="groups")
        numbers.add(group.number)


def _decoded(decoder: msgspec.msgpack.Decoder[T], raw: bytes | Raw) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is malformed: {error}") from None


def _check_group(group: _Group, sizes: Counter[str]) -> None:
    """`sizes` are those of the step so far."""
    _check_tokens("prompt", group.prompt)
    messages_of(group.messages)
    _count(sizes, "rollouts and failures", len(group.rollouts) + len(group.failures), MAX_STEP_ATTEMPTS)
    for place, raw in enumerate(group.rollouts):
        try:
            _check_rollout(_decoded(_rollout, raw), sizes)
        except ValueError as problem:
            raise ValueError(f"rollout {place}: {problem}") from None


def _check_rollout(rollout: _Rollout, sizes: Counter[str]) -> None:
    rewards = [*rollout.parts.values(), *rollout.turns.values(), *([] if rollout.reward is None else [rollout.reward])]
    # None of these comparisons is true of what is no number.
    if not all(abs(reward) <= MAX_REWARD for reward in rewards):
        raise ValueError(f"it has a reward that is not finite or further than {MAX_REWARD:g} from 0")
    _count(sizes, "rewards with parts and turns", len(rewards), MAX_STEP_SPANS)
    _count(sizes, "segments", len(rollout.segments), MAX_STEP_ATTEMPTS)
    for raw in rollout.segments:
        _check_segment(segment := _decoded(_segment, raw))
        spans = (segment.sampled, segment.trained, segment.versions, segment.answers)
        _count(sizes, "spans", sum(map(len, spans)), MAX_STEP_SPANS)


def _count(sizes: Counter[str], what: str, more: int, most: int) -> None:
    sizes[what] += more
    if sizes[what] > most:
        raise ValueError(f"with it the step has more than {most} {what}: leave groups out, and count them in `left_out`")


def _check_segment(segment: RecordedSegment) -> None:
    tokens = _check_tokens("tokens", segment.tokens)
    sampled = _check_spans("sampled", segment.sampled, tokens)
    for name, spans in (("trained", segment.trained), ("versions", segment.versions), ("answers", segment.answers)):
        _check_spans(name, [span[:2] for span in spans], tokens)
    for name, numbers in (("logprobs", segment.logprobs), ("advantages", segment.advantages)):
        if numbers is not None and (numbers.dtype != "float32" or numbers.shape != (sampled,)):
            raise ValueError(f"`{name}` is {numbers.dtype}{list(numbers.shape)}, and {sampled} tokens were sampled: give a float32 for each")
    if any(len(name) > 256 for _, _, name in chain(segment.versions, segment.answers)):
        raise ValueError("a version or an answer has a name of more than 256 characters")
    if not math.isfinite(segment.temperature):
        raise ValueError("`temperature` is not finite")


def _check_tokens(name: str, tokens: Array) -> int:
    if tokens.dtype != "int32" or len(tokens.shape) != 1:
        raise ValueError(f"`{name}` is {tokens.dtype}{list(tokens.shape)}, and token ids are int32 [N]")
    if bool((tokens.numpy() < 0).any()):
        raise ValueError(f"`{name}` has an id below 0")
    return int(tokens.shape[0])


def _check_spans(name: str, spans: Sequence[tuple[int, int]], most: int) -> int:
    """How many tokens are in them."""
    ends = [0, *chain.from_iterable(spans), most]
    if any(later < earlier for earlier, later in pairwise(ends)) or any(start == stop for start, stop in spans):
        raise ValueError(f"`{name}` is not spans of places from 0 to {most}, one behind the other and none of them empty")
    return sum(stop - start for start, stop in spans)


def mask_of(spans: Sequence[tuple[int, int]], tokens: int) -> np.ndarray:
    """bool [N]: what is in them."""
    mask = np.zeros(tokens, dtype=bool)
    for start, stop in spans:
        mask[start:stop] = True
    return mask
