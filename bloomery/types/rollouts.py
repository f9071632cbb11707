"""The rollouts of a training step: as whoever trains records them, and as they are shown.

`Recorded*` travel as msgpack and lie so on the disk; numbers of tokens are arrays. The resources below them are the same with what tokens say.
Places are those of a segment's [N] tokens, from 0; a span is from one of them to before another.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw, field
from pydantic import Field

from bloomery.types.arrays import Array
from bloomery.types.histograms import Histogram
from bloomery.types.resources import Resource
from bloomery.types.wire import Wire, encode

MAX_STEP_BYTES: Final = 16 << 20
"""Of a step as msgpack: more than a million tokens."""
MAX_REASON_CHARS: Final = 4096
"""Of what a grader says of one rollout, or why an attempt failed."""
MAX_STEP: Final = (1 << 31) - 1
# Bytes that are small and become large in memory are what the other limits are for.
MAX_GROUPS: Final = 4096
"""Of a step."""
MAX_ATTEMPTS: Final = 1024
"""Rollouts of a group, and as many failures."""
MAX_SEGMENTS: Final = 4096
"""Of a rollout."""
MAX_SPANS: Final = 1 << 16
"""Of a segment, of each kind."""
MAX_PARTS: Final = 256
"""Of a reward."""
MAX_TURNS: Final = 4096
"""Rewards of single answers of a rollout."""
MAX_REWARD: Final = 1e100
"""Either way, of parts and turns too: sums and means of such are finite."""
MAX_STEP_ATTEMPTS: Final = 1 << 16
"""Rollouts and failures of a step, and its segments."""
MAX_STEP_SPANS: Final = 1 << 18
"""Of all segments of a step, and as many rewards with parts and turns."""
MAX_MESSAGES_BYTES: Final = 256 << 10
"""Of a group, as msgpack."""
MAX_MESSAGES: Final = 1024
MAX_LEVELS: Final = 32
"""Of what is in a message: JSON that is much deeper is not written by everyone."""

Dropped = Literal["zero_variance", "too_small"]
"""Why a group is not in the batch: its members were all rewarded alike, or too many of them failed."""
Span = tuple[int, int]
NamedSpan = tuple[int, int, str]
_Name = Annotated[str, Meta(max_length=256)]
_Said = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
_Count = Annotated[int, Meta(ge=0, le=MAX_STEP)]
_Spans = Annotated[tuple[Span, ...], Meta(max_length=MAX_SPANS)]
_NamedSpans = Annotated[tuple[NamedSpan, ...], Meta(max_length=MAX_SPANS)]

NO_MESSAGES: Final = Raw(b"\xc0")


class RecordedSegment(Wire, frozen=True):
    """[N] tokens in a row, of which [S] were sampled."""

    tokens: Array
    """int32 [N]."""
    sampled: _Spans
    """No span is empty, here and below."""
    logprobs: Array
    """float32 [S]: as they were served."""
    advantages: Array | None = None
    """float32 [S], before the batch's mean is taken; None where the group is not in it."""
    trained: _Spans = ()
    """Sampled tokens that count in the batch."""
    versions: _NamedSpans = ()
    """Of the weights that sampled tokens are of."""
    answers: _NamedSpans = ()
    """Of an agent: which of its answers sampled tokens belong to."""
    after_prompt: bool = False
    """Whether the prompt of the group stands before its tokens."""
    temperature: float = 1.0


class RecordedRollout(Wire, frozen=True):
    """One rollout that came to an end."""

    id: _Name
    segments: Annotated[tuple[RecordedSegment, ...], Meta(max_length=MAX_SEGMENTS)]
    stopped: bool
    """By an end token; otherwise its length cut it off."""
    reward: float | None = None
    """None where nobody rewards."""
    parts: Annotated[dict[_Name, float], Meta(max_length=MAX_PARTS)] = field(default_factory=dict)
    turns: Annotated[dict[_Name, float], Meta(max_length=MAX_TURNS)] = field(default_factory=dict)
    """Rewards of single answers."""
    reason: _Said | None = None
    """What the grader says of it."""


class RecordedFailure(Wire, frozen=True):
    """An attempt at a rollout that failed; `final` where there was no further one."""

    id: _Name
    kind: _Name
    message: _Said
    final: bool


class RecordedGroup(Wire, frozen=True):
    """The rollouts of one problem."""

    number: Annotated[int, Meta(ge=0, lt=1 << 53)]
    problem: _Name
    prompt: Array
    """int32 [P]; of agents, which ask in their own words, it may be empty."""
    rollouts: Annotated[tuple[RecordedRollout, ...], Meta(max_length=MAX_ATTEMPTS)]
    failures: Annotated[tuple[RecordedFailure, ...], Meta(max_length=MAX_ATTEMPTS)] = ()
    dropped: Dropped | None = None
    messages: Raw = NO_MESSAGES
    """The prompt as a conversation, where it was one: as `packed_messages` gives them, for `messages_of`."""


class RecordedStep(Wire, frozen=True):
    """What a step was trained on, and what it left out."""

    groups: Annotated[tuple[RecordedGroup, ...], Meta(max_length=MAX_GROUPS)]
    left_out: _Count = 0
    """Groups that are not here, because there is no room for them."""


_messages: Final = msgspec.msgpack.Decoder(Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None)


def packed_messages(said: Sequence[Mapping[str, Any]] | None) -> Raw:
    """As a group has them; ValueError where it may not."""
    try:
        packed = Raw(encode(None if said is None else [dict(message) for message in said]))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"`messages` are not JSON: {error}") from None
    messages_of(packed)
    return packed


def messages_of(packed: Raw) -> list[dict[str, Any]] | None:
    """What a group has of them, each an object of JSON; ValueError where it is something else, or too much of it."""
    # An empty object is one byte here, and 72 when it is read.
    if len(packed) > MAX_MESSAGES_BYTES:
        raise ValueError(f"`messages` have {len(packed)} bytes, and {MAX_MESSAGES_BYTES} are kept: leave them out")
    try:
        messages: list[dict[str, Any]] | None = _messages.decode(packed)
        _check_levels(messages or [])
        json.dumps(messages, allow_nan=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, RecursionError) as error:
        raise ValueError(f"`messages` are not JSON: {error}") from None
    return messages


def _check_levels(values: list[Any]) -> None:
    for _ in range(MAX_LEVELS):
        nested = [value.values() if isinstance(value, dict) else value for value in values if isinstance(value, (dict, list))]
        values = [inner for value in nested for inner in value]
        if not values:
            return
    raise ValueError(f"`messages` are nested more than {MAX_LEVELS} levels deep")


def fitting(groups: Iterable[RecordedGroup], max_bytes: int = MAX_STEP_BYTES) -> RecordedStep:
    """A step with as many of the groups as there is room for, in their order; the others are counted."""
    kept: list[RecordedGroup] = []
    left, left_out = max_bytes - len(encode(RecordedStep(groups=(), left_out=MAX_STEP))) - 8, 0
    for group in groups:
        size = len(encode(group))
        if size > left:
            left_out += 1
            continue
        kept.append(group)
        left -= size
    return RecordedStep(groups=tuple(kept), left_out=left_out)


class RolloutStep(Resource):
    """A step whose rollouts are kept."""

    run: str
    step: int
    groups: int
    left_out: int
    """Groups that had no room."""
    rollouts: int
    failures: int
    """Attempts that failed."""
    tokens: int
    """Sampled ones."""
    reward_mean: float | None
    """Of all rollouts that are kept, trained or not; None where none has a reward."""
    reward_min: float | None
    reward_max: float | None
    size_bytes: int
    """On the disk."""
    created_us: int


class RolloutSegment(Resource):
    """[N] tokens in a row; what is not `sampled` was put between by tools, users and the template."""

    after_prompt: bool
    """Whether the prompt of the group stands before them."""
    temperature: float
    text: str | None
    """None where this server has no tokenizer of the run's base model any more; so with all texts."""
    tokens: list[int]
    texts: list[str] | None
    """Of each token; together they are the text. A character of several tokens is with the last of them."""
    sampled: list[bool]
    logprobs: list[float | None]
    """None where a token was not sampled."""
    advantages: list[float | None]
    """Before the batch's mean is taken; None where a token was not sampled, or its group is not in the batch."""
    trained: list[bool]
    """The loss mask: which tokens count in the batch."""
    versions: list[NamedSpan]
    answers: list[NamedSpan]


class RolloutFailure(Resource):
    """An attempt at a rollout that failed."""

    id: str
    kind: str
    message: str
    final: bool


class Rollout(Resource):
    """One rollout."""

    id: str
    reward: float | None
    parts: dict[str, float]
    turns: dict[str, float]
    """Rewards of single answers of an agent."""
    reason: str | None
    """What the grader says of it."""
    advantage: float | None
    """Mean over its trained tokens."""
    stopped: bool
    """By an end token; otherwise its length cut it off."""
    tokens: int
    """Sampled ones."""
    answer: str | None
    """What was said last, without its end token."""
    segments: list[RolloutSegment]


class RolloutGroup(Resource):
    """The rollouts of one problem, in the order in which they were made; those that a filter leaves."""

    group: int
    problem: str
    prompt_tokens: list[int]
    prompt: str | None
    prompt_texts: list[str] | None
    messages: list[dict[str, Any]] | None
    trained: bool
    dropped: Dropped | None
    """Why it is not trained."""
    rollouts: list[Rollout]
    failures: list[RolloutFailure]


class RolloutPage(Resource):
    """Some groups of a step; ask for the next with `offset` plus the length of `data`. Of long rollouts a page has fewer than were asked for."""

    step: RolloutStep
    rewards: Histogram | None
    """Of all rollouts of the step, whatever is filtered, and likewise `lengths` in sampled tokens; None where none has a reward."""
    lengths: Histogram | None
    data: list[RolloutGroup]
    offset: int
    has_more: bool


class RolloutFilter(Resource):
    """Which rollouts are wanted: those to which all of it applies. Groups without any are left out."""

    min_reward: float | None = Field(default=None, allow_inf_nan=False)
    max_reward: float | None = Field(default=None, allow_inf_nan=False)
    trained: bool | None = None
    """Whether their group is in the batch."""
    search: str | None = Field(default=None, min_length=1, max_length=1024)
    """In the prompt or in what was said, whatever the case."""
    group: int | None = Field(default=None, ge=0, lt=1 << 53)
