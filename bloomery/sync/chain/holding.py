"""What a reader has: its weights, which version they are, and the chain in which others lie.

Of that version it keeps the state hash of every chunk, in memory and in its folder, and beside it the manifests that it has read. Chunks of it are
made anew here, because whoever opens, stages or scrubs weights may find one that is not what it should be.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from bloomery.obs.failpoints import failpoint
from bloomery.sync.chain import state as states
from bloomery.sync.chain.decode import Hop, opened
from bloomery.sync.chain.download import Downloads, FetchConfig
from bloomery.sync.chain.keys import Verifier
from bloomery.sync.chain.parts import most_bytes
from bloomery.sync.chain.plan import Move, Versions, read_versions, shortest
from bloomery.sync.chain.readers import name_version
from bloomery.sync.chain.repair import Rebuilder
from bloomery.sync.chain.state import State, Version
from bloomery.sync.codec.layout import Chunk, Weights
from bloomery.sync.codec.states import States, hash_chunk, root_of, state_of
from bloomery.sync.state_hash import Bits, StateHash
from bloomery.types.errors import BloomeryError, Conflict, Corrupt, Gone
from bloomery.types.objects import Objects

_OBJECTS = "objects"


class Holding:
    """Of one reader of one run."""

    def __init__(
        self,
        objects: Objects,
        weights: Weights,
        folder: Path,
        state: State,
        table: States,
        *,
        trusted: Sequence[Verifier],
        fetch: FetchConfig,
        name: str,
    ) -> None:
        """`table`: of what the weights are, whether that is a version or not. `name`: under which the store is told what is held; empty for none."""
        self.weights, self.folder, self.state = weights, folder, state
        self.table: States | None = table
        """None while the weights are being filled."""
        self.versions: Versions = {}
        self.downloads = Downloads(objects, folder / _OBJECTS, fetch, at_most=most_bytes(weights.layout))
        self.unsettled = False
        """Whether the folder and the store do not know yet what is held."""
        self._objects, self._trusted, self._fetch, self._name = objects, trusted, fetch, name
        self._rebuilder: Rebuilder | None = None

    @property
    def sequence(self) -> int | None:
        """The version that the weights hold."""
        return None if self.state.held is None else self.state.held.version.sequence

    @property
    def held_table(self) -> States:
        """Of the version that the weights hold; Conflict where that is none."""
        if self.state.held is None or self.table is None:
            raise Conflict("the weights hold no version of the chain: join first")
        return self.table

    def look(self) -> int:
        """Read the manifests that are new; the number of the newest version."""
        self.versions = read_versions(self._objects, self.state.run, self._trusted, known=self.state.known, read=self.versions)
        self._rebuilder = None
        return max(self.versions)

    def version(self, number: int) -> Version:
        """One that was looked at."""
        manifest, hash_ = self.versions[number]
        return Version(epoch=manifest.epoch, sequence=number, hash=hash_, root=manifest.new_root)

    def way(self, to: int, have: int | None) -> list[Hop]:
        """The objects that lead to a version from version `have`, or from a base where it lies behind that; fetched and verified."""
        if to not in self.versions:
            raise Gone(f"{self._objects.name}: there is no version {to}: there are {min(self.versions)} to {max(self.versions)}")
        if (layout := self.versions[to].manifest.layout) != self.weights.layout.hash:
            raise Conflict(f"version {to} has tensors of layout {layout}, and these weights have {self.weights.layout.hash}: open others for it")
        return self._fetched(shortest(self.versions, to, have=None if have is not None and have > to else have))

    def check_decoded(self, table: States, to: int) -> None:
        """Corrupt where the hashes of all chunks, as they were decoded, are not together what the manifest of version `to` says."""
        if (root := str(root_of(table))) != (promised := self.versions[to].manifest.new_root):
            raise Corrupt(f"what was decoded comes to state {root}, and version {to} is {promised}")

    def become(self, version: Version, table: States) -> None:
        """The weights are this version from now on; `settle` has it known."""
        newest = self.state.newest
        if newest is None or version.sequence > newest.sequence:
            newest = version
        self.table, self._rebuilder, self.unsettled = table, None, True
        self.state = msgspec.structs.replace(self.state, newest=newest, held=states.held(version, table), flipping="")

    def save(self, state: State, table: States | None = None) -> None:
        """Have the folder know it."""
        states.save(self.folder, state, table)
        self.state = state

    def settle(self) -> None:
        """Have the folder, and then the store, know what is held."""
        if self.unsettled:
            self.save(self.state, self.table)
            self.unsettled = False
            failpoint("chain.flip.held")
            self._name_version()

    def damaged(self, numbers: Iterable[int]) -> list[int]:
        """Those of these chunks that are not what they should be."""
        chunks = map(self.weights.layout.chunk, numbers)
        return [chunk.number for chunk in chunks if hash_chunk(self.weights, chunk) != state_of(self.held_table[chunk.number])]

    def mend(self, numbers: Iterable[int]) -> None:
        """Make these chunks anew: what the store has of the held version replaces what they are."""
        table = self.held_table
        for number in numbers:
            chunk = self.weights.layout.chunk(number)
            self.write_chunk(chunk, self.rebuilt(chunk, state_of(table[number])))
            failpoint("chain.mend.chunk")

    def rebuilt(self, chunk: Chunk, expected: StateHash) -> Bits:
        """A chunk of the held version [count], from the store; nothing is written."""
        held = self.state.held
        assert held is not None
        if self._rebuilder is None:
            if not self.versions:
                self.look()
            self._rebuilder = Rebuilder(
                self._objects, self.downloads, self.weights.layout, self.versions, held.version.sequence, part_bytes=self._fetch.range_bytes
            )
        return self._rebuilder.rebuild(chunk, expected)

    def write_chunk(self, chunk: Chunk, bits: Bits) -> None:
        """Of all elements of a chunk those that differ."""
        indices = np.flatnonzero(self.weights.read(chunk) != bits).astype(np.uint32)
        self.weights.write(chunk, indices, bits[indices])

    def _fetched(self, way: Sequence[Move]) -> list[Hop]:
        self.downloads.keep_only(move.step.object for move in way)
        held = self.state.held
        paths = [(move, self.downloads.fetch(move.step.object)) for move in way]
        return [opened(move, path, self.weights.layout, self.versions, held.version.root if held else None) for move, path in paths]

    def _name_version(self) -> None:
        if self._name and self.sequence is not None:
            # A store that is away for a moment must not undo a flip that is done; what is told late is told with the next one.
            with suppress(BloomeryError):
                name_version(self._objects, self._name, self.sequence)
