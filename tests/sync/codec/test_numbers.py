"""Element formats against numpy's and torch's own, and their bits in the order of what they mean."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bloomery.sync.codec.numbers import NUMBERS, Number

from .chunks import EVERY, special

FLOATS = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def all_bits(kind: Number) -> np.ndarray:
    """Every pattern of up to 16 bits; of more some."""
    width = 8 * kind.item_bytes
    if width <= 16:
        return np.arange(1 << width, dtype=kind.dtype)
    return np.concatenate([np.random.default_rng(0).integers(0, 2**width - 1, 10_000, np.uint64).astype(kind.dtype), special(kind)])


@EVERY
def test_ordered_is_its_own_inverse(kind):
    bits = all_bits(kind)
    assert (kind.ordered(kind.ordered(bits)) == bits).all()
    assert kind.ordered(bits).dtype == kind.dtype


@pytest.mark.parametrize("name", FLOATS)
def test_ordered_grows_with_the_number(name):
    kind = NUMBERS[name]
    bits = all_bits(kind)
    values = torch.from_numpy(bits.copy()).view(FLOATS[name]).to(torch.float64).numpy()
    ordered = kind.ordered(bits).view(f"i{kind.item_bytes}")
    there = ~np.isnan(values)
    by_number = np.lexsort((ordered[there], values[there]))
    assert (np.diff(ordered[there][by_number].astype(object)) >= 0).all()


@pytest.mark.parametrize("name", FLOATS)
def test_both_zeros_are_neighbours(name):
    kind = NUMBERS[name]
    zeros = np.array([0, 1 << (8 * kind.item_bytes - 1)], kind.dtype)
    plus, minus = kind.ordered(zeros).view(f"i{kind.item_bytes}").tolist()
    assert (plus, minus) == (0, -1)


@pytest.mark.parametrize("name", FLOATS)
def test_exponents_are_those_of_the_number(name):
    kind = NUMBERS[name]
    bits = all_bits(kind)
    values = torch.from_numpy(bits.copy()).view(FLOATS[name]).to(torch.float64).numpy()
    field = kind.exponents(bits).astype(int)
    # Those with an exponent of their own, of numbers that are neither infinite nor nan.
    normal = (field > 0) & np.isfinite(values) & (values != 0) & (field < (1 << kind.exponent_bits) - 1)
    bias = (1 << (kind.exponent_bits - 1)) - 1
    assert (np.frexp(values[normal])[1] - 1 == field[normal] - bias).all()


@given(name=st.sampled_from(["U8", "I16", "BOOL", "U64", "F8_E8M0"]), data=st.data())
def test_whole_numbers_are_their_own_order_and_have_no_exponent(name, data):
    kind = NUMBERS[name]
    bits = np.array(data.draw(st.lists(st.integers(0, 2 ** (8 * kind.item_bytes) - 1), max_size=20)), kind.dtype)
    assert (kind.ordered(bits) == bits).all()
    assert not kind.exponents(bits).any()
