"""Publishing a snapshot: the weights blob first, then the manifest that names it, so that a manifest never points at nothing."""

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from bloomery.obs.failpoints import failpoint
from bloomery.sync.manifest import Kind, Manifest, TensorEntry, describe, digest, root
from bloomery.types.errors import WorkerError
from bloomery.types.probe import ROUNDING, ProbeAnswer, TrainerSide, base_name, probe_key

_FACTOR: Final = re.compile(r"\.lora_([AB])\.weight$")

Write = Callable[[Mapping[str, bytes]], None]
"""Stores blobs in this order; all of them are durable when it returns."""


def weights_key(blob: bytes | memoryview) -> str:
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


def base_state_key(name: str) -> str:
    """Where the state hashes of a base model lie; its name says the dtype too (`types.probe.base_name`)."""
    return f"bases/{name}.json"


def base_blobs(base_hash: str) -> set[str]:
    """All that is kept of a base model that is there, in whatever dtype."""
    return {key for dtype in ROUNDING for name in [base_name(base_hash, dtype)] for key in (base_state_key(name), probe_key(name))}


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
    tokenizer_hash: str = "",
    probe: Callable[[], TrainerSide] | None = None,
    probe_numerics: str = "",
    store: Callable[[Manifest], None] | None = None,
) -> Manifest:
    """Write the weights, what their trainer says of the probe, and the manifest durably; repeating it writes the same bytes to the same keys.

    `store` does so with the weights where they do not lie as a blob.

    The `probe` is asked on the caller's thread, while another waits for the disk.

    `probe_numerics`: whose forwards have the bits of this trainer's, which may be more processes than train alike.
    """
    tensors = describe(blob)
    _check_kind(tensors, kind, rank, run_id)
    manifest = Manifest(
        kind=kind,
        run_id=run_id,
        step=step,
        base=base,
        parent=parent,
        template_hash=template_hash,
        tokenizer_hash=tokenizer_hash,
        numerics=numerics,
        rank=rank,
        alpha=alpha,
        targets=targets,
        key=weights_key(blob),
        size_bytes=len(blob),
        state=root(tensors),
        tensors=tensors,
    )
    told = _written_and_told(partial(write, {manifest.key: blob}) if store is None else partial(store, manifest), probe)
    failpoint("snapshot.weights.written")
    documents = {} if told is None else {probe_key(manifest.version): _answer(manifest, told, probe_numerics).to_json()}
    write({**documents, manifest_key(manifest.version): manifest.to_json()})
    return manifest


def _answer(manifest: Manifest, told: TrainerSide, numerics: str) -> ProbeAnswer:
    return ProbeAnswer(version=manifest.version, parent=manifest.parent, numerics=numerics, tokens=told.tokens, logprobs=told.logprobs)


def _written_and_told(write: Callable[[], None], probe: Callable[[], TrainerSide] | None) -> TrainerSide | None:
    """What the probe gives, once the weights are on the disk too; where neither comes about, both reasons are told."""
    with ThreadPoolExecutor(1, thread_name_prefix="snapshot") as beside:
        written = beside.submit(write)
        try:
            told = None if probe is None else probe()
        except Exception as error:
            if (unwritten := written.exception()) is not None:
                error.add_note(f"its weights could not be written either: {unwritten!r}")
            raise
        written.result()
    return told


def _check_kind(tensors: Iterable[TensorEntry], kind: Kind, rank: int, run_id: str) -> None:
    """A run publishes what it said that it trains: an adapter of its rank, or all of a model."""
    for entry in tensors:
        factor = _FACTOR.search(entry.name)
        own_rank = 0 if factor is None else entry.shape[-2 if factor[1] == "A" else -1]
        if (kind == "lora") != (factor is not None) or own_rank not in (0, rank):
            what = f"an adapter of rank {rank}" if kind == "lora" else "a whole model"
            raise WorkerError(
                f"run {run_id} trains {what}, and tensor `{entry.name}` of shape {list(entry.shape)} is none of such: nothing is published"
            )
