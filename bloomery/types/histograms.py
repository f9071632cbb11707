"""How values are spread: counts in bins of one width."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, Self

from bloomery.types.resources import Resource

BINS: Final = 20
"""Most of them."""


class Histogram(Resource):
    """How many values lie in each of the bins of one width from `low` on, up to `high`: the least and the greatest. All alike are one bin without a
    width."""

    low: float
    high: float
    width: float
    """Of whole numbers a whole one: the last bin may reach beyond `high`."""
    counts: list[int]

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """None where there are no values. Of whole numbers every bin may have as many: some would look rarer for lying where bins meet."""
        if not values:
            return None
        low, high = min(values), max(values)
        if low == high:
            return cls(low=low, high=high, width=0.0, counts=[len(values)])
        whole = all(float(value).is_integer() for value in values)
        width, counts = _of_whole([int(value) for value in values]) if whole else _of_any(values, low, high)
        return cls(low=low, high=high, width=width, counts=counts)


class _Counted(NamedTuple):
    width: float
    counts: list[int]


def _of_whole(values: Sequence[int]) -> _Counted:
    low, high = min(values), max(values)
    width = -(-(high - low + 1) // BINS)
    counts = [0] * ((high - low) // width + 1)
    for value in values:
        counts[(value - low) // width] += 1
    return _Counted(float(width), counts)


def _of_any(values: Sequence[float], low: float, high: float) -> _Counted:
    counts = [0] * BINS
    # Brought near one by a power of two: between the largest numbers there are a width is infinite, and between the smallest zero.
    scale = math.frexp(max(abs(low), abs(high)))[1] + 1
    start = math.ldexp(low, -scale)
    length = math.ldexp(high, -scale) - start
    for value in values:
        counts[min(BINS - 1, math.floor((math.ldexp(value, -scale) - start) / length * BINS))] += 1
    return _Counted(math.ldexp(length / BINS, scale), counts)
