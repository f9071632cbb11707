"""What runs in the next step: a pure decision over counts of tokens.

A sample of n tokens needs the keys and values of its first n - 1 in the cache (prefill); then every step feeds its last token and gains one
(decode). Keys and values are a function of the weights and of the tokens up to theirs, so nobody computes what lies there already: a newcomer
takes over the longest beginning that it has in common with a sample in the cache, or with one that has left and whose keys were kept.
Who arrives first goes first. When the cache cannot hold all who run, the youngest goes back to the queue and is prefilled again later; that
costs time and changes no token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bloomery.models.attention import KEY_PAD, ROW_PAD, pad_to

LEAST_SHARED = 16
"""Tokens: for fewer a copy is not worth its while, unless they are all that is missing."""


@dataclass(frozen=True, slots=True, eq=False)
class Stem:
    """The beginning of a sequence under one version of the weights: what keys and values are a function of."""

    version: str
    tokens: NDArray[np.int32]
    head: bytes = field(init=False)
    """The first few tokens: stems with different heads are not compared any further."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", self.tokens[:LEAST_SHARED].tobytes())


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A sequence that has left and whose keys and values were kept."""

    stem: Stem


@dataclass(slots=True, eq=False)
class Sample:
    """One sample, as far as planning goes; told apart by identity."""

    request_id: str
    index: int
    """Which of the request's samples."""
    stem: Stem
    """The prompt."""
    length: int
    """Tokens so far, prompt and sampled."""
    reusable: int
    """Leading tokens of the prompt that other requests may have computed: what is asked about those behind them, only computing them tells."""
    cached: int = 0
    """Leading tokens whose keys and values lie in the cache."""
    decodes: bool = True
    """False: it is done when all that it waits for is cached."""
    left: int = 1
    """Last tokens that prefill leaves out: a decode step feeds them, or nobody. 0 where the prefill itself gives the one token that is wanted."""

    @property
    def shared(self) -> int:
        """Leading tokens that all samples of the request have cached alike: the prompt without its last token."""
        return len(self.stem.tokens) - 1

    @property
    def missing(self) -> int:
        """Tokens to prefill."""
        return self.length - self.left - self.cached


class Chunk(NamedTuple):
    """Prefill tokens `start` to `stop` of a sample."""

    sample: Sample
    start: int
    stop: int


class Fork(NamedTuple):
    """Copy the keys and values of the first `tokens` tokens from `source`."""

    sample: Sample
    source: Sample | Kept
    tokens: int


class Plan(NamedTuple):
    """One step, in this order: release `preempt`, place `admit`, copy `found`, prefill, copy `forks`, decode."""

    preempt: tuple[Sample, ...]
    admit: tuple[Sample, ...]
    found: tuple[Fork, ...]
    """From what lay in the cache before."""
    prefill: tuple[Chunk, ...]
    forks: tuple[Fork, ...]
    """From what this step's prefill computes."""
    decode: tuple[Sample, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of one step."""

    slots: int = 64
    """Samples that run together."""
    token_budget: int = 512
    """Tokens that pass through the model in one step: a long prompt is prefilled in chunks beside the rows that decode."""
    cache_tokens: int = 1 << 17
    """Places in the cache: samples that run times the padded length of the longest."""
    kept_tokens: int = 1 << 14
    """Places for keys and values of sequences that have left; 0 keeps none."""

    def __post_init__(self) -> None:
        if self.slots < 1 or self.token_budget < self.slots + 2 * ROW_PAD:
            raise ValueError(f"a token budget of {self.token_budget} leaves no room for prefill beside {self.slots} slots")


def plan_step(waiting: Sequence[Sample], running: Sequence[Sample], limits: Limits, kept: Sequence[Kept] = ()) -> Plan:
    """Decide the next step; both queues in order of arrival, everyone in `running` before everyone in `waiting`."""
    stay = list(running)
    while not fits(stay, limits):
        stay.pop()
    admit: list[Sample] = []
    found: list[Fork] = []
    chunks: list[Chunk] = []
    forks: list[Fork] = []
    decode = [sample for sample in stay if sample.decodes and not sample.missing]
    budget = limits.token_budget - len(decode)
    for sample in [sample for sample in stay if sample.missing] + _newcomers(waiting, stay, running, limits):
        placed = sample in stay
        offer = None if placed or budget < 1 else _best_offer(sample, stay, chunks, kept)
        start = sample.cached if offer is None else offer.tokens
        needed = sample.length - sample.left
        tokens = 0 if offer is not None and offer.when == _LATER else _affordable(needed - start, budget)
        if budget < 1 or start + tokens == sample.cached < needed or (offer is not None and offer.when == _NOT_YET):
            break
        if not placed:
            admit.append(sample)
        if offer is not None:
            (found if offer.when == _NOW else forks).append(Fork(sample, offer.source, offer.tokens))
        if tokens:
            chunks.append(Chunk(sample, start, start + tokens))
        if sample.decodes and start + tokens == needed:
            decode.append(sample)
        budget -= tokens + 1
    return Plan(tuple(running[len(stay) :]), tuple(admit), tuple(found), tuple(chunks), tuple(forks), tuple(decode))


def in_common(first: Stem, second: Stem) -> int:
    """Leading tokens with the same keys and values; 0 as soon as the heads differ."""
    if first is second:
        return len(first.tokens)
    if first.version != second.version or first.head != second.head:
        return 0
    size = min(len(first.tokens), len(second.tokens))
    differs = first.tokens[:size] != second.tokens[:size]
    return int(differs.argmax()) if differs.any() else size


def key_length(samples: Sequence[Sample]) -> int:
    """Keys that a step of these samples looks at: their greatest length, padded."""
    return pad_to(max(sample.length for sample in samples), KEY_PAD)


def fits(samples: Sequence[Sample], limits: Limits) -> bool:
    """Whether the cache holds all of them; one alone always may run."""
    if len(samples) <= 1:
        return True
    return len(samples) <= limits.slots and len(samples) * key_length(samples) <= limits.cache_tokens


def _newcomers(waiting: Sequence[Sample], stay: list[Sample], running: Sequence[Sample], limits: Limits) -> list[Sample]:
    """The head of the queue that fits beside those who stay; nobody, when someone had to leave."""
    if len(stay) < len(running):
        return []
    count = 0
    while count < len(waiting) and fits([*stay, *waiting[: count + 1]], limits):
        count += 1
    return list(waiting[:count])


_NOT_YET, _LATER, _NOW = range(3)


class _Offer(NamedTuple):
    """A beginning that need not be computed. It lies there now, or after the prefill of this step, or whoever computes it is not that far yet."""

    tokens: int
    when: int
    source: Sample | Kept


def _best_offer(sample: Sample, stay: Sequence[Sample], chunks: Sequence[Chunk], kept: Sequence[Kept]) -> _Offer | None:
    """The longest beginning that is worth a copy, or worth waiting for: its prefill takes the budget of the steps until it is there."""
    best = max(_offers(sample, stay, chunks, kept), key=lambda offer: offer[:2], default=None)
    return best if best is not None and best.tokens else None


def _offers(sample: Sample, stay: Sequence[Sample], chunks: Sequence[Chunk], kept: Sequence[Kept]) -> Iterator[_Offer]:
    reached = {chunk.sample: chunk.stop for chunk in chunks}
    for other in dict.fromkeys([*stay, *reached]):
        # What a sibling has cached is answered for: it was computed under the same limit.
        limit = sample.shared if other.request_id == sample.request_id else sample.reusable
        tokens = _worthwhile(min(in_common(sample.stem, other.stem), other.shared), limit)
        yield _Offer(tokens, _NOW if other.cached >= tokens else _LATER if reached.get(other, 0) >= tokens else _NOT_YET, other)
    for each in kept:
        yield _Offer(_worthwhile(in_common(sample.stem, each.stem), sample.reusable), _NOW, each)


def _worthwhile(tokens: int, limit: int) -> int:
    """What is taken over of so many tokens: up to the limit, and not too few of it."""
    return min(tokens, limit) if tokens >= min(limit, LEAST_SHARED) else 0


def _affordable(missing: int, budget: int) -> int:
    """Tokens of a chunk: all that is missing when its first decode row fits too, else whole row pads."""
    return missing if missing < budget else max(0, (budget - 1) // ROW_PAD * ROW_PAD)
