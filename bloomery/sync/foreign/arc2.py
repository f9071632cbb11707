"""arc_v2, a tensor: the bits of its elements before and after, each against the other (XOR), as one zstd frame."""

from typing import Final

import numpy as np
import zstandard

from bloomery.sync.foreign.bounded import unzstd
from bloomery.sync.foreign.changed import Bits, Changed
from bloomery.types.errors import Corrupt

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
"""How a zstd frame begins."""
_LEVEL: Final = 1
"""Of such bits, nearly all of them zeros, level 3 makes more bytes and takes longer."""


def encode(old: Bits, new: Bits) -> bytes:
    """The payload of elements [n] that were `old` and are `new`."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress((old ^ new).tobytes())


def looks_so(payload: memoryview) -> bool:
    """Whether it may be one, by its first bytes."""
    return bytes(payload[: len(_MAGIC)]) == _MAGIC


def decode(payload: memoryview, old: Bits) -> Changed:
    """What changes of elements [n]; Corrupt for a payload of more or fewer."""
    data = unzstd(payload, at_most=old.nbytes)
    if len(data) != old.nbytes:
        raise Corrupt(f"a zstd frame holds {len(data)} bytes, and {old.nbytes} are due")
    differences = np.frombuffer(data, old.dtype)
    positions = np.flatnonzero(differences)
    return Changed(positions, old[positions] ^ differences[positions])
