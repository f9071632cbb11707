"""What `plain` and `plain_tight` compute, with loops that numba compiles (`loops`): for machines without a C compiler."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bloomery.sync.codec import bits, loops, plain, plain_tight
from bloomery.sync.codec.native import REASONS
from bloomery.sync.codec.numbers import Changes, Differences, Number
from bloomery.sync.codec.plain import FAR, Streams
from bloomery.sync.state_hash import Bits, StateHash, keys_from
from bloomery.types.errors import Corrupt

BYTES: Final = 9
"""That a number takes at most, whatever it is written with."""
Whole = NDArray[np.int64]


class Jitted:
    """See `plain`, as for all of them."""

    def find(self, old: Bits, new: Bits, kind: Number) -> Differences:
        if len(old) != len(new):
            raise ValueError(f"{len(old)} elements become {len(new)}")
        old, new = np.require(old, kind.dtype, ["C", "A"]), np.require(new, kind.dtype, ["C", "A"])
        indices, by = np.empty(len(old), np.uint32), np.empty(len(old), kind.dtype)
        found = loops.find(_words(old), _words(new), old, new, *_turn(kind), indices, by)
        # Copies: what nobody touched of the room was never memory, and goes.
        return Differences(indices[:found].copy(), by[:found].copy())

    def pack(self, differences: Differences, kind: Number) -> Streams:
        changes = len(differences.indices)
        last = int(differences.indices[-1]) if changes else 0
        rooms = (changes + last // FAR + 1, changes + changes // FAR + 1, changes)
        gaps, exception_gaps, sizes = (np.empty(room, np.uint8) for room in rooms)
        signs, wide = np.zeros((changes + 7) // 8, np.uint8), np.empty(changes, kind.dtype)
        ends = loops.pack(*differences, _turn(kind)[1], gaps, signs, exception_gaps, sizes, wide)
        far = wide[: ends[3]].astype(kind.dtype.newbyteorder("<")).view(np.uint8)
        return Streams(gaps[: ends[0]], signs, exception_gaps[: ends[1]], sizes[: ends[2]], far)

    def unpack(self, streams: Streams, count: int, kind: Number) -> Differences:
        indices, by = np.empty(len(streams.gaps), np.uint32), np.empty(len(streams.gaps), kind.dtype)
        changes = _read(loops.unpack(*streams, count, _turn(kind)[1], indices, by))
        return Differences(indices[:changes], by[:changes])

    def pack_tight(self, old: Bits, found: Differences, kind: Number) -> bytes:
        if int(found.indices[-1]) >= len(old):
            raise IndexError(f"an element behind the last of {len(old)}")
        return plain_tight.pack(np.require(old, kind.dtype, ["C", "A"]), found, kind, _Steps())

    def decode(self, streams: Streams, old: Bits, kind: Number, first: int, state: StateHash) -> Changes:
        old = np.require(old, kind.dtype, ["C", "A"])
        indices, values = np.empty(len(streams.gaps), np.uint32), np.empty(len(streams.gaps), kind.dtype)
        changes, *added = loops.decode(*streams, old, *_turn(kind), *self.keys(first), indices, values)
        changes = _read(changes)
        return Changes(indices[:changes], values[:changes], state + StateHash(*map(int, added)))

    def decode_fast(self, payload: memoryview, old: Bits, kind: Number, first: int, state: StateHash) -> Changes:
        data, old = np.frombuffer(payload, np.uint8), np.require(old, kind.dtype, ["C", "A"])
        room = min(len(old), len(data))
        indices, values = np.empty(room, np.uint32), np.empty(room, kind.dtype)
        changes, *added = loops.decode_fast(data, old, *_turn(kind), *self.keys(first), indices, values)
        changes = _read(changes)
        return Changes(indices[:changes], values[:changes], state + StateHash(*map(int, added)))

    def decode_tight(self, payload: memoryview, old: Bits, kind: Number, first: int, state: StateHash) -> Changes:
        old = np.require(old, kind.dtype, ["C", "A"])
        indices, by = plain_tight.unpack(payload, old, kind, _Steps())
        values = np.empty(len(indices), kind.dtype)
        added = loops.settle(old, indices, by, *_turn(kind), *self.keys(first), values)
        return Changes(indices, values, state + StateHash(*map(int, added)))

    def put(self, flat: Bits, first: int, indices: NDArray[np.uint32], values: Bits) -> None:
        if not flat.flags.carray:
            # In pieces, at odd places, or not to be written to, which numpy refuses.
            plain.put(flat, first, indices, values)
        elif not loops.write(flat, first, indices, values):
            raise IndexError(f"an element behind the last of {len(flat)}")

    def keys(self, first: int) -> tuple[Any, Any]:
        """Where those of both seeds begin; with None for both nothing is proved, by which `bench.delta` sees what proving takes."""
        one, two = keys_from(first)
        return np.uint64(one), np.uint64(two)


class _Reader(bits.Reader):
    """Reads many numbers at a time."""

    def __init__(self, payload: memoryview) -> None:
        super().__init__(payload)
        self._data, self._at, self._end = np.frombuffer(payload, np.uint8), 0, 8 * len(payload)

    def fixed(self, width: int) -> int:
        if self._at + width > self._end:
            raise Corrupt("the payload ends within a number")
        found = int(loops.get(self._data, self._at, width))
        self._at += width
        return found

    def flags(self, count: int) -> NDArray[np.bool_]:
        if self._at + count > self._end:
            raise Corrupt("the payload ends within a number")
        found = np.empty(count, np.bool_)
        loops.flags(self._data, self._at, found)
        self._at += count
        return found

    def grown(self, count: int, k: int, most: int) -> Whole:
        # Each has a bit at least.
        if count > self._end - self._at:
            raise Corrupt("the payload ends within a number")
        found = np.empty(count, np.int64)
        self._at = _read(loops.get_grown(self._data, self._at, self._end, k, most, found))
        return found

    def finish(self) -> None:
        left = self._end - self._at
        if left >= 8 or self.fixed(left):
            raise Corrupt("bits behind the end of the payload")


class _Steps:
    """Of `plain_tight.Steps`."""

    reader: type[bits.Reader] = _Reader

    @staticmethod
    def joined(parts: list[bits.Part]) -> bytes:
        size = sum(BYTES * len(part[0]) for part in parts)
        payload, at = np.zeros(size, np.uint8), 0
        for part in parts:
            at = loops.put_grown(payload, at, *part) if isinstance(part, bits.Grown) else loops.put_all(payload, at, *part)
        return payload[: (at + 7) // 8].tobytes()

    @staticmethod
    def ranks(old: Bits, indices: NDArray[np.uint32], lowest: int, kind: Number) -> Whole:
        found = np.empty(len(indices), np.int64)
        loops.ranks(old, indices, kind.dtype.type(kind.exponent_shift), _table(lowest, kind), found)
        return found

    @staticmethod
    def places(old: Bits, ranks: dict[int, Whole], lowest: int, kind: Number) -> tuple[Whole, Whole]:
        counts = np.array([len(ranks.get(number, ())) for number in range(plain_tight.CLASSES)], np.int64)
        ends, ranked = np.cumsum(counts), np.concatenate(list(ranks.values()))
        at, entries = np.empty(len(ranked), np.int64), np.empty(len(ranked), np.int64)
        shift = kind.dtype.type(kind.exponent_shift)
        if loops.scan(old, shift, _table(lowest, kind), ends - counts, ends, ranked, at, entries) < len(ranked):
            raise Corrupt("gaps that lead behind the last element of a class")
        return at, entries


def _table(lowest: int, kind: Number) -> NDArray[np.uint8]:
    """The class of each exponent."""
    return np.clip(np.arange(1 << kind.exponent_bits) - lowest, 0, plain_tight.CLASSES - 1).astype(np.uint8)


def _words(elements: Bits) -> Bits:
    """The same memory; what does not fill a word at its end is left out."""
    per_word = 8 // elements.itemsize
    return elements[: len(elements) // per_word * per_word].view(np.uint64)


def _turn(kind: Number) -> tuple[Any, Any]:
    """What `ordered` turns around, and where the sign is."""
    return np.uint64(kind.flips), np.uint64(8 * kind.item_bytes - 1)


def _read(result: int) -> int:
    if result < 0:
        raise Corrupt(REASONS[-result - 1])
    return result
