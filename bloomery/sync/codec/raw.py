"""All new elements of a chunk, as they are."""

import numpy as np

from bloomery.sync.codec.numbers import Changes, Number
from bloomery.sync.state_hash import Bits
from bloomery.types.errors import Corrupt


def encode(old: Bits, new: Bits, kind: Number) -> bytes:
    """Whatever the old ones were."""
    return new.tobytes()


def decode(payload: memoryview, old: Bits, kind: Number) -> Changes:
    """All of them, changed or not."""
    if len(payload) != len(old) * kind.item_bytes:
        raise Corrupt(f"{len(payload)} bytes are not {len(old)} elements of {kind.item_bytes}")
    return everything(np.frombuffer(payload, kind.dtype).copy())


def everything(values: Bits) -> Changes:
    """These elements, in the places of all that there are."""
    return Changes(np.arange(len(values), dtype=np.uint32), values)
