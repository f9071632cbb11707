"""What `fast` computes, in numpy: what kernels are held against, and what there is where they are not."""

import struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bloomery.sync.codec.numbers import Changes, Differences, Number
from bloomery.sync.state_hash import Bits, StateHash, change
from bloomery.types.errors import Corrupt

Bytes = NDArray[np.uint8]
FAR: Final = 255
"""Of a gap: go on by so many, and read another. Of a size: it stands among the wide ones."""
HEAD: Final = struct.Struct("<II")
"""Of a payload: bytes of gaps, and of exception gaps."""
_SMALL: Final = 2
"""The smallest size of an exception."""


class Streams(NamedTuple):
    """The parts of a `fast` payload."""

    gaps: Bytes
    """Unchanged elements before each changed one."""
    signs: Bytes
    """A bit for each changed element, set where it became smaller, lowest first."""
    exception_gaps: Bytes
    """Changed elements that moved by one, before each of those that moved by more."""
    sizes: Bytes
    """By how much those moved, less 2, or 255."""
    wide: Bytes
    """By how much those with 255 moved, little-endian."""


def find(old: Bits, new: Bits, kind: Number) -> Differences:
    """Where and by how much `new` differs."""
    at = np.flatnonzero(old != new)
    return Differences(at.astype(np.uint32), kind.ordered(new[at]) - kind.ordered(old[at]))


def settled(old: Bits, differences: Differences, kind: Number, first: int, state: StateHash) -> Changes:
    """What elements become that move by so much, and what becomes of the state hash `state` of all, the first of which has index `first`."""
    indices, by = differences
    before = old[indices]
    values = kind.ordered(kind.ordered(before) + by)
    return Changes(indices, values, state + change(indices, before, values, first))


def put(flat: Bits, first: int, indices: NDArray[np.uint32], values: Bits) -> None:
    """Give elements, at `indices` [n] from `first` on, their new bits."""
    flat[indices.astype(np.int64) + first] = values


def pack(differences: Differences, kind: Number) -> Streams:
    """The parts that say this."""
    negative, size = signs_and_sizes(differences.by, kind)
    exceptions = np.flatnonzero(size > 1)
    large = size[exceptions]
    is_wide = large >= FAR + _SMALL if kind.item_bytes > 1 else np.zeros(len(large), bool)
    sizes = np.where(is_wide, FAR, large - large.dtype.type(_SMALL)).astype(np.uint8)
    wide = large[is_wide].astype(kind.dtype.newbyteorder("<"))
    return Streams(_gaps(differences.indices), np.packbits(negative, bitorder="little"), _gaps(exceptions), sizes, wide.view(np.uint8))


def signs_and_sizes(by: Bits, kind: Number) -> tuple[NDArray[np.bool_], Bits]:
    """Which differences [n] are negative, and how far they go; the one that is its own negative counts as negative."""
    negative = (by >> kind.dtype.type(8 * kind.item_bytes - 1)).astype(bool)
    return negative, np.where(negative, -by, by)


def unpack(streams: Streams, count: int, kind: Number) -> Differences:
    """What was packed of `count` elements; every part is held against what is possible."""
    at = _places(streams.gaps, count, "gaps")
    _refuse_length(streams.signs, (len(at) + 7) // 8, "signs")
    bits = np.unpackbits(streams.signs, bitorder="little")
    if bits[len(at) :].any():
        raise Corrupt("signs of elements that are not there")
    exceptions = _places(streams.exception_gaps, len(at), "exception gaps")
    _refuse_length(streams.sizes, len(exceptions), "sizes")
    far = np.flatnonzero(streams.sizes == FAR)
    _refuse_length(streams.wide, len(far) * kind.item_bytes, "wide sizes")
    size = np.ones(len(at), kind.dtype)
    size[exceptions] = streams.sizes.astype(kind.dtype) + kind.dtype.type(_SMALL)
    size[exceptions[far]] = streams.wide.view(kind.dtype.newbyteorder("<"))
    negative = bits[: len(at)].astype(bool)
    _refuse_sizes(size, negative, exceptions[far], kind)
    return Differences(at.astype(np.uint32), np.where(negative, -size, size))


def decode(streams: Streams, old: Bits, kind: Number, first: int, state: StateHash) -> Changes:
    """What they make of the elements `old`, as `settled` says it."""
    return settled(old, unpack(streams, len(old), kind), kind, first, state)


def decode_fast(payload: memoryview, old: Bits, kind: Number, first: int, state: StateHash) -> Changes:
    """The same of a payload of `fast`."""
    return decode(split(payload), old, kind, first, state)


def split(payload: memoryview) -> Streams:
    """The parts of a payload of `fast`, as long as those before them say; what remains is the last."""
    require_head(payload)
    gap_bytes, exception_gap_bytes = HEAD.unpack_from(payload)
    data = np.frombuffer(payload, np.uint8, offset=HEAD.size)
    gaps, data = _take(data, gap_bytes, "gaps")
    signs, data = _take(data, (_led_to(gaps) + 7) // 8, "signs")
    exception_gaps, data = _take(data, exception_gap_bytes, "exception gaps")
    sizes, wide = _take(data, _led_to(exception_gaps), "sizes")
    return Streams(gaps, signs, exception_gaps, sizes, wide)


def require_head(payload: memoryview) -> None:
    """Corrupt unless a payload of `fast` has one."""
    if len(payload) < HEAD.size:
        raise Corrupt(f"{len(payload)} bytes are too few for a payload")


def _refuse_sizes(size: Bits, negative: NDArray[np.bool_], far: NDArray[np.intp], kind: Number) -> None:
    most = 1 << (8 * kind.item_bytes - 1)
    if (kind.item_bytes == 1 and len(far)) or (size[far] < FAR + _SMALL).any():
        raise Corrupt("a wide size that is none")
    # Of a byte 254 and 2 are zero.
    if (size == 0).any() or (size > most).any() or (size[~negative] == most).any():
        raise Corrupt("a size that no difference has")


def _gaps(indices: NDArray[Any]) -> Bytes:
    """Of ascending places [n]: what lies between them, as bytes."""
    between = np.diff(indices.astype(np.int64), prepend=np.int64(-1)) - np.int64(1)
    skips, last = np.divmod(between, np.int64(FAR))
    found = np.full(len(indices) + int(skips.sum()), FAR, np.uint8)
    found[np.cumsum(skips + 1) - 1] = last
    return found


def _places(gaps: Bytes, count: int, name: str) -> NDArray[np.intp]:
    """The reverse, among `count` elements."""
    if len(gaps) and gaps[-1] == FAR:
        raise Corrupt(f"{name} that end before they lead anywhere")
    ends = np.flatnonzero(gaps != FAR)
    at = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))
    if len(at) and at[-1] >= count:
        raise Corrupt(f"{name} that lead behind the last of {count} elements")
    return at


def _led_to(gaps: Bytes) -> int:
    """How many places."""
    return int(np.count_nonzero(gaps != FAR))


def _take(data: Bytes, size: int, name: str) -> tuple[Bytes, Bytes]:
    if size > len(data):
        raise Corrupt(f"{size} bytes of {name} where there are {len(data)}")
    return data[:size], data[size:]


def _refuse_length(stream: Bytes, length: int, name: str) -> None:
    if len(stream) != length:
        raise Corrupt(f"{len(stream)} bytes of {name} where {length} belong")
