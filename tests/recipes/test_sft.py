"""Batches, schedule and shifting of the SFT recipe; the loop itself runs against the live server in tests/test_loop.py."""

from itertools import islice

import pytest

from bloomery.recipes.sft import SftConfig, batches, datum, rate

ROWS = [datum([row, row + 1, row + 2], [0.0, 0.0, 1.0]) for row in range(10)]


def test_position_i_predicts_token_i_plus_1() -> None:
    shifted = datum([5, 6, 7], [0.0, 0.0, 1.0])
    assert shifted.tokens.numpy().tolist() == [5, 6]
    assert shifted.inputs["target_tokens"].numpy().tolist() == [6, 7]
    assert shifted.inputs["weights"].numpy().tolist() == [0.0, 1.0]


def test_every_row_comes_once_per_epoch() -> None:
    firsts = [int(row.tokens.numpy()[0]) for batch in islice(batches(ROWS, 5, seed=1), 4) for row in batch]
    assert sorted(firsts[:10]) == sorted(firsts[10:]) == list(range(10))


def test_the_order_depends_on_the_seed_alone() -> None:
    def order(seed: int) -> list[list[int]]:
        return [[int(row.tokens.numpy()[0]) for row in batch] for batch in islice(batches(ROWS, 4, seed), 6)]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_the_rate_warms_up_and_decays_to_zero() -> None:
    config = SftConfig(epochs=1, learning_rate=1.0, warmup_share=0.2)
    rates = [rate(step, 10, config) for step in range(10)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(1 / 8)
    assert rate(10, 10, config) == 0
