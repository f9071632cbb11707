"""Numbers in a stream of bits, the lowest bit of a byte first: written by numpy, read by Python one after the other.

`grown` is the code of all sizes in a `tight` payload. Of a number and a parameter k the number by 2**k is told in ones and a zero, the k bits below
behind it; from the eighth step on steps are twice as long each, so that a number far out costs few bits.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bloomery.types.errors import Corrupt

STEPS: Final = 8
"""Of one length, before they grow."""
WIDTH: Final = 32
"""Bits that the largest number has."""
_WORD: Final = 64

Whole = NDArray[np.uint64]


class Bits(NamedTuple):
    """Numbers [n] in as many bits [n] each, at most 63."""

    numbers: Whole
    widths: Whole


class Grown(NamedTuple):
    """Numbers [n] that are written with k."""

    sizes: NDArray[np.int64]
    k: int


Part = Bits | Grown


def fixed(number: int, width: int) -> Bits:
    """One number."""
    return Bits(np.array([number], np.uint64), np.array([width], np.uint64))


def grown(numbers: NDArray[Any], k: int) -> Bits:
    """Of each the ones and the zero, and what is behind them, in turn."""
    whole = numbers.astype(np.uint64)
    steps = whole >> np.uint64(k)
    beyond = np.maximum(steps, STEPS) - np.uint64(STEPS - 1)
    # Exact below 2**53.
    doublings = (np.frexp(beyond.astype(np.float64))[1] - 1).astype(np.uint64)
    far = steps >= STEPS
    ones = np.where(far, STEPS + doublings, steps)
    begin = np.where(far, (np.uint64(STEPS - 1) + (np.uint64(1) << doublings)) << np.uint64(k), steps << np.uint64(k))
    found = np.empty((2, 2 * len(whole)), np.uint64)
    found[0, ::2], found[1, ::2] = (np.uint64(1) << ones) - np.uint64(1), ones + np.uint64(1)
    found[0, 1::2], found[1, 1::2] = whole - begin, np.uint64(k) + doublings
    return Bits(found[0], found[1])


def parameter(total: int, numbers: int) -> int:
    """k for so many numbers of this sum: the whole part of the binary logarithm of their mean, which is the best or next to it."""
    return max((total // numbers).bit_length() - 1, 0)


def joined(parts: list[Part]) -> bytes:
    """One behind the other, filled up with zeros to a whole byte."""
    written = [grown(*part) if isinstance(part, Grown) else part for part in parts]
    numbers, widths = (np.concatenate([part[side] for part in written]) for side in (0, 1))
    ends = np.cumsum(widths)
    total = int(ends[-1])
    starts = ends - widths
    words = np.zeros(total // _WORD + 2, np.uint64)
    place, shift = starts // np.uint64(_WORD), starts % np.uint64(_WORD)
    np.bitwise_or.at(words, place, numbers << shift)
    # In two steps: by all 64 nothing is moved.
    np.bitwise_or.at(words, place + np.uint64(1), (numbers >> (np.uint64(_WORD - 1) - shift)) >> np.uint64(1))
    return words.astype("<u8").tobytes()[: (total + 7) // 8]


class Reader:
    """Of a payload, never beyond its end."""

    def __init__(self, payload: memoryview) -> None:
        self._payload, self._left = payload, 8 * len(payload)
        # Those that were taken from the payload and not read yet.
        self._bits, self._held, self._byte = 0, 0, 0

    def fixed(self, width: int) -> int:
        """The next number of so many bits."""
        if width > self._left:
            raise Corrupt("the payload ends within a number")
        while self._held < width:
            taken = self._payload[self._byte : self._byte + 64]
            self._bits |= int.from_bytes(taken, "little") << self._held
            self._byte, self._held = self._byte + len(taken), self._held + 8 * len(taken)
        found = self._bits & ((1 << width) - 1)
        self._bits, self._held, self._left = self._bits >> width, self._held - width, self._left - width
        return found

    def flags(self, count: int) -> NDArray[np.bool_]:
        """The next bits."""
        return np.array([self.fixed(1) for _ in range(count)], bool)

    def grown(self, count: int, k: int, most: int) -> NDArray[np.int64]:
        """The next numbers that were written with k; Corrupt if one is above `most`."""
        return np.array([self._grown(k, most) for _ in range(count)], np.int64)

    def _grown(self, k: int, most: int) -> int:
        ones = 0
        while self.fixed(1):
            ones += 1
            if ones >= STEPS + WIDTH:
                raise Corrupt("a number of more bits than any has")
        doublings = max(ones - STEPS, 0)
        begin = ones if ones < STEPS else STEPS - 1 + (1 << doublings)
        found = (begin << k) + self.fixed(k + doublings)
        if found > most:
            raise Corrupt(f"a number of {found} where {most} is possible")
        return found

    def finish(self) -> None:
        """Corrupt if anything is left but the zeros that fill up a byte."""
        if self._left >= 8 or self.fixed(self._left):
            raise Corrupt("bits behind the end of the payload")
