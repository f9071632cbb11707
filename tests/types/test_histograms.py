"""How values are spread."""

import math

import pytest

from bloomery.types.histograms import BINS, Histogram


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ([0.0, 0.5, 1.0], [1, *[0] * 9, 1, *[0] * 8, 1]),
        ([2, 2, 2], [3]),
        ([1, 2, 2, 5], [1, 2, 0, 0, 1]),
        ([0, 1, 0, 1, 1], [2, 3]),
    ],
)
def test_every_value_is_in_one_bin_and_whole_numbers_have_bins_of_their_own(values: list[float], counts: list[int]) -> None:
    found = Histogram.of(values)
    assert found == Histogram(low=min(values), high=max(values), counts=counts)


def test_no_values_have_none_and_the_largest_numbers_fit() -> None:
    assert Histogram.of([]) is None
    found = Histogram.of([-1e308, 0.5, 1e308])
    assert found is not None
    assert (len(found.counts), sum(found.counts), found.counts[0], found.counts[-1]) == (BINS, 3, 1, 1)
    many = Histogram.of(list(range(1000)))
    assert many is not None
    assert many.counts == [50] * BINS
    near = Histogram.of([1.0, math.nextafter(1.0, 2.0)])
    assert near is not None
    assert sum(near.counts) == 2
