"""What runs in the next step: a pure decision over counts of tokens.

A sample of n tokens needs the keys and values of its first n - 1 in the cache (prefill); then every step feeds its last token and gains one
(decode). Keys and values are a function of the weights and of the tokens up to theirs, so nobody computes what lies there already: a newcomer
takes over the longest beginning that it has in common with a sample in the cache, or with one that has left and whose keys were kept. Room is counted
in blocks, and a block that several begin with is counted once.
Within a class who arrives first goes first; production goes before rollouts and those before evaluation, but for a floor of each class: so many
places, and so many tokens of each step's prefill, that no other class takes while one of its own wants them. While a class decodes, those behind it
prefill little in a step, because a step is as long as the gap between its tokens. Whoever has a place beyond the floor
of his class makes room for a class before his, and when the cache cannot hold all who run, the last in that order go back to the queue and are
prefilled again later; that costs time and changes no token. What a draft guesses of a sample is prefilled behind its tokens, and what comes of it is
for others to say: the sample decodes when nothing is guessed any more. Where few decode, a step also feeds some tokens that may come behind the last
one of a sample (`retrace`), within the blocks that it has. Who waits for more room than there is lets those of classes before his pass,
as many as have places together; then nobody passes any more, or a steady load of short requests would keep the room that a long one waits for.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import Final, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from bloomery.infer.blocks import blocks_for
from bloomery.infer.retrace import whole_width
from bloomery.models.pads import BLOCK_PLACES, ROW_PAD
from bloomery.types.generation import Priority

CLASSES: Final[tuple[Priority, ...]] = get_args(Priority)
"""The first goes first."""
_FLOOR: Final[dict[Priority, int]] = {"production": 2, "rollout": 4, "evaluation": 8}
"""A class is sure of one place in so many."""
_PREFILL_FLOOR: Final = 8
"""And of one token in so many of what a step prefills."""
_PREFILL_BESIDE: Final = 4
"""All classes behind one that decodes prefill one token in so many of what a step could."""
_LEAST_PREFILL: Final = 2 * ROW_PAD
LEAST_SHARED = 16
"""Tokens: for fewer a copy is not worth its while, unless they are all that is missing."""
_FEW_ROWS: Final = 16
"""Of a decode step. Up to so many another row takes a fraction of the time of another step, with more of them about its share."""
_ENDLESS: Final = sys.maxsize
"""Tokens of a chunk that is as long as any sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class Stem:
    """The beginning of a sequence under one version of the weights: what keys and values are a function of."""

    version: str
    tokens: NDArray[np.int32]
    head: bytes = field(init=False)
    """The first few tokens: stems with different heads are not compared any further."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", self.tokens[:LEAST_SHARED].tobytes())


class Stretch(NamedTuple):
    """Leading tokens of a sequence, `first` to `last`, behind which one can go on: the states behind `first` are known, and the rows since.

    In a model without states it is all of what is cached, from 0 on.
    """

    first: int
    last: int


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A sequence that has left and whose keys and values were kept."""

    stem: Stem
    stretches: tuple[Stretch, ...]
    """Where one can go on."""


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
    priority: Priority = "rollout"
    drafted: int = 0
    """Tokens behind those that its draft guesses and prefill feeds too; every one that is drawn as guessed becomes one of `length`."""
    ahead: int = 0
    """Tokens that may be guessed behind its last and fed by a decode step, within the blocks that it has anyway."""
    passed: int = 0
    """Samples of classes before its own that got places while it waited for room, and the times that it was sent back."""
    blocks: list[int] = field(default_factory=list)
    """Of the cache, in the order of its tokens. Those that it begins with may be others' too."""

    @property
    def shared(self) -> int:
        """Leading tokens that all samples of the request have cached alike: the prompt without its last token."""
        return len(self.stem.tokens) - 1

    @property
    def needed(self) -> int:
        """Tokens that prefill caches. The last one that is guessed gives a token without a decode step."""
        return self.length + self.drafted if self.drafted else self.length - self.left

    @property
    def missing(self) -> int:
        """Tokens to prefill."""
        return self.needed - self.cached

    @property
    def reach(self) -> int:
        """Places that it takes."""
        return self.length + self.drafted


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
    ahead: tuple[int, ...]
    """Of each of those the tokens that are guessed, and fed behind its last."""
    passed: tuple[Sample, ...]
    """Who finds no room, once for each of those in `admit` that passes him, and who is sent back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of one step."""

    slots: int = 64
    """Samples that run together."""
    token_budget: int = 512
    """Tokens that pass through the model in one step: a long prompt is prefilled in chunks beside the rows that decode."""
    cache_tokens: int = 1 << 17
    """Places in the cache, for those who run and for what is kept."""
    kept_tokens: int = 1 << 14
    """How many of them sequences that have left may take, as long as nobody who runs needs them; 0 keeps none."""
    chunk_rows: int = _ENDLESS
    """Tokens of a chunk: one goes on anywhere in that in which a sequence stands. Without states all of a sequence is one."""
    state_tokens: int = 0
    """Places that the states of a sample count as, whatever its length."""

    def __post_init__(self) -> None:
        if self.slots < 1 or self.token_budget < self.slots + len(CLASSES) * _LEAST_PREFILL:
            raise ValueError(f"a token budget of {self.token_budget} leaves no room for prefill beside {self.slots} slots")

    @property
    def blocks(self) -> int:
        """Of the cache."""
        return self.cache_tokens // BLOCK_PLACES

    def floor(self, priority: Priority) -> int:
        """Places that a class is sure of: at least one, even where there are not as many."""
        return max(1, self.slots // _FLOOR[priority])


def plan_step(waiting: Sequence[Sample], running: Sequence[Sample], limits: Limits, kept: Sequence[Kept] = ()) -> Plan:
    """Decide the next step; in both queues each class is in order of arrival, those in `running` before those in `waiting`."""
    places = _places(waiting, running, limits, kept)
    step = _Step(places.stay, kept, limits.chunk_rows)
    wanting = [*(sample for sample in places.stay if sample.missing), *places.newcomers]
    queues = {priority: queue for priority in CLASSES if (queue := [sample for sample in wanting if sample.priority == priority])}
    ahead = _ahead(step.decode, min(_FEW_ROWS, limits.slots))
    budget = limits.token_budget - len(step.decode) - sum(ahead)
    floor = max(_LEAST_PREFILL, budget // _PREFILL_FLOOR)
    beside = budget // _PREFILL_BESIDE
    decoding = [CLASSES.index(sample.priority) for sample in step.decode]
    for others, (priority, queue) in zip(reversed(range(len(queues))), queues.items(), strict=True):
        if any(rank < CLASSES.index(priority) for rank in decoding):
            budget = min(budget, max(beside, (others + 1) * floor))
        budget -= step.serve(queue, budget - others * floor)
    leave = tuple(sample for sample in running if sample not in step.stay)
    passed = (waits for sample, waits in places.passing if sample in step.admit)
    begun = (0,) * (len(step.decode) - len(ahead))
    decode = tuple(step.decode), (*ahead, *begun)
    return Plan(leave, tuple(step.admit), tuple(step.found), tuple(step.prefill), tuple(step.forks), *decode, (*passed, *leave))


def _ahead(decode: Sequence[Sample], most_rows: int) -> tuple[int, ...]:
    """Guesses of each of those who decode, if there are few; but for him for whose rows somebody of a class before his would wait."""
    first = min((CLASSES.index(sample.priority) for sample in decode), default=0)
    wanting = [sample.ahead if CLASSES.index(sample.priority) == first else 0 for sample in decode]
    left, others, found = max(0, most_rows - len(decode)), sum(wanted > 0 for wanted in wanting), []
    for wanted in wanting:
        own = whole_width(min(wanted, left // others)) if wanted else 0
        left, others = left - own, others - (wanted > 0)
        found.append(own)
    return tuple(found)


class _Step:
    """A plan in the making."""

    def __init__(self, stay: Sequence[Sample], kept: Sequence[Kept], chunk_rows: int) -> None:
        self.stay = dict.fromkeys(stay)
        self.admit: list[Sample] = []
        self.found: list[Fork] = []
        self.prefill: list[Chunk] = []
        self.forks: list[Fork] = []
        self.decode = [sample for sample in stay if sample.decodes and not sample.missing]
        self._kept, self._chunk_rows = kept, chunk_rows

    def serve(self, queue: Sequence[Sample], budget: int) -> int:
        """Prefill for one class in its order, as far as the budget goes; returns what of it is spent."""
        left = budget
        for sample in queue:
            placed = sample in self.stay
            offer = None if placed or left < 1 else self._best_offer(sample)
            start = sample.cached if offer is None else offer.tokens
            needed = sample.needed
            tokens = 0 if offer is not None and offer.when == _When.PREFILLED else self._whole(sample, start, _affordable(needed - start, left))
            if left < 1 or start + tokens == sample.cached < needed or (offer is not None and offer.when == _When.NOT_YET):
                break
            if not placed:
                self.admit.append(sample)
            if offer is not None:
                (self.found if offer.when == _When.NOW else self.forks).append(Fork(sample, offer.source, offer.tokens))
            if tokens:
                self.prefill.append(Chunk(sample, start, start + tokens))
            if sample.decodes and not sample.drafted and start + tokens == needed:
                self.decode.append(sample)
            left -= tokens + 1
        return budget - left

    def _best_offer(self, sample: Sample) -> "_Offer | None":
        """The longest beginning that is worth a copy, or worth waiting for: its prefill takes the budget of the steps until it is there."""
        # Of siblings one computes, and answers for it, also where it has only been placed in this step and begins in the next.
        others = [*self.stay, *(other for other in self.admit if other.request_id == sample.request_id)]
        return max(_offers(sample, others, self.prefill, self._kept, self._chunk_rows), key=lambda offer: offer[:2], default=None)

    def _whole(self, sample: Sample, start: int, tokens: int) -> int:
        """Not beyond the chunk in which the prompt ends, before all of the prompt is there: siblings begin in it."""
        rows, shared = self._chunk_rows, sample.shared
        return shared - start if start < shared and (start + tokens) // rows > shared // rows else tokens


def in_common(first: Stem, second: Stem) -> int:
    """Leading tokens with the same keys and values; 0 as soon as the heads differ."""
    if first is second:
        return len(first.tokens)
    if first.version != second.version or first.head != second.head:
        return 0
    size = min(len(first.tokens), len(second.tokens))
    differs = first.tokens[:size] != second.tokens[:size]
    return int(differs.argmax()) if differs.any() else size


def blocks_of(samples: Sequence[Sample], limits: Limits) -> int:
    """Blocks that placed samples have, with those that their states count as."""
    return len(set[int]().union(*(sample.blocks for sample in samples))) + len(samples) * blocks_for(limits.state_tokens)


class _Room:
    """The cache, as samples are given places in it one after the other.

    First each is counted as if it had all of its blocks for itself, which takes no time; only where they do not fit like that, what several have in
    common is counted once, and of a newcomer what he will take over from one of them is not counted at all.
    """

    def __init__(self, limits: Limits, kept: Sequence[Kept]) -> None:
        self._limits, self._kept = limits, kept
        self._states = blocks_for(limits.state_tokens)
        self._inside: list[tuple[Sample, bool]] = []
        """And whether they had a place before."""
        self._blocks = 0
        """At most so many are taken."""
        self._known: set[int] | None = None
        """Those that have numbers by now, as soon as it matters."""

    def take(self, sample: Sample, *, placed: bool) -> bool:
        """Whether there is room for one more, who has it from then on; one alone always may run."""
        if len(self._inside) >= self._limits.slots:
            return False
        if self._inside and self._blocks + self._needs(sample, placed) > self._limits.blocks:
            if self._known is not None:
                return False
            self._count_once()
            return self.take(sample, placed=placed)
        self._add(sample, placed)
        return True

    def _add(self, sample: Sample, placed: bool) -> None:
        self._blocks += self._needs(sample, placed)
        self._inside.append((sample, placed))
        if self._known is not None:
            self._known.update(sample.blocks)

    def _count_once(self) -> None:
        inside, self._inside, self._blocks, self._known = self._inside, [], 0, set()
        for sample, placed in inside:
            self._add(sample, placed)

    def _needs(self, sample: Sample, placed: bool) -> int:
        most = blocks_for(sample.reach) + self._states
        if placed:
            return most if self._known is None else most - len(self._known.intersection(sample.blocks))
        # Of what was kept a block may be copied, and goes only when the copy is there.
        return most + bool(self._kept) - (0 if self._known is None else self._shared(sample))

    def _shared(self, newcomer: Sample) -> int:
        """Blocks that he takes over from somebody inside, or waits for. Whatever else is offered by then is no shorter, and not of what was kept."""
        others = [other for other, placed in self._inside if placed or other.request_id == newcomer.request_id]
        offer = max(_offers(newcomer, others, (), self._kept, self._limits.chunk_rows), key=lambda offer: offer[:2], default=None)
        if offer is None or not isinstance(offer.source, Sample):
            return 0
        # Where there are states, what somebody has computed by then may be of no use.
        certain = offer.when == _When.NOW or self._limits.chunk_rows == _ENDLESS
        return offer.tokens // BLOCK_PLACES if certain else 0


class _Places(NamedTuple):
    stay: list[Sample]
    newcomers: list[Sample]
    passing: list[tuple[Sample, Sample]]
    """A newcomer, and one of a class behind his who claimed room before him and finds none."""


def _places(waiting: Sequence[Sample], running: Sequence[Sample], limits: Limits, kept: Sequence[Kept]) -> _Places:
    """Who has a place in the cache, as far as it reaches in the order of claims.

    A newcomer who does not fit closes the door behind him, so that he finds room when others have ended: to his class and those behind it at once,
    to all when so many have passed him as have places. Who runs already goes on, but not behind one of his class, or of one before, who cannot.
    """
    placed, room, places = set(running), _Room(limits, kept), _Places([], [], [])
    full = closed = len(CLASSES)
    lacking: list[Sample] = []
    for sample in _claims(waiting, running, limits):
        rank = CLASSES.index(sample.priority)
        if rank >= (full if sample in placed else closed):
            continue
        if room.take(sample, placed=sample in placed):
            if sample in placed:
                places.stay.append(sample)
            else:
                places.newcomers.append(sample)
                places.passing.extend((sample, waits) for waits in lacking)
        else:
            lacking.append(sample)
            full = rank if sample in placed else full
            closed = min(closed, rank) if sample.passed < limits.slots else 0
    return places


def _before(sample: Sample, other: Sample) -> bool:
    """Whether the class of one goes before that of the other."""
    return CLASSES.index(sample.priority) < CLASSES.index(other.priority)


def _claims(waiting: Sequence[Sample], running: Sequence[Sample], limits: Limits) -> Iterator[Sample]:
    """First who is within the floor of his class: whom enough have passed, so that nobody sends him back for ever, and who is before him in his own
    class; then those who run, so that they come to an end, and those who wait, in order of arrival.

    Then the others class by class. No class gets more places than there are, so that nobody looks at the end of a long queue.
    """
    heads = {sample for priority in CLASSES for sample in islice((each for each in waiting if each.priority == priority), limits.slots)}
    arrived = [*running, *(sample for sample in waiting if sample in heads)]
    urgent: set[Sample] = set()
    for last, sample in enumerate(arrived):
        if sample.passed >= limits.slots:
            urgent.update(each for each in arrived[: last + 1] if each.priority == sample.priority)
    candidates = sorted(arrived, key=lambda sample: sample not in urgent)
    ranks: Counter[Priority] = Counter()
    beyond: dict[Priority, list[Sample]] = {priority: [] for priority in CLASSES}
    for sample in candidates:
        ranks[sample.priority] += 1
        if ranks[sample.priority] <= limits.floor(sample.priority):
            yield sample
        else:
            beyond[sample.priority].append(sample)
    for queue in beyond.values():
        yield from queue


class _When(IntEnum):
    """When a beginning can be copied; the later value is the better one."""

    NOT_YET = 0
    """Whoever computes it is not that far yet."""
    PREFILLED = 1
    """After the prefill of this step."""
    NOW = 2


class _Offer(NamedTuple):
    """A beginning that need not be computed."""

    tokens: int
    when: _When
    source: Sample | Kept


def _offers(sample: Sample, others: Iterable[Sample], chunks: Sequence[Chunk], kept: Sequence[Kept], chunk_rows: int) -> Iterator[_Offer]:
    reached = {chunk.sample: chunk.stop for chunk in chunks}
    for other in dict.fromkeys([*others, *reached]):
        # What a sibling has cached is answered for: it was computed under the same limit.
        limit = sample.shared if other.request_id == sample.request_id else sample.reusable
        if not (tokens := _worthwhile(min(in_common(sample.stem, other.stem), other.shared), limit)):
            continue
        when = _When.NOW if other.cached >= tokens else _When.PREFILLED if reached.get(other, 0) >= tokens else _When.NOT_YET
        at = {_When.NOW: other.cached, _When.PREFILLED: reached.get(other, 0), _When.NOT_YET: other.shared}[when]
        tokens = _worthwhile(_resumable(tokens, [_stretch(at, chunk_rows), _stretch(min(at, other.shared), chunk_rows)]), limit)
        # Nobody waits for what a class behind his is computing with the little that it has.
        if tokens and (when != _When.NOT_YET or not _before(sample, other)):
            yield _Offer(tokens, when, other)
    for each in kept:
        tokens = _worthwhile(in_common(sample.stem, each.stem), sample.reusable)
        if tokens := _worthwhile(_resumable(tokens, each.stretches), sample.reusable):
            yield _Offer(tokens, _When.NOW, each)


def _stretch(tokens: int, chunk_rows: int) -> Stretch:
    """Where one can go on with a sequence that reaches so far, or did when it left the chunk in which its prompt ends."""
    return Stretch(tokens // chunk_rows * chunk_rows, tokens)


def _resumable(tokens: int, stretches: Iterable[Stretch]) -> int:
    """The most of these leading tokens behind which one can go on."""
    return max((min(tokens, stretch.last) for stretch in stretches if stretch.first <= tokens), default=0)


def _worthwhile(tokens: int, limit: int) -> int:
    """What is taken over of so many tokens: up to the limit, and not too few of it."""
    return min(tokens, limit) if tokens >= min(limit, LEAST_SHARED) else 0


def _affordable(missing: int, budget: int) -> int:
    """Tokens of a chunk: all that is missing when its first decode row fits too, else whole row pads."""
    return missing if missing < budget else max(0, (budget - 1) // ROW_PAD * ROW_PAD)
