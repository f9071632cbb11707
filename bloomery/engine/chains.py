"""How versions of whole models travel: as what changed since the version before, in a chain of their run (`sync.chain`) beside the blobs.

`Chains` writes those of the runs that this process trains, and reads those of all. A version many of whose elements changed, as they do in float32,
is written whole and raw: to tell them apart would take longer than a disk takes for them.
"""

import logging
import math
from pathlib import Path
from threading import Lock, Thread
from typing import Final

from bloomery.disk.mapped import mapped_file, nameless_file
from bloomery.models.decoder import Decoder
from bloomery.models.load import fill, stored_tensors
from bloomery.models.rests import rest
from bloomery.obs.failpoints import failpoint
from bloomery.store.blobs import Blobs
from bloomery.sync import live
from bloomery.sync.chain.keys import Keys
from bloomery.sync.chain.publisher import PublishConfig, Publisher
from bloomery.sync.chain.retention import RetainConfig, sweep, touch
from bloomery.sync.codec.delta import BaseWeights
from bloomery.sync.codec.layout import Weights
from bloomery.sync.manifest import Manifest
from bloomery.sync.run_chain import RunChain, chain_folder, changed_share, weights_of
from bloomery.sync.torch_weights import TorchWeights
from bloomery.types.errors import BloomeryError, Conflict
from bloomery.types.objects import Objects
from bloomery.types.operations import Travelled

log = logging.getLogger(__name__)

_HOLDER: Final = "engine"
"""Of leases: a run has one engine at a time, and its next life takes over at once."""
_MOST_CHANGED: Final = 1 / 8
"""Share of the elements from which on a version is written whole."""
_SPAN_SHARE: Final = 1 / 8
"""Of the weights' bytes, what merged deltas may take of the memory in which a run is trained."""
_SWEPT_EVERY: Final = 50
"""Versions from one sweep to the next."""
_RETAIN: Final = RetainConfig(grace_s=3600.0, reader_s=math.inf)
"""As long as a version without a name stays at least: what rows hold is claimed much more often than that (`services.housekeeping`), and stays
claimed while nobody is there to say so."""


class Chains:
    """Those of all runs of a store. One thread at a time publishes; any thread reads."""

    def __init__(self, blobs: Blobs, keys: Keys) -> None:
        self._blobs, self._keys = blobs, keys
        self._readers: dict[str, RunChain] = {}
        self._writers: dict[str, _Writer] = {}
        self._lock = Lock()

    def publish(self, manifest: Manifest, blob: bytes) -> Travelled:
        """Have a version be in the chain of its run, durably; repeating it finds it there."""
        run_id = manifest.run_id
        try:
            return self._writer(run_id).publish(manifest, blob)
        except Conflict:
            # Nobody needed the chain and it was removed, or another engine writes: opening it anew tells. That may be what was refused.
            self._writers.pop(run_id, None)
            return self._writer(run_id).publish(manifest, blob)

    def forget(self, run_id: str) -> None:
        """A run is not trained here any more."""
        if (writer := self._writers.pop(run_id, None)) is not None:
            writer.close()

    def has(self, run_id: str) -> bool:
        """Whether a run has a chain."""
        return bool(self._reader(run_id).sequences())

    def whole(self, manifest: Manifest) -> memoryview:
        """The blob of a version, in a file without a name, made of the newest base before it and what changed since."""
        try:
            return self._reader(manifest.run_id).whole(manifest, self._blobs.directory)
        except BloomeryError:
            self._want_base(manifest.run_id)
            raise

    def patched(self, manifest: Manifest, before: Decoder, have: str) -> Decoder:
        """A copy of what is in memory, a version in state `have` of the same run, with what changed since. It has to be proved to be the version."""
        copy = Decoder(before.config, dtype=before.dtype, device=before.device).requires_grad_(False)
        rest()
        into = TorchWeights(stored_tensors(copy))
        try:
            self._reader(manifest.run_id).become(into, manifest.state, have, lambda: fill(copy, live.Published(before)))
        except BloomeryError:
            self._want_base(manifest.run_id)
            raise
        return copy

    def _want_base(self, run_id: str) -> None:
        """Who cannot read a version shall be able to read the next one."""
        if (writer := self._writers.get(run_id)) is not None:
            writer.publisher.want_base()

    def _reader(self, run_id: str) -> RunChain:
        with self._lock:
            if run_id not in self._readers:
                self._readers[run_id] = RunChain.among(self._blobs.objects, run_id, trusted=self._keys.trusted)
            return self._readers[run_id]

    def _writer(self, run_id: str) -> "_Writer":
        if run_id not in self._writers:
            objects = self._blobs.objects(chain_folder(run_id))
            self._writers[run_id] = _Writer(objects, self._reader(run_id), run_id, self._blobs.directory, self._keys)
        return self._writers[run_id]


class _Writer:
    """Of the chain of one run: it keeps the weights of the newest version, in a file that has no name."""

    def __init__(self, objects: Objects, reader: RunChain, run_id: str, scratch: Path | None, keys: Keys) -> None:
        config = PublishConfig(base_codec="raw", span_share=_SPAN_SHARE, parts=False, scratch=scratch)
        self.publisher = Publisher.open(objects, run_id, holder=_HOLDER, config=config, signer=keys.signer, trusted=keys.trusted)
        self._objects, self._reader, self._scratch, self._trusted = objects, reader, scratch, keys.trusted
        self._newest: tuple[str, Weights] | None = None
        """With its state hash."""
        self._told: tuple[int, Travelled] | None = None
        """Of the newest version that this process published, by its number."""
        self._unswept = 0
        self._sweeping: Thread | None = None

    def publish(self, manifest: Manifest, blob: bytes) -> Travelled:
        """See `Chains`."""
        new = weights_of(blob)
        if (found := self._reader.find(manifest.state)) is not None and found.layout == new.layout.hash:
            # What a process that died had published is published again when its operations are.
            # It is to say the same then. Whoever removes chains that nobody writes to sees the one, or is seen by the other.
            touch(self._objects)
            self.publisher.lease.renew()
            if self._told is not None and self._told[0] == found.sequence:
                return self._told[1]
            return self._reader.travelled(found, _changed(self._reader.before(found), new))
        old = self._before()
        changed = _changed(old, new)
        told_apart = changed is not None and changed <= _MOST_CHANGED
        published = self.publisher.publish(old if told_apart else None, new)
        failpoint("engine.chain.published")
        kept = weights_of(_kept(blob, self._scratch)) if published.base is None else BaseWeights(published.base)
        self._newest = (manifest.state, kept)
        self._sweep_now_and_then()
        travelled = self._reader.travelled(published.manifest, changed)
        self._told = published.sequence, travelled
        return travelled

    def _sweep_now_and_then(self) -> None:
        self._unswept += 1
        if self._unswept < _SWEPT_EVERY or (self._sweeping is not None and self._sweeping.is_alive()):
            return
        self._unswept = 0
        # Hundreds of keys go, each of which a disk is waited for: beside the step, which waits for one of them at most.
        self._sweeping = Thread(target=self._sweep, name="sweep", daemon=True)
        self._sweeping.start()

    def _sweep(self) -> None:
        try:
            sweep(self._objects, self.publisher.lease, trusted=self._trusted, config=_RETAIN)
        except (BloomeryError, OSError) as error:
            # The version is there, and the next sweep finds what this one left.
            log.warning("run %s: its chain was not swept: %s", self.publisher.lease.run, error)

    def close(self) -> None:
        """Let whoever trains the run next write at once."""
        try:
            self.publisher.lease.release()
        except BloomeryError as error:
            log.warning("the lease of run %s was not released (%s): who takes it waits for a term", self.publisher.lease.run, error.message)

    def _before(self) -> Weights | None:
        """The newest version's weights, which a new life of the engine reads; None where there is none that can be read."""
        newest = self.publisher.newest
        if newest is None:
            return None
        root = newest.manifest.new_root
        if self._newest is None or self._newest[0] != root:
            try:
                self._newest = (root, self._reader.read(root))
            except BloomeryError as error:
                log.warning("run %s: %s; its chain begins anew", newest.manifest.run, error.message)
                self.publisher.want_base()
                return None
        return self._newest[1]


def _changed(old: Weights | None, new: Weights) -> float | None:
    """Share of the elements; None where nothing is known to compare with."""
    return None if old is None or old.layout.hash != new.layout.hash else changed_share(old, new)


def _kept(blob: bytes, scratch: Path | None) -> memoryview:
    """The same bytes in a file that goes with them, so that they need no memory."""
    with nameless_file(scratch) as file:
        file.write(blob)
        return mapped_file(file)
