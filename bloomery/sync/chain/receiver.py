"""A reader of a chain: it has a version, gets the next one ready beside it, and changes to it between two steps.

    receiver = Receiver.open(objects, weights, "run-7", folder=Path("reader-0"))
    receiver.join()                       # whatever version there is, into weights that nobody uses yet
    while True:
        if receiver.stage() is not None:  # fetched, verified and decoded, while the weights are used
            receiver.flip()               # between two steps: nothing but writing what changed
            receiver.settle()             # while the weights are used
        receiver.scrub()                  # between two steps: a 64th of the weights is still what it should be

What is refused leaves the weights as they are: signatures, parents, epochs and hashes come before the first byte is decoded, and everything is
decoded before the first element is written. A process that dies within a flip finds, when it opens its weights again, every chunk in one version or
the other or in between, and makes them one version. One thread drives a receiver; `join`, `flip`, `roll_back`, `scrub` and `mend` alone write to
weights.

Memory: `FetchConfig.memory_bytes` for what is fetched, three copies of a chunk with its changes for what is decoded, 32 bytes a chunk for hashes, and
the manifests. What was fetched and what is staged lie in files of `folder`.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import numpy as np

from bloomery.obs.failpoints import failpoint
from bloomery.sync.chain import state as states
from bloomery.sync.chain.decode import Decoded, Hop, opened, through
from bloomery.sync.chain.download import Downloads, FetchConfig
from bloomery.sync.chain.keys import Verifier
from bloomery.sync.chain.parts import most_bytes
from bloomery.sync.chain.plan import Move, Versions, read_versions, shortest
from bloomery.sync.chain.readers import check_name, name_version
from bloomery.sync.chain.recovery import Found, look
from bloomery.sync.chain.repair import Rebuilder
from bloomery.sync.chain.staging import FLIPPED, STAGED, Changed, Staged, StagingFile
from bloomery.sync.chain.state import State, Table, Version, row, state_at
from bloomery.sync.codec.layout import Chunk, Weights
from bloomery.sync.state_hash import Bits, StateHash
from bloomery.types.errors import BloomeryError, Conflict, Corrupt, Gone
from bloomery.types.objects import Objects

_OBJECTS = "objects"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiveConfig:
    """How a reader reads."""

    fetch: FetchConfig = field(default_factory=FetchConfig)
    scrub_share: int = 64
    """Each scrub looks at one of so many parts of the weights."""
    name: str = ""
    """Under which the reader tells the store what it needs (`readers`), so that nobody removes it; without one it tells nothing."""


class Flipped(NamedTuple):
    """A change of versions."""

    sequence: int
    elements: int
    """That changed."""


class Scrubbed(NamedTuple):
    """Numbers of chunks that were looked at, and of those that were made anew."""

    checked: list[int]
    mended: list[int]


class Receiver:
    """`open` makes it; close it when it is done."""

    def __init__(
        self, objects: Objects, weights: Weights, folder: Path, trusted: Sequence[Verifier], config: ReceiveConfig, state: State, table: Table | None
    ) -> None:
        """`table`: of what the weights hold, None where that is no version."""
        self.weights = weights
        self.downloads = Downloads(objects, folder / _OBJECTS, config.fetch, at_most=most_bytes(weights.layout))
        self._objects, self._folder, self._trusted, self._config = objects, folder, trusted, config
        self._state, self._table = state, table
        self._versions: Versions = {}
        self._staged: Staged | None = None
        self._rebuilder: Rebuilder | None = None
        self._next_scrub = 0
        self._unsettled = False
        self._flipped = False
        """Whether the file of what is staged is that of the last flip."""

    @classmethod
    def open(
        cls,
        objects: Objects,
        weights: Weights,
        run: str,
        *,
        folder: Path,
        trusted: Sequence[Verifier] = (),
        config: ReceiveConfig | None = None,
    ) -> Self:
        """Find out what the weights are, which takes a pass over them, and end a flip that was killed.

        `folder` is this reader's own. Weights that are no version any more, as memory is after a restart, have to `join`; where only some of their
        chunks are none, these are made anew. The store is asked only for that.
        """
        config = config or ReceiveConfig()
        if config.name:
            check_name(config.name)
        folder.mkdir(parents=True, exist_ok=True)
        state = states.load(folder, run, weights.layout.hash)
        found = look(weights, folder, state)
        receiver = cls(objects, weights, folder, trusted, config, state, found.table)
        try:
            receiver._recover(found)
        except BaseException:
            receiver.close()
            raise
        return receiver

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """What is held stays; what was staged and not flipped to is forgotten when the folder is opened again."""
        self.downloads.close()
        self.settle()

    @property
    def sequence(self) -> int | None:
        """The version that the weights hold, None before a join."""
        return None if self._state.held is None else self._state.held.version.sequence

    @property
    def staged(self) -> int | None:
        """The version that the next flip leads to."""
        return None if self._staged is None else self._staged.stop.sequence

    def look(self) -> int:
        """Read the manifests that are new; the number of the newest version."""
        self._versions = read_versions(self._objects, self._state.run, self._trusted, known=self._state.known, read=self._versions)
        self._rebuilder = None
        return max(self._versions)

    def join(self, to: int | None = None) -> int:
        """Fill weights that nobody uses with a version, the newest without `to`; its number. From what they hold already, if that is a version.

        A join that was killed begins anew, without fetching again what was fetched.
        """
        self.settle()
        newest = self.look()
        to = newest if to is None else to
        if self._table is not None and self._state.held is None:
            self._recognise()
        have = self.sequence
        if have != to:
            way = self._way(to, have)
            hops = self._hops(way)
            self.abort()
            # What follows is neither version until it is done, and the hashes of the old one would say of a part that it is to be made anew.
            self._save(msgspec.structs.replace(self._state, held=None, flipping=""))
            before, self._table = self._table, None
            self._become(self._version(to), self._install(hops, before))
        # Who holds it already tells the store again: what he told in a former life may be too long ago to count.
        self._unsettled = True
        self.settle()
        return to

    def stage(self, to: int | None = None) -> int | None:
        """Get a version ready, the newest without `to`, while the weights are used: its number, None where they hold it.

        Corrupt, Forbidden, Gone or Unavailable say why a version cannot be had; nothing has changed then.
        """
        if self.sequence is None:
            raise Conflict("the weights hold no version of the chain: join first")
        self.settle()
        newest = self.look()
        to = newest if to is None else to
        if to == self.sequence:
            return None
        if to == self.staged:
            return to
        self.abort()
        hops = self._hops(self._way(to, self.sequence))
        failpoint("chain.stage.fetched")
        self._staged = self._decode(hops, to)
        failpoint("chain.stage.decoded")
        self._save(msgspec.structs.replace(self._state, flipping=self._staged.hash))
        failpoint("chain.stage.armed")
        return to

    def flip(self) -> Flipped:
        """Change to what is staged, between two steps. Fails as a whole: what was written is taken back.

        Nothing else is written and nobody is asked: `settle` does that when steps run again.
        """
        staged = self._staged
        if staged is None:
            raise Conflict("nothing is staged: stage a version first")
        self._write(staged, forth=True)
        failpoint("chain.flip.written")
        self._staged, self._flipped = None, True
        self._become(staged.stop, staged.new_table.copy())
        return Flipped(staged.stop.sequence, staged.elements)

    def settle(self) -> None:
        """Have the folder and the store know what was flipped to; else the next `stage`, or `close`, does. A process that dies before finds out."""
        if self._flipped:
            (self._folder / STAGED).replace(self._folder / FLIPPED)
            self._flipped = False
            failpoint("chain.flip.kept")
        if self._unsettled:
            self._save(self._state, self._table)
            self._unsettled = False
            failpoint("chain.flip.held")
            self._name_version()

    def abort(self) -> None:
        """Forget what is staged; the weights are as they were."""
        if self._staged is not None:
            self._staged = None
            self._save(msgspec.structs.replace(self._state, flipping=""))
            (self._folder / STAGED).unlink(missing_ok=True)

    def roll_back(self) -> Flipped:
        """Go back to the version before the last flip, between two steps, from what that flip left: nothing is fetched.

        Whatever was staged since is forgotten. Conflict if there was none, or if the weights are not what it made of them.
        """
        self.settle()
        self.abort()
        try:
            before = Staged(self._folder / FLIPPED, self.weights.layout)
        except FileNotFoundError as error:
            raise Conflict("there was no flip that could be taken back") from error
        if self._state.held is None or self._state.held.version != before.stop:
            raise Conflict(
                f"the last flip led to version {before.stop.sequence}, and the weights hold {self.sequence}: it was taken back, or they joined"
            )
        self._save(msgspec.structs.replace(self._state, flipping=before.hash))
        self._write(before, forth=False)
        failpoint("chain.back.written")
        self._become(before.start, before.old_table.copy())
        return Flipped(before.start.sequence, before.elements)

    def scrub(self) -> Scrubbed:
        """Look whether the next part of the weights is what it should be, and make anew what is not, between two steps."""
        table = self._held_table()
        count = self.weights.layout.chunk_count
        size = -(-count // self._config.scrub_share)
        checked = [number % count for number in range(self._next_scrub, self._next_scrub + min(size, count))]
        self._next_scrub = (self._next_scrub + size) % max(1, count)
        damaged = [number for number in checked if states.hash_chunk(self.weights, self.weights.layout.chunk(number)) != state_at(table, number)]
        self.mend(damaged)
        return Scrubbed(checked, damaged)

    def mend(self, numbers: Iterable[int]) -> None:
        """Make these chunks anew, between two steps: what the store has of the held version replaces what they are."""
        table = self._held_table()
        for number in numbers:
            chunk = self.weights.layout.chunk(number)
            self._write_whole(chunk, self._rebuilt(chunk, state_at(table, number)))
            failpoint("chain.mend.chunk")

    def _recover(self, found: Found) -> None:
        """Make one version of what was found: chunks that are not what the table says are written from what is staged, or made anew."""
        if found.version is None:
            if self._state.held is not None or self._state.flipping:
                self._save(msgspec.structs.replace(self._state, held=None, flipping=""))
            return
        for changed, bits in found.to_write:
            self.weights.write(changed.chunk, changed.indices, bits)
            failpoint("chain.recover.chunk")
        assert self._table is not None
        self._state = msgspec.structs.replace(self._state, held=states.held(found.version, self._table))
        layout = self.weights.layout
        suspects = [layout.chunk(number) for number in found.suspects]
        damaged = [chunk.number for chunk in suspects if states.hash_chunk(self.weights, chunk) != state_at(self._table, chunk.number)]
        if damaged:
            self.look()
            self.mend(damaged)
        self._flipped = found.flipped
        self._become(found.version, self._table)
        self.settle()

    def _recognise(self) -> None:
        """Weights that came from elsewhere may be a version, such as the model that the run began with."""
        assert self._table is not None
        root = states.root_of(self._table)
        for number, link in self._versions.items():
            if link.manifest.new_root == root and link.manifest.layout == self.weights.layout.hash:
                self._become(self._version(number), self._table)
                return

    def _way(self, to: int, have: int | None) -> list[Move]:
        if to not in self._versions:
            raise Gone(f"{self._objects.name}: there is no version {to}: there are {min(self._versions)} to {max(self._versions)}")
        if (layout := self._versions[to].manifest.layout) != self.weights.layout.hash:
            raise Conflict(f"version {to} has tensors of layout {layout}, and these weights have {self.weights.layout.hash}: open others for it")
        if have is not None and have > to:
            have = None
        return shortest(self._versions, to, have=have)

    def _hops(self, way: Sequence[Move]) -> list[Hop]:
        self.downloads.keep_only(move.step.object for move in way)
        held = self._state.held
        paths = [(move, self.downloads.fetch(move.step.object)) for move in way]
        return [opened(move, path, self.weights.layout, self._versions, held.version.root if held else None) for move, path in paths]

    def _install(self, hops: Sequence[Hop], held: Table | None) -> Table:
        """Write whole chunks; the table of what they are now. `held`: of what they were."""
        table = held if hops and hops[0].move.start is not None else None
        found = np.zeros((self.weights.layout.chunk_count, 2), np.uint64)
        for chunk in self.weights.layout.chunks():
            before = None if table is None else Decoded(self.weights.read(chunk), state_at(table, chunk.number))
            after = through(hops, chunk, before)
            if before is None or after.bits is not before.bits:
                self._write_whole(chunk, after.bits)
            found[chunk.number] = row(after.state)
            failpoint("chain.join.chunk")
        return found

    def _decode(self, hops: Sequence[Hop], to: int) -> Staged:
        table, held = self._held_table(), self._state.held
        assert held is not None
        target = np.zeros_like(table)
        file = StagingFile(self._folder)
        try:
            for chunk in self.weights.layout.chunks():
                changed, state = self._decoded(hops, chunk, state_at(table, chunk.number))
                target[chunk.number] = row(state)
                if len(changed.indices):
                    file.add(changed)
                failpoint("chain.stage.chunk")
            if (root := states.root_of(target)) != self._versions[to].manifest.new_root:
                raise Corrupt(f"what was decoded comes to state {root}, and version {to} is {self._versions[to].manifest.new_root}")
            return file.finish(self.weights.layout, (held.version, table), (self._version(to), target))
        except BaseException:
            file.discard()
            raise

    def _decoded(self, hops: Sequence[Hop], chunk: Chunk, state: StateHash) -> tuple[Changed, StateHash]:
        """What changes of a chunk. If it is not what it should be, what makes it so is among the changes."""
        live = before = self.weights.read(chunk)
        try:
            found = through(hops, chunk, Decoded(live, state))
        except Corrupt:
            if states.hash_chunk(self.weights, chunk) == state:
                raise
            # Whoever goes back goes to what should have been there.
            before = self._rebuilt(chunk, state)
            found = through(hops, chunk, Decoded(before, state))
        if found.bits is live:
            return Changed(chunk, np.zeros(0, np.uint32), live[:0], live[:0]), found.state
        different = found.bits != live
        if before is not live:
            different |= found.bits != before
        indices = np.flatnonzero(different).astype(np.uint32)
        return Changed(chunk, indices, before[indices], found.bits[indices]), found.state

    def _write(self, staged: Staged, *, forth: bool) -> None:
        written: list[Changed] = []
        try:
            for changed in staged.changes():
                written.append(changed)
                self.weights.write(changed.chunk, changed.indices, changed.new if forth else changed.old)
                failpoint("chain.flip.chunk")
        except BaseException:
            for changed in reversed(written):
                self.weights.write(changed.chunk, changed.indices, changed.old if forth else changed.new)
            raise

    def _write_whole(self, chunk: Chunk, bits: Bits) -> None:
        indices = np.flatnonzero(self.weights.read(chunk) != bits).astype(np.uint32)
        self.weights.write(chunk, indices, bits[indices])

    def _rebuilt(self, chunk: Chunk, expected: StateHash) -> Bits:
        held = self._state.held
        assert held is not None
        if self._rebuilder is None:
            if not self._versions:
                self.look()
            fetch = self._config.fetch
            self._rebuilder = Rebuilder(
                self._objects, self.downloads, self.weights.layout, self._versions, held.version.sequence, part_bytes=fetch.range_bytes
            )
        return self._rebuilder.rebuild(chunk, expected)

    def _version(self, number: int) -> Version:
        manifest, hash_ = self._versions[number]
        return Version(epoch=manifest.epoch, sequence=number, hash=hash_, root=manifest.new_root)

    def _become(self, version: Version, table: Table) -> None:
        newest = self._state.newest
        if newest is None or version.sequence > newest.sequence:
            newest = version
        self._table, self._rebuilder, self._unsettled = table, None, True
        self._state = msgspec.structs.replace(self._state, newest=newest, held=states.held(version, table), flipping="")

    def _save(self, state: State, table: Table | None = None) -> None:
        states.save(self._folder, state, table)
        self._state = state

    def _held_table(self) -> Table:
        if self._state.held is None or self._table is None:
            raise Conflict("the weights hold no version of the chain: join first")
        return self._table

    def _name_version(self) -> None:
        if self._config.name and self.sequence is not None:
            # A store that is away for a moment must not undo a flip that is done; what is told late is told with the next one.
            with suppress(BloomeryError):
                name_version(self._objects, self._config.name, self.sequence)
