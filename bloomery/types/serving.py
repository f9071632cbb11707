"""What is said about an engine beside its answers: how it may be paused, how weights are swapped under requests, what it holds and what it can do."""

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from bloomery.types.generation import SampledToken
from bloomery.types.wire import Wire

MODEL: Final = "model"
"""The name under which an engine serves its own model; every other name is an adapter's."""

STEP_S: Final = 300.0
"""Whoever steps a model is waited for so long: one step of a large model on few cores takes minutes. Who says nothing for longer hangs."""

QUEUE_BOUNDS_S: Final = (
    0.001,
    0.005,
    0.01,
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
"""Of the histogram of times in the queue."""

PauseMode = Literal["keep", "drain", "abort"]
"""What becomes of requests in hand: they stand still where they are, they are finished first, or they end with reason `abort`."""
KvPolicy = Literal["keep", "recompute", "flush"]
"""What becomes of keys and values that the weights before a swap gave.

`keep`: requests that have sampled go on with theirs. `recompute`: theirs are computed again by the new weights. `flush`: that, and nothing that was
kept of requests which have left is used again, of any weights. What was kept is never taken for that of other weights, whatever the policy.
"""


class QueueTimes(Wire, frozen=True):
    """From the submission of samples to their first places; `counts` are of those up to each of `QUEUE_BOUNDS_S`, and beyond them."""

    counts: tuple[int, ...] = (0,) * (len(QUEUE_BOUNDS_S) + 1)
    seconds: float = 0.0
    """Of all together."""


class WeightInfo(NamedTuple):
    """What an engine serves under a name at the moment. `checksum` is of the numbers in its memory: equal on equal engines with equal weights."""

    name: str
    version: str
    checksum: str


class VersionSpan(NamedTuple):
    """Tokens `start` to `stop` of a sample were sampled with the weights `version`."""

    version: str
    start: int
    stop: int


class Capabilities(NamedTuple):
    """What an engine can do; whatever it cannot, it refuses by name."""

    bit_exact: bool
    """The log-probabilities are the trainer's, bit for bit, and do not depend on what shares the batch."""
    router_capture: bool
    """It tells which experts the tokens went to."""
    delta_update: bool
    """An update may be patches of tensors."""
    update_while_serving: bool
    """Weights are staged and swapped while requests run; otherwise the engine must be paused first."""
    kv_policies: tuple[KvPolicy, ...]
    pinned_versions: bool
    """A request may name a version, and keeps it to its end while others are swapped."""
    max_adapters: int | None
    """Adapters that can be loaded; None: as many as the disk holds."""
    max_adapters_in_memory: int
    """Of these, how many are in memory at a time; requests for others wait."""
    router_weights: bool = False
    """It tells what the answers of those experts were multiplied with."""


class EngineMetrics(NamedTuple):
    """What an engine is doing; counts since it began."""

    running_sequences: int
    waiting_sequences: int
    tokens_sampled: int
    tokens_prefilled: int
    cache_usage: float
    """Share of the key and value cache that those who run take, 0 to 1."""
    preemptions: int
    """Sequences that had to leave the cache before their end."""
    versions_in_memory: int
    version_bytes: int
    swaps: int
    paused: PauseMode | None
    asleep: bool
    tokens_kept: int = 0
    """Of those that were sampled, those that were taken over from drafts."""


def version_spans(tokens: Iterable[SampledToken]) -> list[VersionSpan]:
    """Which weights sampled which tokens of one sample, from its tokens in order."""
    spans: list[VersionSpan] = []
    for token in tokens:
        if token.version is not None and (not spans or spans[-1].version != token.version):
            spans.append(VersionSpan(token.version, token.position, token.position))
        spans[-1] = spans[-1]._replace(stop=token.position + 1)
    return spans
