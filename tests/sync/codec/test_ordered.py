"""Threads that work for somebody, in the order of what they are given."""

import pytest

from bloomery.sync.codec import kernels
from bloomery.sync.codec.kernels import PLAIN
from bloomery.sync.codec.ordered import in_order


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_compute_with_what_whoever_asks_computes_with(workers: int) -> None:
    with kernels.only(PLAIN):
        done = list(in_order(lambda number: (number, kernels.chosen()), range(20), workers))
    assert done == [(number, (number, PLAIN)) for number in range(20)]


@pytest.mark.parametrize("workers", [1, 3])
def test_what_fails_ends_it_at_its_place(workers: int) -> None:
    done = in_order(lambda number: 1 / number, (2, 1, 0, 1), workers)
    assert [next(done), next(done)] == [(2, 0.5), (1, 1.0)]
    with pytest.raises(ZeroDivisionError):
        next(done)
    assert list(done) == []
