"""How values are spread: counts in bins of one width."""

import math
from collections.abc import Sequence
from typing import Final, Self

from bloomery.types.resources import Resource

BINS: Final = 20


class Histogram(Resource):
    """How many values lie in each of the bins of one width between `low` and `high`, the least and the greatest; both ends count. All alike are one
    bin without a width."""

    low: float
    high: float
    counts: list[int]

    @classmethod
    def of(cls, values: Sequence[float], bins: int = BINS) -> Self | None:
        """None where there are no values. Whole numbers have no more bins than there are of them, so that none is empty for being between two."""
        if not values:
            return None
        low, high = min(values), max(values)
        if low == high:
            return cls(low=low, high=high, counts=[len(values)])
        if all(float(value).is_integer() for value in values):
            bins = int(min(bins, high - low + 1))
        counts = [0] * bins
        # Halves: a width between the largest numbers there are would be infinite.
        width = high / 2 - low / 2
        for value in values:
            counts[min(bins - 1, math.floor((value / 2 - low / 2) / width * bins))] += 1
        return cls(low=low, high=high, counts=counts)
