"""A split into passes that depends on lengths and budget alone."""

from hypothesis import given
from hypothesis import strategies as st

from bloomery.models.pads import split

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=20)


@given(lengths=LENGTHS, budget=st.integers(4, 200))
def test_every_datum_is_in_one_part_and_order_is_kept(lengths, budget):
    parts = split(lengths, budget)
    assert [index for part in parts for index in range(part.start, part.stop)] == list(range(len(lengths)))
    assert all(part.stop > part.start for part in parts)


@given(lengths=LENGTHS, budget=st.integers(4, 200))
def test_a_part_fits_the_budget_unless_it_is_one_long_datum(lengths, budget):
    for part in split(lengths, budget):
        rows = sum(-(-length // 4) * 4 for length in lengths[part])
        assert rows <= budget or part.stop - part.start == 1


@given(lengths=LENGTHS, budget=st.integers(4, 200))
def test_no_two_neighbouring_parts_would_fit_together(lengths, budget):
    parts = split(lengths, budget)
    rows = [sum(-(-length // 4) * 4 for length in lengths[part]) for part in parts]
    first = [-(-lengths[part.start] // 4) * 4 for part in parts]
    assert all(held + following > budget for held, following in zip(rows, first[1:], strict=False))
