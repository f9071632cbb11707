"""A tensor as one piece, out of weights that are read and changed a chunk at a time."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import takewhile

import numpy as np

from bloomery.sync.codec.layout import Chunk, Layout, Tensor, Weights
from bloomery.sync.foreign.changed import Bits, Changed
from bloomery.sync.state_hash import UNSIGNED
from bloomery.types.tensor_file import ITEM_BYTES


def read(weights: Weights, tensor: Tensor) -> Bits:
    """Its elements [numel]; a view or a copy, which nobody writes to."""
    pieces = []
    for chunk in _chunks(weights.layout, tensor):
        begin, end = _within(chunk, tensor)
        pieces.append(weights.read(chunk)[begin:end])
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate([np.zeros(0, UNSIGNED[ITEM_BYTES[tensor.dtype]]), *pieces])


def write(weights: Weights, tensor: Tensor, changed: Changed) -> None:
    """Give its elements their new values, the chunks in order."""
    for chunk in _chunks(weights.layout, tensor):
        first, (begin, end) = chunk.first - tensor.first, _within(chunk, tensor)
        some = slice(*np.searchsorted(changed.positions, (first + begin, first + end)))
        if some.start < some.stop:
            weights.write(chunk, (changed.positions[some] - first).astype(np.uint32), changed.values[some])


def _chunks(layout: Layout, tensor: Tensor) -> Iterator[Chunk]:
    """Those that have elements of it."""
    if not tensor.numel:
        return iter(())
    number = bisect_right(range(layout.chunk_count), tensor.first, key=lambda each: layout.chunk(each).first) - 1
    later = map(layout.chunk, range(number, layout.chunk_count))
    return takewhile(lambda chunk: chunk.first < tensor.first + tensor.numel, later)


def _within(chunk: Chunk, tensor: Tensor) -> tuple[int, int]:
    """From which to which of the chunk's elements they are the tensor's."""
    return max(0, tensor.first - chunk.first), min(chunk.numel, tensor.first + tensor.numel - chunk.first)
