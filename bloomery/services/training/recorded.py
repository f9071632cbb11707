"""Recorded steps as bytes: checked when they come in, summed up, compressed, and read again. Pure: no database, no disk."""

import json
import math
from collections.abc import Sequence
from itertools import chain, pairwise
from statistics import fmean
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import zstandard
from blake3 import blake3

from bloomery.types.arrays import Array
from bloomery.types.errors import Corrupt, InvalidInput, TooLarge
from bloomery.types.rollouts import MAX_STEP_BYTES, RecordedGroup, RecordedRollout, RecordedSegment, RecordedStep
from bloomery.types.wire import encode

_decoder: Final[msgspec.msgpack.Decoder[RecordedStep]] = msgspec.msgpack.Decoder(RecordedStep)
_MAX_ROLLOUTS: Final = 1 << 16
"""Of a step, and as many failures: a page of them is made at once."""
_MAX_SEGMENTS: Final = 4096
_MAX_NUMBERS: Final = 256
"""Parts of a reward."""


class Packed(NamedTuple):
    """A step as it is kept: `values` are those of its row."""

    values: dict[str, Any]
    blob: bytes


def pack(body: bytes) -> Packed:
    """What a caller sends, checked; InvalidInput says what is wrong with it."""
    if len(body) > MAX_STEP_BYTES:
        raise TooLarge(f"the step has {len(body)} bytes, and {MAX_STEP_BYTES} are kept: leave groups out, and count them in `left_out`", field="body")
    try:
        step = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is no `RecordedStep`: {error}", field="body") from None
    _check(step)
    # Equal steps are equal here, in whatever order a caller writes their fields.
    plain = encode(step)
    blob = zstandard.compress(plain)
    return Packed(_summary(step) | {"hash": blake3(plain).hexdigest(), "size_bytes": len(blob)}, blob)


def unpack(blob: bytes, digest: str) -> RecordedStep:
    """The step of that hash; Corrupt where the bytes are another."""
    try:
        plain = zstandard.ZstdDecompressor().decompress(blob, max_output_size=2 * MAX_STEP_BYTES)
        if blake3(plain).hexdigest() != digest:
            raise Corrupt("its bytes are not those that were written")
        return _decoder.decode(plain)
    except (zstandard.ZstdError, msgspec.MsgspecError, ValueError, RecursionError) as error:
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


def _check(step: RecordedStep) -> None:
    numbers = [group.number for group in step.groups]
    if len(set(numbers)) < len(numbers):
        raise InvalidInput("two groups have the same number", field="groups")
    if sum(len(group.rollouts) + len(group.failures) for group in step.groups) > _MAX_ROLLOUTS:
        raise InvalidInput(f"the step has more than {_MAX_ROLLOUTS} rollouts and failures", field="groups")
    for place, group in enumerate(step.groups):
        try:
            _check_group(group)
        except ValueError as problem:
            raise InvalidInput(f"group {group.number}: {problem}", field=f"groups.{place}") from None


def _check_group(group: RecordedGroup) -> None:
    _check_tokens("prompt", group.prompt)
    if group.messages is not None:
        try:
            json.dumps(group.messages, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"`messages` are not JSON: {error}") from None
    for rollout in group.rollouts:
        numbers = [*rollout.parts.values(), *rollout.turns.values(), *([] if rollout.reward is None else [rollout.reward])]
        if not all(map(math.isfinite, numbers)):
            raise ValueError(f"rollout `{rollout.id}` has a reward that is not finite")
        if len(numbers) > _MAX_NUMBERS + _MAX_SEGMENTS or len(rollout.segments) > _MAX_SEGMENTS:
            raise ValueError(f"rollout `{rollout.id}` has too many parts or segments")
        for segment in rollout.segments:
            try:
                _check_segment(segment)
            except ValueError as problem:
                raise ValueError(f"rollout `{rollout.id}`: {problem}") from None


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
    if any(later < earlier for earlier, later in pairwise(ends)):
        raise ValueError(f"`{name}` is not spans of places from 0 to {most}, one behind the other")
    return sum(stop - start for start, stop in spans)


def mask_of(spans: Sequence[tuple[int, int]], tokens: int) -> np.ndarray:
    """bool [N]: what is in them."""
    mask = np.zeros(tokens, dtype=bool)
    for start, stop in spans:
        mask[start:stop] = True
    return mask
