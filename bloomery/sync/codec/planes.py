"""All new elements of a chunk by the bytes of an element: the exponents of weights are alike, and lie beside each other here.

    u32 as many bytes as each byte of an element is stored in | the stored planes, from the lowest byte to the highest

Floats are turned by one bit first, so that the sign is the lowest and the exponent has the highest byte to itself, or begins there. A plane is a
zstd frame where that is shorter.
"""

import struct

import numpy as np

from bloomery.sync.codec.numbers import Changes, Number
from bloomery.sync.codec.raw import everything
from bloomery.sync.codec.streams import packed, unpacked
from bloomery.sync.state_hash import NOTHING, Bits, StateHash
from bloomery.types.errors import Corrupt


def encode(old: Bits, new: Bits, kind: Number) -> bytes | None:
    """Whatever the old ones were; None where nothing is saved."""
    planes = _turned(new, kind, 1).astype(kind.dtype.newbyteorder("<")).view(np.uint8).reshape(-1, kind.item_bytes)
    stored = [packed(np.ascontiguousarray(planes[:, place]).tobytes()) for place in range(kind.item_bytes)]
    payload = b"".join((_head(kind).pack(*map(len, stored)), *stored))
    return payload if len(payload) < new.nbytes else None


def decode(payload: memoryview, old: Bits, kind: Number, first: int = 0, state: StateHash = NOTHING) -> Changes:
    """All of them, changed or not."""
    return everything(old, elements(payload, len(old), kind), first, state)


def elements(payload: memoryview, numel: int, kind: Number) -> Bits:
    """The same without the old ones [numel]."""
    head = _head(kind)
    if len(payload) < head.size:
        raise Corrupt(f"{len(payload)} bytes are too few for a payload")
    stored = head.unpack_from(payload)
    if head.size + sum(stored) != len(payload):
        raise Corrupt(f"planes of {stored} bytes where there are {len(payload) - head.size}")
    planes = np.empty((numel, kind.item_bytes), np.uint8)
    start = head.size
    for place, size in enumerate(stored):
        planes[:, place] = np.frombuffer(unpacked(payload[start : start + size], numel), np.uint8)
        start += size
    values = planes.reshape(-1).view(kind.dtype.newbyteorder("<")).astype(kind.dtype, copy=False)
    return _turned(values, kind, 8 * kind.item_bytes - 1)


def _head(kind: Number) -> struct.Struct:
    return struct.Struct(f"<{kind.item_bytes}I")


def _turned(bits: Bits, kind: Number, by: int) -> Bits:
    """Floats with their bits moved up, those at the top coming back in below."""
    if not kind.exponent_bits:
        return bits
    turned: Bits = (bits << kind.dtype.type(by)) | (bits >> kind.dtype.type(8 * kind.item_bytes - by))
    return turned
