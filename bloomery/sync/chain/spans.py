"""What a writer remembers of the last steps, so that deltas over 4, 16 and 64 of them can be encoded without a copy of the weights from then.

Of every element that changed it keeps what it was: the newest weights with these put back are the weights from before. Four steps become one span
of four, four of those one of sixteen, and four of those one of 64. That is 6 bytes an element that changed of 16-bit weights, over at most 7 of the
last 16 steps in full and 6 spans; where all of it is more than a share of the weights, the longest level is given up until it begins anew.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bloomery.sync.chain.manifest import LEVELS
from bloomery.sync.codec import kernels
from bloomery.sync.codec.layout import Chunk, Weights
from bloomery.sync.codec.numbers import NUMBERS
from bloomery.sync.codec.ordered import in_order
from bloomery.sync.codec.states import States, row_of, state_of
from bloomery.sync.state_hash import Bits, change

_FAN: Final = 4
"""Pieces that a level is made of."""


class Before(NamedTuple):
    """Elements of a chunk as they were: indices [n] in order, and bits [n]."""

    indices: NDArray[np.uint32]
    bits: Bits

    @property
    def size_bytes(self) -> int:
        """In memory."""
        return int(self.indices.nbytes + self.bits.nbytes)


class Piece(NamedTuple):
    """What changed between two versions, as it was in the first of them, by the number of the chunk."""

    start: int
    stop: int
    changed: Mapping[int, Before]

    @property
    def size_bytes(self) -> int:
        """In memory."""
        return sum(before.size_bytes for before in self.changed.values())


class Reverted:
    """Weights of an earlier version: those of now, with a piece put back. They are read, and never written to."""

    def __init__(self, now: Weights, piece: Piece) -> None:
        self.layout, self._now, self._changed = now.layout, now, piece.changed

    def read(self, chunk: Chunk) -> Bits:
        """See `Weights`."""
        bits = self._now.read(chunk)
        if (before := self._changed.get(chunk.number)) is None:
            return bits
        bits = bits.copy()
        bits[before.indices] = before.bits
        return bits

    def states(self, now: States) -> States:
        """State hashes of its chunks [chunks, 2], from those of the weights of now, at the cost of what changed."""
        found = now.copy()
        for number, (indices, bits) in self._changed.items():
            chunk = self.layout.chunk(number)
            state = state_of(now[number]) + change(indices, self._now.read(chunk)[indices], bits, chunk.first)
            found[number] = row_of(state)
        return found

    def write(self, chunk: Chunk, indices: NDArray[np.uint32], values: Bits) -> None:
        """Of an earlier version nothing changes."""
        raise TypeError("weights of an earlier version are read only")


class Following(NamedTuple):
    """What is remembered once a step is a version."""

    levels: list[list[Piece]]
    stop: int
    ended: list[Piece]
    """The spans that end with the step, the shortest first."""


class Spans:
    """The pieces of every level. Give it each step in order; a step that does not follow the one before it begins anew."""

    def __init__(self, *, share: float, workers: int = 1) -> None:
        """`share`: of the weights' own bytes, how many it may keep. `workers`: threads that look for what changed."""
        self._share, self._workers = share, workers
        self._levels: list[list[Piece]] = [[] for _ in LEVELS]
        self._stop: int | None = None

    @property
    def size_bytes(self) -> int:
        """Kept in memory."""
        return _size_bytes(self._levels)

    def following(self, old: Weights, new: Weights, chunks: Iterable[int], stop: int) -> Following:
        """Behind the step to version `stop`, in which no other chunks changed. It may never be a version: nothing is remembered before `take`."""
        follows = self._stop == stop - 1
        levels = [list(level) if follows else [] for level in self._levels]
        piece = Piece(stop - 1, stop, dict(_changed(old, new, chunks, self._workers)))
        ended = []
        for place, span in enumerate(LEVELS):
            level = levels[place]
            level.append(piece)
            if stop % span:
                break
            levels[place] = []
            if len(level) < _FAN or level[0].start != stop - span:
                # The longer levels have a gap here, so theirs are not whole either.
                for longer in levels[place + 1 :]:
                    longer.clear()
                break
            piece = _joined(level)
            ended.append(piece)
        for level in reversed(levels):
            if _size_bytes(levels) > self._share * new.layout.size_bytes:
                level.clear()
        return Following(levels, stop, ended)

    def take(self, following: Following) -> None:
        """The step is a version now."""
        self._levels, self._stop = following.levels, following.stop

    def clear(self) -> None:
        """Forget everything: what comes next does not start from what came last."""
        for level in self._levels:
            level.clear()


def _size_bytes(levels: Iterable[Iterable[Piece]]) -> int:
    return sum(piece.size_bytes for level in levels for piece in level)


def _changed(old: Weights, new: Weights, chunks: Iterable[int], workers: int) -> Iterator[tuple[int, Before]]:
    def before(number: int) -> Before:
        chunk = new.layout.chunk(number)
        bits = old.read(chunk)
        indices = kernels.find(bits, new.read(chunk), NUMBERS[chunk.dtype]).indices
        return Before(indices, bits[indices])

    return ((number, found) for number, found in in_order(before, chunks, workers) if len(found.indices))


def _joined(pieces: list[Piece]) -> Piece:
    """One piece of neighbouring ones: of an element that changed in several, what it was before the first."""
    numbers = sorted({number for piece in pieces for number in piece.changed})
    changed = {}
    for number in numbers:
        parts = [piece.changed[number] for piece in pieces if number in piece.changed]
        indices, first = np.unique(np.concatenate([part.indices for part in parts]), return_index=True)
        changed[number] = Before(indices, np.concatenate([part.bits for part in parts])[first])
    return Piece(pieces[0].start, pieces[-1].stop, changed)
