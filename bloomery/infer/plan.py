"""What runs in the next step: a pure decision over counts of tokens.

A sample of n tokens needs the keys and values of its first n - 1 in the cache (prefill); then every step feeds its last token and gains one
(decode). Samples of one request share their prompt: the first is prefilled, the others are forked from any that has the prompt cached.
Who arrives first goes first. When the cache cannot hold all who run, the youngest goes back to the queue and is prefilled again later; that
costs time and changes no token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bloomery.models.attention import KEY_PAD, ROW_PAD, pad_to


@dataclass(slots=True, eq=False)
class Sample:
    """One sample, as far as planning goes; told apart by identity."""

    request_id: str
    index: int
    """Which of the request's samples."""
    shared: int
    """Leading tokens that all samples of the request have cached alike: the prompt without its last token."""
    length: int
    """Tokens so far, prompt and sampled."""
    cached: int = 0
    """Leading tokens whose keys and values lie in the cache."""
    decodes: bool = True
    """False: it only wants its prompt scored, and is done when all of it is cached."""

    @property
    def missing(self) -> int:
        """Tokens to prefill before this sample can decode."""
        return self.length - 1 - self.cached


class Chunk(NamedTuple):
    """Prefill tokens `start` to `stop` of a sample."""

    sample: Sample
    start: int
    stop: int


class Fork(NamedTuple):
    """Copy the shared keys and values from `source`."""

    sample: Sample
    source: Sample


class Plan(NamedTuple):
    """One step, in this order: release `preempt`, place `admit`, prefill, fork, decode."""

    preempt: tuple[Sample, ...]
    admit: tuple[Sample, ...]
    prefill: tuple[Chunk, ...]
    forks: tuple[Fork, ...]
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

    def __post_init__(self) -> None:
        if self.slots < 1 or self.token_budget < self.slots + 2 * ROW_PAD:
            raise ValueError(f"a token budget of {self.token_budget} leaves no room for prefill beside {self.slots} slots")


def plan_step(waiting: Sequence[Sample], running: Sequence[Sample], limits: Limits) -> Plan:
    """Decide the next step; both in order of arrival, everyone in `running` before everyone in `waiting`."""
    stay = list(running)
    while not fits(stay, limits):
        stay.pop()
    admit: list[Sample] = []
    chunks: list[Chunk] = []
    forks: list[Fork] = []
    decode = [sample for sample in stay if sample.decodes and not sample.missing]
    budget = limits.token_budget - len(decode)
    for sample in [sample for sample in stay if sample.missing] + _newcomers(waiting, stay, running, limits):
        placed = sample in stay
        source = None if placed else _prompt_holder(sample, stay, chunks)
        tokens = 0 if source is not None else _affordable(sample.missing, budget)
        reached = sample.shared if source is not None else sample.cached + tokens
        if budget < 1 or reached == sample.cached < sample.length - 1:
            break
        if not placed:
            admit.append(sample)
        if source is not None:
            forks.append(Fork(sample, source))
        elif tokens:
            chunks.append(Chunk(sample, sample.cached, reached))
        if sample.decodes and reached == sample.length - 1:
            decode.append(sample)
        budget -= tokens + 1
    return Plan(tuple(running[len(stay) :]), tuple(admit), tuple(chunks), tuple(forks), tuple(decode))


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


def _prompt_holder(sample: Sample, stay: list[Sample], chunks: list[Chunk]) -> Sample | None:
    """A sample of the same request whose prompt is cached before the forks of this step, if there is something to share."""
    reached = {id(chunk.sample): chunk.stop for chunk in chunks}
    candidates = [*stay, *(chunk.sample for chunk in chunks)]
    for candidate in candidates if sample.shared else ():
        if candidate.request_id == sample.request_id and reached.get(id(candidate), candidate.cached) >= sample.shared:
            return candidate
    return None


def _affordable(missing: int, budget: int) -> int:
    """Tokens of a chunk: all that is missing when its first decode row fits too, else whole row pads."""
    return missing if missing < budget else max(0, (budget - 1) // ROW_PAD * ROW_PAD)
