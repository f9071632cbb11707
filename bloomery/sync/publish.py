"""Publishing a snapshot: the weights blob first, then the manifest that names it, so that a manifest never points at nothing."""

from collections.abc import Callable

from bloomery.obs.failpoints import failpoint
from bloomery.sync.manifest import Kind, Manifest, describe, digest

Write = Callable[[str, bytes], None]


def weights_key(blob: bytes) -> str:
    """Where a weights blob lives: equal weights share one blob."""
    return key_of(digest(blob))


def key_of(blob_digest: str) -> str:
    """The same from the blob's digest."""
    return f"snapshots/{blob_digest}.safetensors"


def manifest_key(version: str) -> str:
    """Where the manifest of a version lives."""
    return f"manifests/{version}"


def card_key(version: str) -> str:
    """Where the fidelity card of a version lives, once it was measured."""
    return f"fidelity/{version}.json"


def publish(
    write: Write,
    blob: bytes,
    *,
    kind: Kind,
    run_id: str,
    step: int,
    base: str,
    parent: str,
    template_hash: str,
    numerics: str,
    rank: int,
    alpha: float,
    targets: tuple[str, ...],
) -> Manifest:
    """Write both blobs durably; repeating it writes the same bytes to the same keys."""
    manifest = Manifest(
        kind=kind,
        run_id=run_id,
        step=step,
        base=base,
        parent=parent,
        template_hash=template_hash,
        numerics=numerics,
        rank=rank,
        alpha=alpha,
        targets=targets,
        key=weights_key(blob),
        size_bytes=len(blob),
        tensors=describe(blob),
    )
    write(manifest.key, blob)
    failpoint("snapshot.weights.written")
    write(manifest_key(manifest.version), manifest.to_json())
    return manifest
