"""Where an engine keeps what must survive it, and finds the weights it samples with."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple
from weakref import ref

from bloomery.engine.chains import Chains
from bloomery.infer.versions import Model
from bloomery.models.decoder import Decoder
from bloomery.models.names import stored_places
from bloomery.models.threads import one_thread
from bloomery.obs.failpoints import failpoint
from bloomery.store.blobs import Blobs
from bloomery.sync.base import base_key, base_state, expected_base, read_state, write_state
from bloomery.sync.chain.keys import Keys
from bloomery.sync.manifest import Manifest, TensorEntry, verify
from bloomery.sync.proof import Expected, expected, prove
from bloomery.sync.publish import manifest_key, publish
from bloomery.train import snapshot
from bloomery.train.snapshot import Snapshot
from bloomery.types.errors import BloomeryError, Conflict, Corrupt, NotFound
from bloomery.types.generation import Weights
from bloomery.types.operations import SnapshotResult, Travelled
from bloomery.types.probe import ProbeAnswer, base_name, probe_key, read_answer

log = logging.getLogger(__name__)

_MANIFESTS: Final = 8
"""So many are remembered, for who asks what a version weighs loads it next; a manifest cannot change under its version."""


class _Read(NamedTuple):
    """A whole model, and what its tensors are to be."""

    decoder: Decoder
    entries: Sequence[TensorEntry]


class _Loaded(NamedTuple):
    """A whole model that was loaded, and what it was proved to be."""

    decoder: ref[Decoder]
    expected: Expected


class BlobShelf:
    """Checkpoints and snapshots as blobs, and the versions among them as weights to sample with."""

    def __init__(self, blobs: Blobs, decoder: Decoder, *, base_hash: str, numerics: str, keys: Keys, tokenizer_hash: str = "") -> None:
        self._tokenizer_hash = tokenizer_hash
        self._blobs, self._decoder, self._base_hash, self._numerics = blobs, decoder, base_hash, numerics
        self._dtype = str(decoder.dtype).removeprefix("torch.")
        self._manifest = lru_cache(_MANIFESTS)(self._read_manifest)
        self._in_float32 = {name for name, place in stored_places(decoder.config) if place.in_float32}
        """Tensors that a model has in float32, whatever dtype it is computed in."""
        self.probe_numerics = numerics
        """Whose forwards have the bits of those here: what is told of probes counts for them."""
        self.one_thread = False
        """Whether one thread gives forwards the bits that all of them give: then it alone answers probes, which are too small for more of them."""
        self.kept_as: Callable[[Decoder], Decoder] = lambda decoder: decoder
        """The only form in which a whole model stays in this process: the one that it is proved in."""
        self._chains = Chains(blobs, keys)
        self._loaded: dict[str, _Loaded] = {}
        """By run, the newest whole model that was loaded: the next one is made of it while it is in memory."""

    def read(self, key: str) -> bytes:
        """The blob `key`."""
        return self._blobs.get(key)

    def write(self, key: str, data: bytes) -> None:
        """Store a blob durably."""
        self._blobs.put(key, data)

    def publish(self, snapshot: Snapshot) -> SnapshotResult:
        """Store the weights and then their manifest, durably. Those of a whole model travel by the chain of its run; where they shall last they lie
        there as a blob too."""
        identity = snapshot._asdict()
        blob, lasts = identity.pop("data"), identity.pop("lasts")
        travelled: list[Travelled] = []

        def store(manifest: Manifest) -> None:
            if manifest.kind == "full":
                travelled.extend(self._sent(manifest, blob))
            if lasts or not travelled:
                self.write(manifest.key, blob)

        with one_thread() if self.one_thread else nullcontext():
            manifest = publish(
                self._blobs.put_all,
                blob,
                store=store,
                numerics=self._numerics,
                probe_numerics=self.probe_numerics,
                tokenizer_hash=self._tokenizer_hash,
                **identity,
            )
        failpoint("engine.snapshot.written")
        sent = travelled[0] if travelled else None
        return SnapshotResult(version=manifest.version, key=manifest.key, size_bytes=manifest.size_bytes, step=manifest.step, travelled=sent)

    def _sent(self, manifest: Manifest, blob: bytes) -> list[Travelled]:
        """Through the chain; nothing where it takes none, and then the blob is what is read."""
        try:
            return [self._chains.publish(manifest, blob)]
        except (BloomeryError, OSError) as error:
            log.error("run %s: its chain takes no version (%s), which is stored whole instead", manifest.run_id, error)
            return []

    def forget(self, run_id: str) -> None:
        """A run is not trained here any more."""
        self._chains.forget(run_id)

    def weigh(self, weights: Weights) -> int:
        """Bytes of the blob of a version; the bare base takes none. Steps wait for it, so it reads no more than its size, and where there is only a
        chain a manifest."""
        if weights.key is None:
            return 0
        try:
            return self._blobs.size(weights.key)
        except NotFound:
            return self._manifest(weights.version).size_bytes

    def load(self, weights: Weights) -> Model:
        """A version, its live tensors proved against its manifest: an adapter on the base model here, or a model of its own."""
        if weights.key is None:
            if weights.version != self._base_hash:
                raise NotFound(f"version {weights.version} names no weights, and the base model here is {self._base_hash}")
            return Model(weights.version, self._decoder, None)
        manifest = self._manifest(weights.version)
        self._check(manifest)
        if manifest.kind == "full":
            decoder, entries = self._model(manifest)
            proof = prove(expected(manifest, entries, b""), self.kept_as(decoder), None)
            self._loaded = {run_id: loaded for run_id, loaded in self._loaded.items() if loaded.decoder() is not None}
            self._loaded[manifest.run_id] = _Loaded(ref(decoder), proof.expected)
            return Model(weights.version, decoder, None, proof, told=self.told(weights.version))
        blob = self._blobs.get(weights.key)
        entries = verify(manifest, blob)
        adapter = snapshot.read(blob, self._decoder, rank=manifest.rank, alpha=manifest.alpha)
        proof = prove(expected(manifest, entries, blob), self._decoder, adapter)
        return Model(weights.version, self._decoder, adapter, proof, told=self.told(weights.version))

    def _model(self, manifest: Manifest) -> _Read:
        """A whole model, and what its tensors are to be: read from its blob where that is there; else made of a version of the run that is in memory,
        or of a base, by what changed since."""
        blob: bytes | memoryview
        try:
            blob = self._blobs.get(manifest.key)
        except NotFound:
            if not self._chains.has(manifest.run_id):
                raise
            if (patched := self._patched(manifest)) is not None:
                return _Read(patched, manifest.tensors)
            blob = self._chains.whole(manifest)
        entries = verify(manifest, blob)
        return _Read(snapshot.read_model(blob, self._decoder), entries)

    def _patched(self, manifest: Manifest) -> Decoder | None:
        """A copy of what is in memory of the same run, with what changed since; None where nothing is."""
        loaded = self._loaded.get(manifest.run_id)
        if loaded is None or (before := loaded.decoder()) is None:
            return None
        return self._chains.patched(manifest, before, str(loaded.expected.root))

    def base(self, directory: Path) -> Expected:
        """What the live tensors of the base model must be, as the first who held it took it from its files."""
        try:
            state = read_state(self._blobs.get(self._base_key))
        except NotFound:
            state = base_state(directory, self._decoder.dtype)
        return expected_base(self._base_hash, state)

    def leave_base(self, known: Expected) -> None:
        """For whoever holds the base later, now that live tensors were found to be so."""
        if not self._blobs.exists(self._base_key):
            self._leave(self._base_key, write_state(known.tensors))

    def told(self, name: str) -> ProbeAnswer | None:
        """What the trainer says of the probe with a version; None where nobody left it."""
        try:
            return read_answer(self._blobs.get(probe_key(name)), name)
        except NotFound:
            return None

    @property
    def base_name(self) -> str:
        """What the base is called where its dtype matters."""
        return base_name(self._base_hash, self._dtype)

    def leave_told(self, answer: ProbeAnswer) -> None:
        """For whoever holds the base later; what numerics of before have left is replaced, and what is damaged."""
        with suppress(Corrupt):
            if self.told(answer.version) == answer:
                return
        self._leave(probe_key(answer.version), answer.to_json())

    def _leave(self, key: str, data: bytes) -> None:
        """What others can do without, and a full disk is to keep no engine from starting."""
        try:
            self._blobs.put(key, data)
        except OSError as error:
            log.error("`%s` cannot be written (%s): whoever holds the base later finds it out anew", key, error)

    @property
    def _base_key(self) -> str:
        return base_key(self._base_hash, self._decoder.dtype)

    def _read_manifest(self, version: str) -> Manifest:
        manifest = Manifest.from_json(self._blobs.get(manifest_key(version)))
        if manifest.version != version:
            raise Corrupt(f"blob `{manifest_key(version)}` holds the manifest of version {manifest.version}")
        return manifest

    def _check(self, manifest: Manifest) -> None:
        if manifest.base != self._base_hash:
            raise Conflict(f"version {manifest.version} belongs to base model {manifest.base}, this engine holds {self._base_hash}")
        for entry in manifest.tensors:
            own = "float32" if entry.name in self._in_float32 else self._dtype
            if entry.dtype != own:
                raise Conflict(
                    f"version {manifest.version} was published with `{entry.name}` in {entry.dtype}, this engine, which computes in {self._dtype}, "
                    f"has that in {own}: start it with the dtype of the version, or publish the weights again"
                )
