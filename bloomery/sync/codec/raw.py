"""All new elements of a chunk, as they are."""

import numpy as np

from bloomery.sync.codec.numbers import Changes, Number
from bloomery.sync.state_hash import NOTHING, Bits, StateHash, change
from bloomery.types.errors import Corrupt


def encode(old: Bits, new: Bits, kind: Number) -> bytes:
    """Whatever the old ones were."""
    return new.tobytes()


def decode(payload: memoryview, old: Bits, kind: Number, first: int = 0, state: StateHash = NOTHING) -> Changes:
    """All of them, changed or not."""
    return everything(old, elements(payload, len(old), kind).copy(), first, state)


def elements(payload: memoryview, numel: int, kind: Number) -> Bits:
    """The same without the old ones: a view [numel]."""
    if len(payload) != numel * kind.item_bytes:
        raise Corrupt(f"{len(payload)} bytes are not {numel} elements of {kind.item_bytes}")
    return np.frombuffer(payload, kind.dtype)


def everything(old: Bits, values: Bits, first: int, state: StateHash) -> Changes:
    """These elements in the places of all that there are. From others than `state` is of, another one comes, although all are written."""
    indices = np.arange(len(values), dtype=np.uint32)
    return Changes(indices, values, state + change(indices, old, values, first))
