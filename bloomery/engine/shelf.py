"""Where an engine keeps what must survive it, and finds the weights it samples with."""

from bloomery.models.adapters import FusedAdapter
from bloomery.models.decoder import Decoder
from bloomery.obs.failpoints import failpoint
from bloomery.store.blobs import Blobs
from bloomery.sync.manifest import Manifest, verify
from bloomery.sync.publish import manifest_key, publish
from bloomery.train import snapshot
from bloomery.train.snapshot import Snapshot
from bloomery.types.errors import Conflict, Corrupt, NotFound
from bloomery.types.generation import Weights
from bloomery.types.operations import SnapshotResult


class BlobShelf:
    """Checkpoints, snapshots and adapters as blobs."""

    def __init__(self, blobs: Blobs, decoder: Decoder, *, base_hash: str, numerics: str) -> None:
        self._blobs, self._base_hash, self._numerics = blobs, base_hash, numerics
        self._dtype, self._device = str(decoder.dtype).removeprefix("torch."), decoder.device

    def read(self, key: str) -> bytes:
        """The blob `key`."""
        return self._blobs.get(key)

    def write(self, key: str, data: bytes) -> None:
        """Store a blob durably."""
        self._blobs.put(key, data)

    def publish(self, snapshot: Snapshot) -> SnapshotResult:
        """Store the weights and then their manifest, durably."""
        identity = snapshot._asdict()
        manifest = publish(self.write, identity.pop("data"), numerics=self._numerics, **identity)
        failpoint("engine.snapshot.written")
        return SnapshotResult(version=manifest.version, key=manifest.key, size_bytes=manifest.size_bytes, step=manifest.step)

    def adapter(self, weights: Weights) -> FusedAdapter | None:
        """The adapter of a version, proved against its manifest; None for the bare base."""
        if weights.key is None:
            if weights.version != self._base_hash:
                raise NotFound(f"version {weights.version} names no weights, and the base model here is {self._base_hash}")
            return None
        manifest = Manifest.from_json(self._blobs.get(manifest_key(weights.version)))
        self._check(manifest, weights)
        blob = self._blobs.get(weights.key)
        verify(manifest, blob)
        return snapshot.read(blob, rank=manifest.rank, alpha=manifest.alpha, device=self._device)

    def _check(self, manifest: Manifest, weights: Weights) -> None:
        if manifest.version != weights.version:
            raise Corrupt(f"blob `{manifest_key(weights.version)}` holds the manifest of version {manifest.version}")
        if manifest.base != self._base_hash:
            raise Conflict(f"version {weights.version} belongs to base model {manifest.base}, this engine holds {self._base_hash}")
        others = {entry.dtype for entry in manifest.tensors} - {self._dtype}
        if others:
            raise Conflict(
                f"version {weights.version} was published in {min(others)}, this engine computes in {self._dtype}: "
                f"start it with that dtype, or publish the weights again"
            )
