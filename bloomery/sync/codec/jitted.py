"""What `plain` and `plain_tight` compute, with loops that numba compiles (`loops`, `tight_loops`): for machines without a C compiler."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bloomery.sync.codec import loops, plain, tight_loops
from bloomery.sync.codec.native import REASONS
from bloomery.sync.codec.numbers import Changes, Differences, Number
from bloomery.sync.codec.plain import FAR, Streams
from bloomery.sync.state_hash import Bits, StateHash, keys_from
from bloomery.types.errors import Corrupt

_TIGHT_WORDS: Final = 3
"""Of a change in `tight` at most; and as many as the head of a payload has, and two behind its end."""
_HEAD_WORDS: Final = 34


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
        old, indices, by = (
            np.require(given, of, ["C", "A"]) for given, of in ((old, kind.dtype), (found.indices, np.uint32), (found.by, kind.dtype))
        )
        words = np.zeros(len(indices) * _TIGHT_WORDS + _HEAD_WORDS, np.uint64)
        bits = tight_loops.pack(old, indices, by, *_exponent(kind), _turn(kind)[1], words)
        return words.view(np.uint8)[: (bits + 7) // 8].tobytes()

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
        old, turn = np.require(old, kind.dtype, ["C", "A"]), _turn(kind)
        words = np.zeros(len(payload) // 8 + 3, np.uint64)
        words.view(np.uint8)[: len(payload)] = np.frombuffer(payload, np.uint8)
        # Each has a bit for its sign.
        room = min(len(old), 8 * len(payload))
        indices, values = np.empty(room, np.uint32), np.empty(room, kind.dtype)
        changes = _read(tight_loops.unpack(words, 8 * len(payload), old, *_exponent(kind), turn[1], indices, values))
        # Their differences lie where they go; copies, as of most of the room nothing is left.
        indices, values = indices[:changes].copy(), values[:changes].copy()
        added = loops.settle(old, indices, values, *turn, *self.keys(first), values)
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


def _words(elements: Bits) -> Bits:
    """The same memory; what does not fill a word at its end is left out."""
    per_word = 8 // elements.itemsize
    return elements[: len(elements) // per_word * per_word].view(np.uint64)


def _exponent(kind: Number) -> tuple[Any, int]:
    """Behind how many bits it begins, and how many it has."""
    return np.uint64(kind.exponent_shift), kind.exponent_bits


def _turn(kind: Number) -> tuple[Any, Any]:
    """What `ordered` turns around, and where the sign is."""
    return np.uint64(kind.flips), np.uint64(8 * kind.item_bytes - 1)


def _read(result: int) -> int:
    if result < 0:
        raise Corrupt(REASONS[-result - 1])
    return result
