"""Chunks of elements in every format, and what hostile bytes are made of."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from bloomery.sync.codec.layout import CHUNK_ELEMENTS
from bloomery.sync.codec.numbers import NUMBERS, Changes, Number
from bloomery.types.errors import Corrupt

Pair = tuple[np.ndarray, np.ndarray]


def special(kind: Number) -> np.ndarray:
    """Both zeros, infinities, nans with payloads of both signs, the smallest and the largest: as bits, each beside its neighbours."""
    width = 8 * kind.item_bytes
    sign, ones = 1 << (width - 1), (1 << width) - 1
    top = ((1 << kind.exponent_bits) - 1) << kind.exponent_shift
    found = {0, 1, sign, sign + 1, sign - 1, ones, top, top + 1, top | sign, (top | sign) + 1, top - 1, ones - 1}
    return np.array(sorted({bits & ones for bits in found}), kind.dtype)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Number, np.ndarray, np.ndarray]:
    """A format, old elements and new ones: any, mostly neighbours, in a few places or all of them."""
    kind = draw(st.sampled_from(sorted(NUMBERS.values(), key=lambda number: number.name)))
    count = draw(st.sampled_from([1, 2, 7, 64, 65, 300, 1500]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = (
        rng.choice(special(kind), count) if draw(st.booleans()) else rng.integers(0, 2 ** (8 * kind.item_bytes), count, np.uint64).astype(kind.dtype)
    )
    reach = draw(st.sampled_from([1, 2, 3, 300, 2 ** (8 * kind.item_bytes - 1)]))
    by = rng.integers(-reach, reach, count, endpoint=True).astype(np.int64) if reach < 2**62 else rng.integers(-(2**63), 2**63 - 1, count)
    by[rng.random(count) > draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))] = 0
    return kind, old, kind.ordered(kind.ordered(old) + by.astype(np.uint64).astype(kind.dtype))


def weights(kind: Number, count: int, *, share: float, seed: int = 0) -> Pair:
    """Elements like those of a matrix, of which a share moved by one, and few of those by more."""
    rng = np.random.default_rng(seed)
    width = 8 * kind.item_bytes
    if kind.exponent_bits:
        middle = (1 << (kind.exponent_bits - 1)) - 1
        exponents = np.clip(middle - rng.geometric(0.4, count) - 2, 0, None).astype(np.uint64)
        mantissas = rng.integers(0, 1 << kind.exponent_shift, count, np.uint64)
        signs = rng.integers(0, 2, count, np.uint64) << np.uint64(width - 1)
        old = (signs | exponents << np.uint64(kind.exponent_shift) | mantissas).astype(kind.dtype)
    else:
        old = rng.integers(0, 1 << min(width, 62), count, np.uint64).astype(kind.dtype)
    by = np.where(rng.random(count) < 0.1, rng.integers(-400, 400, count), rng.choice([-1, 1], count))
    by[rng.random(count) >= share] = 0
    return old, kind.ordered(kind.ordered(old) + by.astype(np.int64).astype(np.uint64).astype(kind.dtype))


def applied(old: np.ndarray, changes: Changes) -> np.ndarray:
    """New elements, from old ones that stay as they are."""
    new = old.copy()
    new[changes.indices] = changes.values
    return new


def damaged(payload: bytes, rng: np.random.Generator) -> bytes:
    """With a few bits turned, bytes replaced, cut out or put in, or the end missing."""
    found = bytearray(payload)
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(0, max(len(found), 1)))
        match rng.integers(0, 6):
            case 0 if found:
                found[place] ^= 1 << int(rng.integers(0, 8))
            case 1 if found:
                found[place] = int(rng.choice([0, 1, 127, 128, 254, 255]))
            case 2:
                del found[place : place + int(rng.integers(1, 9))]
            case 3:
                found[place:place] = rng.bytes(int(rng.integers(1, 9)))
            case 4:
                del found[place:]
            case 5 if len(found) >= 4:
                place = int(rng.integers(0, min(len(found) - 3, 33)))
                found[place : place + 4] = int(rng.choice([0, 1, 255, 2**16, 2**20, 2**31, 2**32 - 1])).to_bytes(4, "little")
    return bytes(found)


def survives(decode: Callable[[memoryview], Any], payload: bytes, rng: np.random.Generator, times: int) -> int:
    """How many of so many damaged payloads are read all the same; the others are refused as such, and nothing else happens."""
    read = 0
    for _ in range(times):
        try:
            decode(memoryview(damaged(payload, rng)))
        except Corrupt:
            continue
        read += 1
    return read


EVERY = pytest.mark.parametrize("kind", NUMBERS.values(), ids=list(NUMBERS))
FULL = CHUNK_ELEMENTS
