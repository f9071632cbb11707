"""The state hashes of all chunks, as a table: what weights are, chunk by chunk."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.sync.codec.layout import Chunk, Weights
from bloomery.sync.state_hash import MASK, StateHash, hash_elements

States = NDArray[np.uint64]
"""State hashes of all chunks [chunks, 2]."""


def states_of(weights: Weights) -> States:
    """Of weights as they are, in one pass over them."""
    found = np.zeros((weights.layout.chunk_count, 2), np.uint64)
    for chunk in weights.layout.chunks():
        found[chunk.number] = row_of(hash_chunk(weights, chunk))
    return found


def hash_chunk(weights: Weights, chunk: Chunk) -> StateHash:
    """Of what is there now."""
    return hash_elements(weights.read(chunk), chunk.first)


def row_of(state: StateHash) -> tuple[int, int]:
    """As it stands in a table."""
    return state.one, state.two


def state_of(row: NDArray[Any]) -> StateHash:
    """What stands there."""
    return StateHash(int(row[0]), int(row[1]))


def root_of(states: NDArray[Any]) -> StateHash:
    """Of all chunks together."""
    one, two = states.sum(axis=0, dtype=np.uint64)
    return StateHash(int(one) & MASK, int(two) & MASK)
