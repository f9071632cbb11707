"""How values are spread."""

import math

import pytest

from bloomery.types.histograms import BINS, Histogram


@pytest.mark.parametrize(
    ("values", "width", "counts"),
    [
        ([0.0, 0.5, 1.0], 0.05, [1, *[0] * 9, 1, *[0] * 8, 1]),
        ([2, 2, 2], 0.0, [3]),
        ([1, 2, 2, 5], 1.0, [1, 2, 0, 0, 1]),
        ([0, 1, 0, 1, 1], 1.0, [2, 3]),
        ([-1.5, -1.5], 0.0, [2]),
    ],
)
def test_every_value_is_in_one_bin_and_whole_numbers_have_bins_of_their_own(values: list[float], width: float, counts: list[int]) -> None:
    found = Histogram.of(values)
    assert found == Histogram(low=min(values), high=max(values), width=width, counts=counts)


@pytest.mark.parametrize("most", [20, 21, 30, 31, 40, 41, 1000, 1007])
def test_whole_numbers_of_which_there_are_as_many_look_as_many(most: int) -> None:
    found = Histogram.of(list(range(1, most + 1)))
    assert found is not None
    assert len(found.counts) <= BINS
    assert set(found.counts[:-1]) == {found.width}
    assert found.counts[-1] == (most % found.width or found.width)


def test_no_values_have_none_and_numbers_of_any_size_fit() -> None:
    assert Histogram.of([]) is None
    for ends in ([-1e308, 0.5, 1e308], [0.0, 5e-324, 1e-323]):
        found = Histogram.of(ends)
        assert found is not None
        assert (len(found.counts), sum(found.counts), found.counts[0], found.counts[-1]) == (BINS, 3, 1, 1)
        assert math.isfinite(found.width)
    for few in ([1.0, math.nextafter(1.0, 2.0)], [0.0, 5e-324], [1e308, math.nextafter(1e308, math.inf)], [-1e308, 1e308]):
        near = Histogram.of(few)
        assert near is not None
        assert sum(near.counts) == 2
        assert (near.counts[0], near.counts[-1]) == (1, 1)
