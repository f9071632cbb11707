"""The linear state hash of a set of tensors: what says that the numbers in a memory are those that were published, in whatever layout they lie there.

`h = sum over all elements of key(seed, i) * bits_i mod 2**64`, with `key(seed, i) = splitmix64(seed + i) | 1`. `bits_i` are an element's raw bits as
an unsigned number, and `i` is its index among all elements of the set in canonical order: the tensors in the order of their published names, each
C-contiguous. There are two seeds. A sum does not care in which order or by whom its terms are added, so hashes of shards add up to that of the whole
(the root of a set is the sum of its tensors' hashes), and when elements change, the hash changes by `change`, at the cost of these elements alone.

What it catches: every change of a single element, because keys are odd. Two values that changed places, and any other fault that does not know the
keys, but for a chance of at most 2**-32 per seed among float32 and 2**-48 among 16-bit elements, which have fewer low bits to lose; both seeds miss
together with the square of that. What it does not: elements whose bits are all zero add nothing, so names, shapes and dtypes belong beside a hash,
where the manifest has them. It is no cryptographic hash either: whoever wants to can write other numbers with the same sums, so what comes over a
network or from a disk is held against blake3 (`manifest`) first.

One pass over the elements in C where there is a compiler (`state_kernel`), in numpy otherwise; the same sums.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bloomery.sync import state_kernel

SEEDS: Final = (0x243F6A8885A308D3, 0xA4093822299F31D0)
"""Digits of pi, far enough apart that no set of tensors is so large that an element's two keys are also two keys of others."""
MASK: Final = (1 << 64) - 1
_HEX_DIGITS: Final = 32
_HEX: Final = re.compile(f"[0-9a-f]{{{_HEX_DIGITS}}}")
_BLOCK: Final = 1 << 15
"""Elements whose keys lie in a processor's own cache."""
UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""By the bytes of an element."""

Bits = NDArray[Any]
"""Elements [n] as unsigned numbers of 1, 2, 4 or 8 bytes."""


@dataclass(frozen=True, slots=True)
class StateHash:
    """The sums of both seeds."""

    one: int = 0
    two: int = 0

    def __add__(self, other: "StateHash") -> "StateHash":
        return StateHash((self.one + other.one) & MASK, (self.two + other.two) & MASK)

    def __str__(self) -> str:
        return f"{self.one:016x}{self.two:016x}"

    @classmethod
    def parse(cls, text: str) -> "StateHash":
        """What `str` wrote; ValueError for anything else."""
        if _HEX.fullmatch(text) is None:
            raise ValueError(f"`{text}` is no state hash: {_HEX_DIGITS} hexadecimal digits")
        return cls(int(text[:16], 16), int(text[16:], 16))


NOTHING: Final = StateHash()
"""Of no elements, or of zeros."""


def total(hashes: Iterable[StateHash]) -> StateHash:
    """Of a whole, from the hashes of its parts."""
    one = two = 0
    for each in hashes:
        one, two = one + each.one, two + each.two
    return StateHash(one & MASK, two & MASK)


def elements(data: bytes | memoryview, item_bytes: int) -> Bits:
    """The raw bits of values that lie back to back, little-endian; a view."""
    return np.frombuffer(data, np.dtype(UNSIGNED[item_bytes]).newbyteorder("<"))


def hash_elements(bits: Bits, first: int) -> StateHash:
    """Of neighbouring elements [n], the first of which has index `first`."""
    return hash_parts(bits, [len(bits)], first)[0]


def hash_parts(bits: Bits, stops: Sequence[int], first: int) -> list[StateHash]:
    """Of each of the parts that neighbouring elements [n] consist of and that end before `stops`, in one pass: what many small tensors cost is mostly
    one call for each."""
    bits = np.ascontiguousarray(bits)
    if bits.dtype.kind != "u":
        raise TypeError(f"a state hash is one of raw bits, not of {bits.dtype}: give a view as unsigned numbers")
    starts = keys_from(first)
    if (sums := state_kernel.sums(bits, stops, starts[0], starts[1])) is None:
        sums = [[_sum(bits[begin:end], (start + begin) & MASK) for start in starts] for begin, end in pairwise((0, *stops))]
    return [StateHash(*each) for each in sums]


def change(indices: NDArray[Any], old: Bits, new: Bits, first: int = 0) -> StateHash:
    """What to add to a hash when the elements at `indices` [n], each named once and counted from index `first`, become `new` [n]."""
    if old.shape != indices.shape or new.shape != indices.shape or old.dtype != new.dtype or old.dtype.kind != "u":
        raise TypeError(f"as many indices as raw bits of one unsigned type: not {indices.shape}, {old.dtype} {old.shape}, {new.dtype} {new.shape}")
    at, old, new = np.ascontiguousarray(indices, np.uint64), np.ascontiguousarray(old), np.ascontiguousarray(new)
    starts = keys_from(first)
    if (sums := state_kernel.change(at, old, new, starts[0], starts[1])) is None:
        # Differences wrap around like the sums that they go into.
        by = new.astype(np.uint64) - old.astype(np.uint64)
        sums = [int((_keys(at + np.uint64(start)) * by).sum(dtype=np.uint64)) for start in starts]
    return StateHash(*sums)


def keys_from(first: int) -> tuple[int, int]:
    """Where the keys of both seeds begin, of elements that are counted from this index."""
    one, two = ((seed + first) & MASK for seed in SEEDS)
    return one, two


def _sum(bits: Bits, start: int) -> int:
    found, offsets = 0, np.arange(min(_BLOCK, len(bits)), dtype=np.uint64)
    for place in range(0, len(bits), _BLOCK):
        block = bits[place : place + _BLOCK]
        keys = _keys(offsets[: len(block)] + np.uint64((start + place) & MASK))
        keys *= block
        found = (found + int(keys.sum(dtype=np.uint64))) & MASK
    return found


def _keys(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`splitmix64(x) | 1`; arrays wrap around without a word, as they should here."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x |= np.uint64(1)
    return x
