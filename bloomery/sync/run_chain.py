"""The versions of one run as its chain has them: what a reader makes of its weights, and a version's blob whole.

A version is found by the root that its manifest has, which is the state hash that the chain has of it. Reading trusts nobody: objects are held
against the hashes that name them, what leads from one version to the next against both, and what comes of it all is proved against the version's
manifest by whoever asked.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple, Protocol, Self

import numpy as np
from blake3 import blake3

from bloomery.disk.mapped import room
from bloomery.sync.chain import lease as leases
from bloomery.sync.chain import manifest as manifests
from bloomery.sync.chain import objects as named
from bloomery.sync.chain import readers, retention
from bloomery.sync.chain.keys import Verifier
from bloomery.sync.chain.lease import Lease
from bloomery.sync.chain.manifest import Manifest as ChainManifest
from bloomery.sync.chain.objects import Ref
from bloomery.sync.chain.plan import Known, Move, Versions, read_versions, shortest
from bloomery.sync.codec.choose import CODECS
from bloomery.sync.codec.container import HEADER, WHOLE, Head, head_bytes
from bloomery.sync.codec.delta import Delta
from bloomery.sync.codec.layout import Chunk, Layout, MemoryWeights, Weights
from bloomery.sync.codec.states import root_of, states_of
from bloomery.sync.manifest import Manifest
from bloomery.sync.publish import weights_key
from bloomery.sync.state_hash import UNSIGNED, Bits
from bloomery.types import tensor_file
from bloomery.types.errors import BloomeryError, Corrupt, Forbidden, NotFound
from bloomery.types.objects import Objects
from bloomery.types.operations import Travelled
from bloomery.types.tensor_file import ITEM_BYTES, TensorSpec

FOLDER: Final = "chains"
"""Of the store of blobs: one folder for each run that has a chain."""
_DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ROWS: Final = "rows"
"""The name under which what rows hold is claimed, and the lease is taken."""
_RENEWED_EVERY: Final = 100
"""Removals between two looks at the lease."""


def chain_folder(run_id: str) -> str:
    """Where the chain of a run lies among blobs."""
    return f"{FOLDER}/{run_id}"


class Opened(NamedTuple):
    """An object of a way, verified."""

    move: Move
    delta: Delta


class Target(Weights, Protocol):
    """Weights that a way is put on."""

    def write_all(self, chunk: Chunk, values: Bits) -> None:
        """Give a chunk these elements [numel], which may begin at any byte."""


class RunChain:
    """One run's chain, to be read; from any thread."""

    def __init__(self, objects: Objects, run_id: str, *, trusted: Sequence[Verifier]) -> None:
        """`trusted` must have signed every version, where keys are named."""
        self._objects, self._run_id, self._trusted = objects, run_id, trusted
        self._versions: Versions = {}
        self._known: Known | None = None
        """The newest version that was seen: a chain that ends before it was put back."""
        self._reading = Lock()

    @classmethod
    def among(cls, folders: Callable[[str], Objects], run_id: str, *, trusted: Sequence[Verifier]) -> Self:
        """The chain of a run, where blobs have it; `folders` gives a folder of theirs as objects."""
        return cls(folders(chain_folder(run_id)), run_id, trusted=trusted)

    def find(self, root: str) -> ChainManifest | None:
        """The version with this state hash, the newest of several, for whoever would publish it; None where there is none, or where a sweep may
        remove it before anybody claims it: what leads to it is let go with the base that it begins from, a grace after that has a tombstone."""
        try:
            versions = self._read()
        except NotFound:
            return None
        if (found := _with_root(versions, root)) is None:
            return None
        begins = manifests.key(versions[found].manifest.base)
        if retention.is_buried(self._objects, begins) or self._objects.head(versions[found].manifest.steps[0].object.key) is None:
            return None
        return versions[found].manifest

    def sequences(self) -> dict[str, int]:
        """Numbers of the versions that are there, by their state hashes; none where there is no chain."""
        try:
            return {link.manifest.new_root: number for number, link in sorted(self._read().items())}
        except NotFound:
            return {}

    def claim(self, sequence: int | None) -> None:
        """Have this version, and what came since, stay on behalf of whoever keeps the rows that name it, until this is said again; None for none."""
        if sequence is None:
            readers.leave(self._objects, _ROWS)
        else:
            readers.name_version(self._objects, _ROWS, sequence)

    def published_us(self, sequence: int) -> int:
        """When a version was published, by the clock of the store. NotFound where it was removed."""
        if (found := self._objects.head(manifests.key(sequence))) is None:
            raise NotFound(f"the chain of run {self._run_id} has no version {sequence}: it was let go")
        return found.modified_us

    def fence(self) -> Lease:
        """The lease, taken from whoever has it. He is refused when he publishes next, and opens the chain anew when this one is released."""
        return leases.take(self._objects, self._run_id, _ROWS, term_s=0.0)

    def remove(self, fence: Lease) -> None:
        """Of a run that nobody needs: manifests first, the oldest first, so that what is left at any moment is a chain. The newest stays as what the
        next version follows, a base: so who knows this chain knows that one for what it is, and not for an older copy."""
        spare = self._objects.list(manifests.FOLDER)[:-1]
        for folder in (readers.FOLDER, retention.FOLDER, named.FOLDER):
            spare += self._objects.list(folder)
        for place, stored in enumerate(spare):
            if place % _RENEWED_EVERY == 0:
                fence.renew()
            self._objects.delete(stored.key)

    def way(self, root: str, have: str | None) -> Iterator[Opened]:
        """The objects that lead to the version with state hash `root`, each fetched when the one before it is done: from `have`, or from a base.

        NotFound where the chain does not have the version, Gone where nothing leads to it, Corrupt where the chain contradicts itself.
        """
        versions = self._read()
        if (to := _with_root(versions, root)) is None:
            raise NotFound(f"the chain of run {self._run_id} has no version in state {root}: it was let go, or the chain was put back to before it")
        start = None if have is None else _with_root({number: link for number, link in versions.items() if number <= to}, have)
        for move in shortest(versions, to, have=start):
            yield Opened(move, self._opened(move, versions))

    def become(self, weights: Target, root: str, have: str, bring: Callable[[], None]) -> None:
        """Have weights of anything be the version with state hash `root`; `bring` gives them state `have`, and is called where the way begins there.

        They are neither until this is done, so nobody uses them meanwhile; and what they are then has to be proved.
        """
        brought = False
        for move, delta in self.way(root, have):
            if not brought and move.start is not None:
                bring()
            brought = True
            self._put_on(weights, move, delta)
        if not brought:
            bring()

    def read(self, root: str) -> MemoryWeights:
        """The version with this state hash, in arrays of its own; Corrupt where something else comes of the chain."""
        weights: MemoryWeights | None = None
        for move, delta in self.way(root, None):
            weights = MemoryWeights.zeros(delta.layout) if weights is None else weights
            self._put_on(weights, move, delta)
        assert weights is not None, "a way from nothing has a base"
        if (found := str(root_of(states_of(weights)))) != root:
            raise Corrupt(f"what the chain of run {self._run_id} says of the version in state {root} comes to state {found}")
        return weights

    def before(self, version: ChainManifest) -> MemoryWeights | None:
        """The version before this one; None where there is none, or none that can be read."""
        link = self._versions.get(version.sequence - 1)
        try:
            return None if link is None else self.read(link.manifest.new_root)
        except BloomeryError:
            return None

    def whole(self, manifest: Manifest, scratch: Path | None = None) -> memoryview:
        """The blob of a version, to the byte as it would have been published; Corrupt where something else comes of the chain.

        It lies in a file without a name in the folder `scratch`, so that it need not be in memory, and goes with the last view of it.
        """
        layout = layout_of(manifest)
        specs = {tensor.name: TensorSpec(tensor.dtype, tensor.shape) for tensor in layout.tensors}
        header = tensor_file.header(specs, tensor_file.METADATA)
        blob = room(len(header) + layout.size_bytes, scratch)
        blob[: len(header)] = header
        weights = weights_of(blob)
        for move, delta in self.way(manifest.state, None):
            self._put_on(weights, move, delta)
        if weights_key(blob) != manifest.key:
            raise Corrupt(f"what the chain of run {self._run_id} has of version {manifest.version} is not `{manifest.key}`")
        return blob

    def travelled(self, version: ChainManifest, changed: float | None) -> Travelled:
        """What of a version reaches those who have the one before it; `changed` is the share of elements that differ, where it is known."""
        step = next((step for step in version.steps if step.kind == "delta"), version.steps[0])
        start = self._objects.part(step.object.key, 0, HEADER.size)
        records = Head.parse(self._objects.part(step.object.key, 0, head_bytes(start))).records.array
        codecs = {codec.name.lower(): int(records["length"][records["codec"] == codec].sum()) for codec in CODECS}
        used = {name: size for name, size in codecs.items() if size}
        return Travelled(bytes=step.object.size, whole=step.kind == "base", changed=changed, codecs=used)

    def _read(self) -> Versions:
        with self._reading:
            try:
                versions = read_versions(self._objects, self._run_id, self._trusted, known=self._known, read=self._versions)
            except Forbidden as error:
                # Whoever asks for a version of the run has done nothing wrong.
                raise Corrupt(f"the chain of run {self._run_id} is not what it was: {error.message}") from error
            newest = versions[max(versions)]
            self._versions = versions
            self._known = Known(self._run_id, newest.manifest.epoch, newest.manifest.sequence, newest.hash)
            return versions

    def _opened(self, move: Move, versions: Versions) -> Delta:
        """Held against its name, and against the versions that it leads from and to."""
        where = self._where(move)
        delta = Delta.parse(self._fetched(move.step.object), trusted=True)
        if (delta.kind == "base") != (move.start is None):
            raise Corrupt(f"{where} is a {delta.kind}, and its manifest says `{move.step.kind}`")
        if move.start is not None and str(delta.old_root) != versions[move.start].manifest.new_root:
            raise Corrupt(f"{where} starts from state {delta.old_root}, and version {move.start} is {versions[move.start].manifest.new_root}")
        if str(delta.new_root) != versions[move.stop].manifest.new_root:
            raise Corrupt(f"{where} leads to state {delta.new_root}, and the version is {versions[move.stop].manifest.new_root}")
        return delta

    def _put_on(self, weights: Target, move: Move, delta: Delta) -> None:
        if difference := delta.layout.difference(weights.layout):
            raise Corrupt(f"{self._where(move)} is of another model: {difference}")
        try:
            _apply(delta, weights)
        except Corrupt as error:
            raise Corrupt(f"{self._where(move)} was put on weights that are not version {move.start}: {error.message}") from error

    def _fetched(self, ref: Ref) -> bytes:
        data, _ = self._objects.get(ref.key, at_most=ref.size)
        if blake3(data).hexdigest() != ref.blake3:
            raise Corrupt(f"{self._objects.name}: `{ref.key}` is not what its name says: it is damaged")
        return data

    def _where(self, move: Move) -> str:
        return f"{self._objects.name}: the {move.step.kind} `{move.step.object.key}` of version {move.stop}"


def changed_share(old: Weights, new: Weights) -> float:
    """Of the elements of two sets of one layout, how many differ."""
    differ = sum(int(np.count_nonzero(old.read(chunk) != new.read(chunk))) for chunk in new.layout.chunks())
    return differ / max(1, new.layout.elements)


def layout_of(manifest: Manifest) -> Layout:
    """Of the tensors that a version has."""
    return Layout.of({entry.name: TensorSpec(_DTYPES.get(entry.dtype, entry.dtype), entry.shape) for entry in manifest.tensors})


def weights_of(blob: bytes | memoryview) -> MemoryWeights:
    """A blob as weights, where it lies."""
    places = tensor_file.places(blob, size=len(blob))
    layout = Layout.of({name: place.spec for name, place in places.items()})
    return MemoryWeights(layout, {tensor.name: _elements(blob, tensor.dtype, tensor.numel, places[tensor.name].start) for tensor in layout.tensors})


def _apply(delta: Delta, weights: Target) -> None:
    """Write what changes, chunk by chunk. A payload is held against its checksum alone, and not what it starts from: whoever proves the result does
    both at once."""
    for chunk in weights.layout.chunks():
        record = delta.records[chunk.number]
        if record.codec in WHOLE:
            weights.write_all(chunk, delta.elements(chunk.number))
        elif record.changed:
            changes = delta.changes(chunk.number, weights.read(chunk))
            weights.write(chunk, changes.indices, changes.values)
        elif delta.kind == "base":
            weights.write_all(chunk, np.zeros(chunk.numel, chunk.unsigned))


def _elements(blob: bytes | memoryview, dtype: str, numel: int, start: int) -> Bits:
    return np.frombuffer(blob, UNSIGNED[ITEM_BYTES[dtype]], numel, start)


def _with_root(versions: Versions, root: str) -> int | None:
    return max((number for number, link in versions.items() if link.manifest.new_root == root), default=None)
