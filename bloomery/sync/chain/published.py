"""What weights were when a version was made of them, so that the next delta can start from there without hashing all of them once more.

The state hashes of a version are in the records of its object. That the weights which are given as the old ones are still those is told by a checksum
of every chunk, xxh3, taken and compared when the chunk is read anyway; it goes through memory several times as fast as the state hash. Nothing that
looks at less than all elements could tell: whatever changed behind the publisher's back, in the old weights or in both, may be any of them.
"""

from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from bloomery.sync.codec.layout import Chunk, Weights
from bloomery.sync.codec.states import States
from bloomery.sync.state_hash import Bits


class ChunkHashes(NamedTuple):
    """Of every chunk of a version: its state hash [chunks, 2], and its checksum [chunks]."""

    states: States
    checksums: NDArray[np.uint64]


class NotAsPublished(Exception):
    """A chunk is not what it was when the version was made."""


class Summed:
    """Weights that are read, and the checksums of all chunks once that is done."""

    def __init__(self, weights: Weights) -> None:
        self.layout, self._weights = weights.layout, weights
        self.checksums = np.zeros(weights.layout.chunk_count, np.uint64)

    def read(self, chunk: Chunk) -> Bits:
        """See `Weights`."""
        bits = self._weights.read(chunk)
        self.checksums[chunk.number] = _checksum(bits)
        return bits

    def write(self, chunk: Chunk, indices: NDArray[np.uint32], values: Bits) -> None:
        """What is published does not change meanwhile."""
        raise TypeError("weights that are published are read only")


class AsPublished:
    """Weights of which every chunk is what it was, or NotAsPublished is raised when it is read."""

    def __init__(self, weights: Weights, known: ChunkHashes) -> None:
        """`known`: of the same layout."""
        self.layout, self._weights, self._checksums = weights.layout, weights, known.checksums

    def read(self, chunk: Chunk) -> Bits:
        """See `Weights`."""
        bits = self._weights.read(chunk)
        if _checksum(bits) != self._checksums[chunk.number]:
            raise NotAsPublished(f"chunk {chunk.number}")
        return bits

    def write(self, chunk: Chunk, indices: NDArray[np.uint32], values: Bits) -> None:
        """Nor does what was published."""
        raise TypeError("weights that were published are read only")


def _checksum(bits: Bits) -> int:
    return xxhash.xxh3_64_intdigest(bits.data)
