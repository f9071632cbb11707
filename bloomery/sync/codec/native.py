"""`kernel.c`, compiled for this machine when something is first encoded or decoded: what `plain` and `plain_tight` compute, many times as fast."""

import sys
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bloomery.models.compiled import INTEGER, POINTER, Compiled
from bloomery.sync.codec import plain
from bloomery.sync.codec.numbers import Changes, Differences, Number
from bloomery.sync.codec.plain import FAR, Streams
from bloomery.sync.state_hash import Bits, StateHash, keys_from
from bloomery.types.errors import Corrupt

_FIND: Final = (POINTER, POINTER, INTEGER, INTEGER, POINTER, POINTER, POINTER)
_PACK: Final = (POINTER, POINTER, INTEGER, *[POINTER] * 6)
_STREAMS: Final = (POINTER, INTEGER) * 5
_UNPACK: Final = (*_STREAMS, INTEGER, POINTER, POINTER, POINTER)
_DECODED: Final = (POINTER, INTEGER, *[INTEGER] * 3, POINTER, POINTER, POINTER, POINTER)
_DECODE: Final = (*_STREAMS, *_DECODED)
_DECODE_FAST: Final = (POINTER, INTEGER, *_DECODED)
_PUT: Final = (POINTER, INTEGER, INTEGER, POINTER, POINTER, INTEGER, POINTER)
_PACK_TIGHT: Final = (POINTER, INTEGER, INTEGER, INTEGER, POINTER, POINTER, INTEGER, POINTER, POINTER)
_DECODE_TIGHT: Final = (POINTER, INTEGER, POINTER, INTEGER, *[INTEGER] * 5, POINTER, POINTER, INTEGER, POINTER, POINTER)
ARGUMENTS: Final = {
    f"{name}_{item_bytes}": arguments
    for name, arguments in (
        ("find", _FIND),
        ("pack", _PACK),
        ("unpack", _UNPACK),
        ("decode", _DECODE),
        ("decode_fast", _DECODE_FAST),
        ("put", _PUT),
    )
    for item_bytes in (1, 2, 4, 8)
} | {
    f"{name}_{item_bytes}": arguments
    for name, arguments in (("pack_tight", _PACK_TIGHT), ("decode_tight", _DECODE_TIGHT))
    for item_bytes in (1, 2, 4)
}
"""By function."""
REASONS: Final = (
    "gaps that end before they lead anywhere",
    "gaps that lead behind the last element",
    "streams that do not fit each other",
    "signs of elements that are not there",
    "a wide size that is none",
    "a size that no difference has",
    "the payload ends within a number",
    "a number larger than is possible",
    "more changes than there are elements",
    "a form of sizes that is not that of these",
    "a parameter that is not that of its numbers",
    "bits behind the end of the payload",
    "a payload without changes",
    "classes that do not begin where they should",
)
"""Of what is refused, in the order of the enumeration in C."""
_TIGHT_BYTES: Final = 24
"""Of a change at most; and as many as the head of a payload has."""
_HEAD_BYTES: Final = 256


class Native:
    """The functions of one library."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled

    @cached_property
    def there(self) -> bool:
        """Whether this machine has them."""
        return sys.byteorder == "little" and self._compiled.functions is not None

    def find(self, old: Bits, new: Bits, kind: Number) -> Differences:
        """See `plain`, as for all of them."""
        old, new, result = _aligned(old, kind.dtype), _aligned(new, kind.dtype), np.empty(1, np.int64)
        if len(old) != len(new):
            raise ValueError(f"{len(old)} elements become {len(new)}")
        indices, by = np.empty(len(old), np.uint32), np.empty(len(old), kind.dtype)
        self._call("find", kind.item_bytes, old, new, len(old), kind.flips, indices, by, result)
        # Copies: what nobody touched of the room was never memory, and goes.
        return Differences(indices[: result[0]].copy(), by[: result[0]].copy())

    def pack(self, differences: Differences, kind: Number) -> Streams:
        indices, by = _aligned(differences.indices, np.dtype(np.uint32)), _aligned(differences.by, kind.dtype)
        changes, result = len(indices), np.empty(4, np.int64)
        last = int(indices[-1]) if changes else 0
        rooms = (changes + last // FAR + 1, changes + changes // FAR + 1, changes, changes * kind.item_bytes)
        gaps, exception_gaps, sizes, wide = (np.empty(room, np.uint8) for room in rooms)
        signs = np.empty((changes + 7) // 8, np.uint8)
        self._call("pack", kind.item_bytes, indices, by, changes, gaps, signs, exception_gaps, sizes, wide, result)
        return Streams(gaps[: result[0]], signs, exception_gaps[: result[1]], sizes[: result[2]], wide[: result[3]])

    def unpack(self, streams: Streams, count: int, kind: Number) -> Differences:
        result, parts = np.empty(1, np.int64), [part for stream in streams for part in (stream, len(stream))]
        indices, by = np.empty(len(streams.gaps), np.uint32), np.empty(len(streams.gaps), kind.dtype)
        self._call("unpack", kind.item_bytes, *parts, count, indices, by, result)
        changes = _read(result)
        return Differences(indices[:changes], by[:changes])

    def pack_tight(self, old: Bits, found: Differences, kind: Number) -> bytes:
        old, result = _aligned(old, kind.dtype), np.empty(1, np.int64)
        indices, by = _aligned(found.indices, np.dtype(np.uint32)), _aligned(found.by, kind.dtype)
        if int(indices[-1]) >= len(old):
            raise IndexError(f"an element behind the last of {len(old)}")
        payload = np.empty(len(indices) * _TIGHT_BYTES + _HEAD_BYTES, np.uint8)
        self._call("pack_tight", kind.item_bytes, old, len(old), kind.exponent_shift, kind.exponent_bits, indices, by, len(indices), payload, result)
        _read(result)
        return payload[: result[0]].tobytes()

    def decode(self, streams: Streams, old: Bits, kind: Number, first: int, state: StateHash) -> Changes:
        old, room = _aligned(old, kind.dtype), len(streams.gaps)
        parts = [part for stream in streams for part in (stream, len(stream))]
        return self._decode("decode", kind, [*parts, old, len(old), kind.flips], [], room, first, state)

    def decode_fast(self, payload: memoryview, old: Bits, kind: Number, first: int, state: StateHash) -> Changes:
        data, old = np.frombuffer(payload, np.uint8), _aligned(old, kind.dtype)
        # Each has a byte at least.
        room = min(len(old), len(data))
        return self._decode("decode_fast", kind, [data, len(data), old, len(old), kind.flips], [], room, first, state)

    def decode_tight(self, payload: memoryview, old: Bits, kind: Number, first: int, state: StateHash) -> Changes:
        data, old = np.frombuffer(payload, np.uint8), _aligned(old, kind.dtype)
        # Each has a bit for its sign.
        room = min(len(old), 8 * len(data))
        given = [data, len(data), old, len(old), kind.exponent_shift, kind.exponent_bits, kind.flips]
        return self._decode("decode_tight", kind, given, [room], room, first, state)

    def put(self, flat: Bits, first: int, indices: NDArray[np.uint32], values: Bits) -> None:
        if not flat.flags.carray:
            # In pieces, at odd places, or not to be written to, which numpy refuses.
            return plain.put(flat, first, indices, values)
        indices, values, result = _aligned(indices, np.dtype(np.uint32)), _aligned(values, flat.dtype), np.empty(1, np.int64)
        self._call("put", flat.itemsize, flat, len(flat), first, indices, values, len(indices), result)
        if result[0] < 0:
            raise IndexError(f"an element behind the last of {len(flat)}")

    def _decode(self, name: str, kind: Number, given: list[Any], told: list[int], room: int, first: int, state: StateHash) -> Changes:
        indices, values = np.empty(room, np.uint32), np.empty(room, kind.dtype)
        result, sums = np.empty(1, np.int64), np.empty(2, np.uint64)
        self._call(name, kind.item_bytes, *given, *keys_from(first), indices, values, *told, result, sums)
        changes = _read(result)
        return Changes(_filled(indices, changes), _filled(values, changes), state + StateHash(*sums.tolist()))

    def _call(self, name: str, item_bytes: int, *arguments: Any) -> None:
        function = getattr(self._compiled.functions, f"{name}_{item_bytes}")
        function(*(each.__array_interface__["data"][0] if isinstance(each, np.ndarray) else each for each in arguments))


def _filled(room: NDArray[Any], count: int) -> NDArray[Any]:
    """The first so many; a copy of them where most of the room would be held for nothing."""
    return room[:count] if 2 * count >= len(room) else room[:count].copy()


def _aligned(elements: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """In one piece, as C wants them."""
    if elements.dtype == dtype and elements.flags.carray:
        return elements
    return np.require(elements, dtype, ["C_CONTIGUOUS", "ALIGNED"])


def _read(result: NDArray[np.int64]) -> int:
    found = int(result[0])
    if found >= 0:
        return found
    if -found > len(REASONS):
        raise MemoryError("no memory for the changes of a chunk")
    raise Corrupt(REASONS[-found - 1])


NATIVE: Final = Native(Compiled("codec", Path(__file__).parent, ARGUMENTS, instead="numba or numpy"))
