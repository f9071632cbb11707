"""The linear state hash against an oracle in Python's own whole numbers, and what it must catch."""

import os
import shutil
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.sync import state_hash, state_kernel
from bloomery.sync.state_hash import SEEDS, StateHash, change, elements, hash_elements, hash_parts, total

MASK = 2**64 - 1
DTYPES = (np.uint8, np.uint16, np.uint32, np.uint64)


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def oracle(values: Sequence[int], first: int) -> StateHash:
    return StateHash(*(sum((splitmix64((seed + first + i) & MASK) | 1) * value for i, value in enumerate(values)) & MASK for seed in SEEDS))


@st.composite
def bits(draw: st.DrawFn, *, min_size: int = 0) -> np.ndarray:
    dtype = draw(st.sampled_from(DTYPES))
    return np.array(draw(st.lists(st.integers(0, np.iinfo(dtype).max), min_size=min_size, max_size=40)), dtype)


places = st.integers(0, 2**48)


def without_a_compiler(values: np.ndarray, first: int) -> StateHash:
    return StateHash(*(state_hash._sum(values, (seed + first) & MASK) for seed in SEEDS))


@given(values=bits(), first=places)
def test_it_is_what_whole_numbers_of_any_length_say(values, first):
    assert hash_elements(values, first) == oracle(values.tolist(), first) == without_a_compiler(values, first)


@given(values=bits(), first=places, edges=st.lists(st.integers(0, 40), max_size=6), compiled=st.booleans())
def test_parts_in_one_pass_have_the_hashes_that_each_has_alone(values, first, edges, compiled):
    stops = sorted({min(edge, len(values)) for edge in edges} | {len(values)})
    alone = [hash_elements(values[start:stop], first + start) for start, stop in pairwise((0, *stops))]
    with pytest.MonkeyPatch.context() as patched:
        if not compiled:
            patched.setattr(state_kernel, "sums", lambda *_: None)
        assert hash_parts(values, stops, first) == alone


def test_splitmix64_gives_its_published_first_numbers():
    # Of the state 0, from the reference implementation.
    assert [splitmix64(0), splitmix64(0x9E3779B97F4A7C15)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 64, (1 << 15) - 1, (1 << 15) + 1, 100_003])
def test_with_and_without_a_compiler_it_is_the_same(dtype, size):
    values = np.random.default_rng(size).integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True)
    assert hash_elements(values, 12345) == without_a_compiler(values, 12345)


@pytest.mark.slow
@given(values=bits(min_size=1), first=places, data=st.data(), compiled=st.booleans())
def test_an_update_is_what_hashing_again_gives(values, first, data, compiled):
    at = data.draw(st.lists(st.integers(0, len(values) - 1), unique=True))
    new = values.copy()
    for place in at:
        new[place] = data.draw(st.integers(0, np.iinfo(values.dtype).max))
    indices = np.array(at, np.int64)
    with pytest.MonkeyPatch.context() as patched:
        if not compiled:
            patched.setattr(state_kernel, "change", lambda *_: None)
        assert hash_elements(values, first) + change(indices, values[indices], new[indices], first) == hash_elements(new, first)
        assert change(indices + first, values[indices], new[indices]) == change(indices, values[indices], new[indices], first)


def test_an_update_of_many_elements_is_what_hashing_again_gives():
    random = np.random.default_rng(0)
    for dtype in DTYPES:
        values, new = (random.integers(0, np.iinfo(dtype).max, 70_001, dtype, endpoint=True) for _ in range(2))
        indices = np.flatnonzero(values != new).astype(np.uint32)
        assert hash_elements(values, 1 << 40) + change(indices, values[indices], new[indices], 1 << 40) == hash_elements(new, 1 << 40)


def test_an_update_of_other_elements_than_it_names_is_refused():
    values = np.arange(4, dtype=np.uint16)
    for indices, old, new in ((values[:3], values, values), (values, values, values[:3]), (values, values, values.astype(np.uint32))):
        with pytest.raises(TypeError, match="as many indices as raw bits"):
            change(indices, old, new)


@pytest.mark.slow
@given(values=bits(), first=places, cuts=st.lists(st.integers(0, 40)), order=st.randoms())
def test_shards_add_up_to_the_whole_however_it_is_cut_and_in_any_order(values, first, cuts, order):
    edges = sorted({0, len(values), *(cut for cut in cuts if cut < len(values))})
    shards = [hash_elements(values[start:stop], first + start) for start, stop in pairwise(edges)]
    order.shuffle(shards)
    assert total(shards) == hash_elements(values, first)


@pytest.mark.slow
@given(values=bits(min_size=1), first=places, data=st.data())
def test_one_changed_element_is_always_caught_by_each_seed(values, first, data):
    at = data.draw(st.integers(0, len(values) - 1))
    other = values.copy()
    other[at] = data.draw(st.integers(0, np.iinfo(values.dtype).max).filter(lambda value: value != values[at]))
    before, after = hash_elements(values, first), hash_elements(other, first)
    assert before.one != after.one
    assert before.two != after.two


several = bits(min_size=2).filter(lambda values: len(set(values.tolist())) > 1)


@given(values=several, first=places, data=st.data())
def test_two_different_values_that_changed_places_are_caught(values, first, data):
    one = data.draw(st.integers(0, len(values) - 1))
    two = data.draw(st.sampled_from(np.flatnonzero(values != values[one]).tolist()))
    other = values.copy()
    other[[one, two]] = values[[two, one]]
    assert hash_elements(values, first) != hash_elements(other, first)


def test_a_sign_that_changed_places_is_caught():
    # The worst pair of float32 values: they differ in the highest bit alone, and all that the keys' low bits say of them is lost.
    rng = np.random.default_rng(0)
    values = rng.standard_normal(2000).astype(np.float32)
    values[1::2] = -values[::2]
    swapped = values.reshape(-1, 2)[:, ::-1].reshape(-1)
    for pair in range(0, 2000, 2):
        mixed = values.copy()
        mixed[pair : pair + 2] = swapped[pair : pair + 2]
        assert hash_elements(mixed.view(np.uint32), 0) != hash_elements(values.view(np.uint32), 0)


def test_the_sign_of_zero_and_the_payload_of_nan_count():
    zeros = np.array([0.0, np.nan], np.float32)
    other = zeros.copy()
    other[0] = -0.0
    assert hash_elements(zeros.view(np.uint32), 0) != hash_elements(other.view(np.uint32), 0)


def test_it_is_written_as_32_digits_and_read_back():
    found = hash_elements(np.arange(5, dtype=np.uint16), 0)
    assert StateHash.parse(str(found)) == found
    for text in ("", "0" * 31, "G" * 32, "A" * 32, "0x" + "0" * 30):
        with pytest.raises(ValueError, match="no state hash"):
            StateHash.parse(text)


def test_a_golden_value():
    # Versions are made of it: another seed, key or order would make every published one a stranger.
    assert str(hash_elements(elements(bytes(range(64)), 4), 1000)) == "9b9ee72fcda693882d4e8681adc95d38"


def test_values_that_are_no_raw_bits_are_refused():
    with pytest.raises(TypeError, match="raw bits"):
        hash_elements(np.zeros(3, np.float32), 0)


def test_what_lies_at_an_odd_address_is_hashed_too():
    data = bytes(3) + np.arange(9, dtype=np.uint32).tobytes()
    assert hash_elements(elements(memoryview(data)[3:], 4), 0) == hash_elements(np.arange(9, dtype=np.uint32), 0)


@pytest.mark.skipif(shutil.which("cc") is None or os.environ.get("BLOOMERY_NATIVE") == "0", reason="numpy adds up everything here")
def test_a_machine_with_a_compiler_has_the_kernel():
    assert state_kernel.sums(np.zeros(1, np.uint8), [1], 0, 0) == [[0, 0]]
