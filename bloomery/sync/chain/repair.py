"""A chunk that is not what it should be, made anew from what the store has: from the newest base before it, and what changed since.

Of a base that chunk alone is fetched, by its place and its own hash; deltas on the way are small and are fetched whole, and kept for the next chunk.
"""

import numpy as np

from bloomery.sync.chain.decode import Decoded, Hop, after, opened, through
from bloomery.sync.chain.download import Downloads
from bloomery.sync.chain.objects import Ref
from bloomery.sync.chain.parts import Parts
from bloomery.sync.chain.plan import Move, Versions, shortest
from bloomery.sync.codec.layout import Chunk, Layout
from bloomery.sync.state_hash import Bits, StateHash
from bloomery.types.errors import Corrupt
from bloomery.types.objects import Objects


class Rebuilder:
    """Chunks of one version."""

    def __init__(self, objects: Objects, downloads: Downloads, layout: Layout, versions: Versions, sequence: int, *, part_bytes: int) -> None:
        """Gone where no base leads to the version any more."""
        self._objects, self._downloads, self._layout, self._versions = objects, downloads, layout, versions
        self._part_bytes = part_bytes
        self._way = shortest(versions, sequence, have=None)
        self._base: Parts | Hop | None = None
        self._hops: list[Hop] | None = None

    @property
    def refs(self) -> list[Ref]:
        """Objects that it may fetch whole."""
        return [move.step.object for move in self._way]

    def rebuild(self, chunk: Chunk, expected: StateHash) -> Bits:
        """The chunk's bits [count]. Corrupt if what the store has comes to anything else than `expected`."""
        if self._hops is None:
            self._hops = [self._opened(move) for move in self._way[1:]]
        found = through(self._hops, chunk, self._based(chunk))
        if found.state != expected:
            raise Corrupt(
                f"{self._objects.name}: chunk {chunk.number} made anew comes to state {found.state}, and version {self._way[-1].stop} has {expected}"
            )
        return found.bits

    def _based(self, chunk: Chunk) -> Decoded:
        base = self._way[0]
        if self._base is None:
            parts = base.step.parts
            if parts is None:
                self._base = self._opened(base)
            else:
                self._base = Parts(self._objects, base.step.object, parts, self._layout, part_bytes=self._part_bytes)
                self._check(self._base)
        if isinstance(self._base, Hop):
            return after(self._base.delta, chunk, None, owned=True)
        record = self._base.head.records[chunk.number]
        bits = np.zeros(chunk.numel, chunk.unsigned)
        if record.changed:
            indices, values, found = self._base.head.changes(chunk.number, self._base.payload(chunk.number), bits)
            if found != record.h_new:
                raise Corrupt(
                    f"{self._objects.name}: chunk {chunk.number} of `{base.step.object.key}` comes to {found}, and its record says {record.h_new}"
                )
            bits[indices] = values
        return Decoded(bits, record.h_new)

    def _opened(self, move: Move) -> Hop:
        return opened(move, self._downloads.fetch(move.step.object), self._layout, self._versions, None)

    def _check(self, parts: Parts) -> None:
        """The head alone, as `opened` does it for whole objects."""
        move, head = self._way[0], parts.head
        what = f"{self._objects.name}: the base `{move.step.object.key}` of version {move.stop}"
        if head.kind != "base":
            raise Corrupt(f"{what} is a {head.kind}")
        if difference := head.layout.difference(self._layout):
            raise Corrupt(f"{what} is of another model: {difference}")
        if str(head.new_root) != self._versions[move.stop].manifest.new_root:
            raise Corrupt(f"{what} leads to state {head.new_root}, and the version is {self._versions[move.stop].manifest.new_root}")
