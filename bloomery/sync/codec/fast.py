"""Payloads of distances: how far it is to each changed element, whether it became smaller, and by how much where that is more than one.

    u32 bytes of gaps | u32 bytes of exception gaps | gaps | signs | exception gaps | sizes | wide sizes

with the streams of `plain.Streams`, in little-endian bytes. Whoever has a payload knows the differences without the old elements, so payloads can be
added up, and turned around, without them.
"""

from typing import Final

from bloomery.sync.codec import kernels
from bloomery.sync.codec.numbers import Changes, Differences, Number
from bloomery.sync.codec.plain import HEAD, require_head, split
from bloomery.sync.state_hash import NOTHING, Bits, StateHash

WORTH: Final = 0.6
"""The share of the raw bytes from which on these are better: they are read faster, and nothing has to be there before."""


def encode(old: Bits, new: Bits, kind: Number) -> bytes | None:
    """None where all new elements are not much longer."""
    found = kernels.find(old, new, kind)
    payload = encode_differences(*found, len(old), kind)
    return payload if len(payload) <= WORTH * new.nbytes else None


def encode_differences(indices: Bits, by: Bits, count: int, kind: Number) -> bytes:
    """Of `count` elements those at `indices` [n], ascending, moved `by` [n], none by zero."""
    streams = kernels.pack(Differences(indices, by), kind)
    return b"".join((HEAD.pack(len(streams.gaps), len(streams.exception_gaps)), *map(bytes, streams)))


def decode(payload: memoryview, old: Bits, kind: Number, first: int = 0, state: StateHash = NOTHING) -> Changes:
    """What changed, and to what, of elements of which the first has index `first`, and all have the state hash `state`."""
    # Kernels would say something more general.
    require_head(payload)
    return kernels.decode_fast(payload, old, kind, first, state)


def differences(payload: memoryview, count: int, kind: Number) -> Differences:
    """The same of `count` elements that nobody has to have."""
    return kernels.unpack(split(payload), count, kind)
