"""Tokens follow the distribution that was asked for, and depend on seed, sample and position only."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from bloomery.infer.sampling import Draw, choose, invert, kept, philox, scale_and_truncate, uniforms
from bloomery.types.generation import SamplingParams


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, "seed": 3, **changes})


def logits(rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, vocab_size)) * 2).astype(np.float32)


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], np.uint64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    assert tuple(int(word[0]) for word in philox(words(*counter), words(*key))) == expected


def test_a_number_belongs_to_seed_sample_and_position_alone():
    draws = [Draw(sample, position, params(seed=seed)) for seed in (0, 1, 2**63 + 5) for sample in (0, 1) for position in (0, 1, 700)]
    together = uniforms(draws)
    assert [uniforms([draw])[0] for draw in draws] == together.tolist()
    assert len(set(together.tolist())) == len(draws)


def test_numbers_are_uniform():
    numbers = uniforms([Draw(sample, position, params()) for position in range(20_000) for sample in range(2)])
    assert (numbers > 0).all()
    assert (numbers < 1).all()
    assert chisquare(np.histogram(numbers, 100, (0, 1))[0]).pvalue > 0.001


@pytest.mark.parametrize("vocab_size", [1, 3, 37, 300, 4099])
def test_the_token_of_a_row_is_the_same_alone_and_in_company(vocab_size):
    # Hardly any token is much likelier than others: a bit of difference in a sum would be seen.
    rows, draws = logits(400, vocab_size) / 64, [Draw(row % 3, row, params(seed=row % 5)) for row in range(400)]
    together = choose(rows, draws).tokens_B
    assert [int(choose(rows[row : row + 1].copy(), [draw]).tokens_B[0]) for row, draw in enumerate(draws)] == together.tolist()


def test_every_token_of_a_large_vocabulary_has_its_share():
    vocab_size, count = 150_000, 500
    rows = np.broadcast_to(np.zeros(vocab_size, np.float32), (count, vocab_size))
    tokens = choose(rows, [Draw(0, position, params(seed=5)) for position in range(count)]).tokens_B
    assert chisquare(np.histogram(tokens, 10, (0, vocab_size))[0]).pvalue > 0.001


def test_a_number_at_either_end_finds_a_token_that_may_come():
    row = np.array([[-np.inf, -1.0, -np.inf, 0.0, -np.inf]], np.float32)
    assert invert(row, np.array([[2.0**-53, 1 - 2.0**-53]])).tolist() == [[1, 3]]


def brute_force(row: np.ndarray, asked: SamplingParams) -> np.ndarray:
    """Probabilities by the definition, token by token."""
    probabilities = np.exp(row.astype(np.float64) / asked.temperature)
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if asked.top_k:
        order = order[: asked.top_k]
    total, mass, chosen = sum(probabilities[order]), 0.0, []
    for token in order:
        chosen.append(token)
        mass += probabilities[token] / total
        if mass >= asked.top_p:
            break
    truncated = np.zeros(len(row))
    truncated[chosen] = probabilities[chosen]
    return truncated / truncated.sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [{}, {"temperature": 0.5}, {"temperature": 1.7}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 6, "top_p": 0.8, "temperature": 1.3}],
    ids=str,
)
def test_tokens_follow_the_asked_distribution(asked):
    # A fixed seed: the test is deterministic, and 0.001 is the share of seeds that would fail it.
    count, row = 20_000, logits(1, 24)[0]
    wanted = params(seed=11, **asked)
    rows = np.broadcast_to(row, (count, len(row)))
    seen = np.bincount(choose(rows, [Draw(position % 7, position, wanted) for position in range(count)]).tokens_B, minlength=len(row))
    expected = brute_force(row, wanted) * count
    assert (seen[expected == 0] == 0).all()
    assert chisquare(seen[expected > 0], expected[expected > 0]).pvalue > 0.001


@settings(max_examples=150, deadline=None)
@given(
    row=st.lists(st.integers(-6, 6), min_size=1, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1.0),
)
def test_truncation_keeps_what_the_definition_keeps(row, top_k, top_p):
    # Small integers: many ties, and sums that are the same in every order to within 1e-9.
    values = np.array(row, np.float32)
    mine = kept(values - values.max(), top_k, top_p)
    assert mine.sum() >= 1
    probabilities = np.exp(values - values.max(), dtype=np.float64)
    order = sorted(range(len(row)), key=lambda token: (-values[token], token))[: top_k or None]
    assert set(np.flatnonzero(mine)) == set(order[: mine.sum()])
    share = probabilities[order].cumsum() / probabilities[order].sum()
    assert share[mine.sum() - 1] >= top_p - 1e-9
    assert mine.sum() == 1 or share[mine.sum() - 2] < top_p + 1e-9


def test_temperature_zero_is_greedy_and_ties_go_to_the_lowest_id():
    rows = logits(3, 50)
    rows[2, [7, 30]] = 20.0
    chosen = choose(rows, [Draw(0, 0, params(temperature=0.0, seed=seed)) for seed in range(3)]).tokens_B
    assert chosen.tolist() == [*rows[:2].argmax(-1).tolist(), 7]


@pytest.mark.parametrize("temperature", [1e-9, 1e-38, 1e-300])
def test_a_tiny_temperature_is_greedy_too(temperature):
    rows = logits(4, 50) * 1000
    draws = [Draw(0, position, params(temperature=temperature, top_p=0.9)) for position in range(4)]
    assert choose(rows, draws).tokens_B.tolist() == rows.argmax(-1).tolist()


def test_truncated_tokens_have_no_mass():
    scaled = scale_and_truncate(logits(2, 50), [params(top_k=3), params(top_p=0.5)])
    assert np.isfinite(scaled[0]).sum() == 3
    assert 0 < np.isfinite(scaled[1]).sum() < 50
