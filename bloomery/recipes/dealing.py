"""Which rows make which step, and with which learning rate: functions of the settings alone, so that whoever begins again does the same."""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, Literal

from bloomery.types.errors import InvalidInput

Decay = Literal["constant", "linear", "cosine"]
_MOST_STEPS: Final = 10_000_000


def deal(lengths: Sequence[int], *, epochs: float, rows: int | None, tokens: int | None, seed: int) -> list[list[int]]:
    """The rows of each step by their place. Every row comes once per epoch, in an order that depends on the seed alone; InvalidInput of none.

    A step has `rows` rows, or as many as have `tokens` together, one at least; both across the end of an epoch, too.
    """
    if not lengths:
        raise InvalidInput("there are no rows to train on", field="rows")
    if tokens is None:
        assert rows is not None
        steps = max(1, round(epochs * len(lengths) / rows))
        order = _endless(len(lengths), seed)
        return [list(islice(order, rows)) for _ in range(min(steps, _MOST_STEPS))]
    order = islice(_endless(len(lengths), seed), max(1, round(epochs * len(lengths))))
    return list(_filled(order, lengths, tokens))


def rate(step: int, steps: int, peak: float, *, decay: Decay = "linear", warmup_share: float = 0.1, floor: float = 0.0) -> float:
    """Learning rate of a step, from 0: a linear warm-up of one step at least, then as `decay` says, down to `floor` of the peak behind the last."""
    warmup = max(1, round(warmup_share * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    if decay == "constant":
        return peak
    left = (steps - step) / max(1, steps - warmup)
    shape = left if decay == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))
    return peak * (floor + (1.0 - floor) * shape)


def _endless(count: int, seed: int) -> Iterator[int]:
    order = random.Random(seed)
    while True:
        yield from order.sample(range(count), count)


def _filled(order: Iterator[int], lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    batch, held = list[int](), 0
    for place in order:
        if batch and held + lengths[place] > tokens:
            yield batch
            batch, held = [], 0
        batch.append(place)
        held += lengths[place]
    if batch:
        yield batch
