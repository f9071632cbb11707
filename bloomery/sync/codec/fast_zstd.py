"""The streams of `fast`, each as a zstd frame where that is shorter.

    u32 bytes of gaps | u32 bytes of exception gaps | u32 bytes of sizes | u32 bytes of wide sizes
    u32 as many bytes as each of those four is stored in | stored gaps | signs | stored exception gaps | stored sizes | stored wide sizes

A stream that is stored in as many bytes as it has is no frame. Signs are noise, and stay as they are.
"""

import struct
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from bloomery.sync.codec import kernels
from bloomery.sync.codec.fast import WORTH
from bloomery.sync.codec.numbers import Changes, Differences, Number
from bloomery.sync.codec.plain import Streams
from bloomery.sync.codec.streams import packed, unpacked
from bloomery.sync.state_hash import NOTHING, Bits, StateHash
from bloomery.types.errors import Corrupt

_HEAD: Final = struct.Struct("<8I")


def encode(old: Bits, new: Bits, kind: Number) -> bytes | None:
    """None where all new elements are not much longer."""
    found = kernels.find(old, new, kind)
    payload = encode_differences(*found, len(old), kind)
    return payload if len(payload) <= WORTH * new.nbytes else None


def encode_differences(indices: Bits, by: Bits, count: int, kind: Number) -> bytes:
    """Of `count` elements those at `indices` [n], ascending, moved `by` [n], none by zero."""
    gaps, signs, *others = map(bytes, kernels.pack(Differences(indices, by), kind))
    streams = (gaps, *others)
    stored = [packed(stream) for stream in streams]
    head = _HEAD.pack(*map(len, streams), *map(len, stored))
    return b"".join((head, stored[0], signs, *stored[1:]))


def decode(payload: memoryview, old: Bits, kind: Number, first: int = 0, state: StateHash = NOTHING) -> Changes:
    """What changed, and to what, of elements of which the first has index `first`, and all have the state hash `state`."""
    return kernels.decode(_streams(payload, len(old), kind), old, kind, first, state)


def differences(payload: memoryview, count: int, kind: Number) -> Differences:
    """The same of `count` elements that nobody has to have."""
    return kernels.unpack(_streams(payload, count, kind), count, kind)


def _streams(payload: memoryview, count: int, kind: Number) -> Streams:
    if len(payload) < _HEAD.size:
        raise Corrupt(f"{len(payload)} bytes are too few for a payload")
    told = _HEAD.unpack_from(payload)
    raw, stored = told[:4], told[4:]
    # Each gap, exception and size is of an element of its own.
    if max(raw[:3]) > count or raw[3] > count * kind.item_bytes:
        raise Corrupt(f"streams of {raw} bytes are more than {count} elements can have")
    signs = len(payload) - _HEAD.size - sum(stored)
    if signs < 0:
        raise Corrupt(f"streams of {stored} bytes where there are {len(payload) - _HEAD.size}")
    ends = list(accumulate((stored[0], signs, *stored[1:]), initial=_HEAD.size))
    gaps, as_they_are, *others = (payload[start:end] for start, end in pairwise(ends))
    whole = [unpacked(stream, size) for stream, size in zip((gaps, *others), raw, strict=True)]
    return Streams(*(np.frombuffer(stream, np.uint8) for stream in (whole[0], as_they_are, *whole[1:])))
