"""Which rows make which step, and the learning rate of each."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.recipes.dealing import deal, rate
from bloomery.types.errors import InvalidInput

LENGTHS = [5, 9, 2, 7, 3, 8, 1, 6, 4, 10]


def test_every_row_comes_once_per_epoch() -> None:
    dealt = [place for batch in deal(LENGTHS, epochs=2, rows=4, tokens=None, seed=1) for place in batch]
    assert sorted(dealt[:10]) == sorted(dealt[10:]) == list(range(10))


def test_the_order_depends_on_the_seed_alone() -> None:
    assert deal(LENGTHS, epochs=3, rows=4, tokens=None, seed=1) == deal([1] * 10, epochs=3, rows=4, tokens=None, seed=1)
    assert deal(LENGTHS, epochs=3, rows=4, tokens=None, seed=1) != deal(LENGTHS, epochs=3, rows=4, tokens=None, seed=2)


@pytest.mark.parametrize("batch", [{"rows": 4, "tokens": None}, {"rows": None, "tokens": 4}])
def test_nothing_cannot_be_dealt(batch: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="no rows"):
        deal([], epochs=1, seed=1, **batch)


def test_less_than_a_batch_is_one_step_of_a_whole_batch() -> None:
    assert [len(batch) for batch in deal(LENGTHS, epochs=0.01, rows=4, tokens=None, seed=1)] == [4]


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), tokens=st.integers(1, 200), epochs=st.sampled_from([0.5, 1, 2.5]))
def test_batches_of_tokens_hold_what_was_asked_and_each_row_as_often_as_epochs_say(lengths: list[int], tokens: int, epochs: float) -> None:
    batches = deal(lengths, epochs=epochs, rows=None, tokens=tokens, seed=3)
    assert all(len(batch) == 1 or sum(lengths[place] for place in batch) <= tokens for batch in batches)
    count = Counter(place for batch in batches for place in batch)
    assert sum(count.values()) == max(1, round(epochs * len(lengths)))
    assert max(count.values()) - min(count[place] for place in range(len(lengths))) <= 1


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_the_rate_warms_up_in_a_line(decay: str) -> None:
    rates = [rate(step, 10, 1.0, decay=decay, warmup_share=0.3) for step in range(10)]  # type: ignore[arg-type]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_a_line_falls_to_the_floor_behind_the_last_step() -> None:
    assert [rate(step, 10, 2.0, warmup_share=0.2, floor=0.5) for step in (2, 6, 10)] == pytest.approx([2.0, 1.5, 1.0])
    assert rate(10, 10, 1.0) == 0


def test_a_cosine_is_the_published_curve() -> None:
    asked = [rate(step, 101, 1.0, decay="cosine", warmup_share=0.0) for step in range(1, 102)]
    assert asked == pytest.approx([0.5 * (1 + math.cos(math.pi * (step - 1) / 100)) for step in range(1, 102)])


def test_a_constant_rate_stays() -> None:
    assert {rate(step, 10, 0.5, decay="constant", warmup_share=0.1) for step in range(1, 10)} == {0.5}
