"""`bloomery sync inspect`: what a delta is, what it takes, and what it could take at least."""

import time
from pathlib import Path
from typing import Any

from bloomery.sync.codec import measure
from bloomery.sync.codec.delta import Delta
from bloomery.sync.codec.files import FileWeights
from bloomery.sync.codec.measure import Bound, Counts
from bloomery.sync_files import foreign
from bloomery.sync_files.actions import opened


def inspect(file: Path, base: Path | None) -> dict[str, Any]:
    """As JSON has it. `base`: the weights that the delta starts from, with which all of its changes are counted. Speeds are in GB/s."""
    if foreign.are_foreign([file]):
        return foreign.inspect(file, base)
    began = time.perf_counter()
    with opened([file]) as (delta,):
        verify_s = time.perf_counter() - began
        if base is None:
            counts = measure.count(delta, None) if measure.is_readable(delta, None) else None
        else:
            with FileWeights(base) as weights:
                counts = measure.count(delta, weights)
        return _described(file, delta, counts, with_base=base is not None) | {"speeds": _speeds(delta, counts, verify_s)}


def _described(file: Path, delta: Delta, counts: Counts | None, *, with_base: bool) -> dict[str, Any]:
    head, layout = delta.head, delta.layout
    counted = measure.counted(delta)
    changed = counted.changed if counts is None else sum(counts.tensors.values())
    # Chunks that are written whole count nothing: without the old weights the share is that of the others.
    elements = counted.elements if counts is None else layout.elements
    bits = 8 * (counted.payload_bytes if counts is None else head.payload_bytes)
    return {
        "file": str(file),
        "format": "BD1",
        "kind": delta.kind,
        "layout": layout.hash,
        "old_root": str(delta.old_root),
        "new_root": str(delta.new_root),
        "size_bytes": head.size_bytes,
        "head_bytes": head.head_bytes,
        "payload_bytes": head.payload_bytes,
        "weights_bytes": layout.size_bytes,
        "ratio": layout.size_bytes / head.size_bytes,
        "elements": layout.elements,
        "chunks": layout.chunk_count,
        "counted_elements": elements,
        "changed": changed,
        "changed_share": changed / elements if elements else None,
        "bits_per_changed": bits / changed if changed else None,
        "bounds": _bounds(delta, counts, with_base=with_base),
        "codecs": measure.codecs(delta),
        "tensors": measure.tensors(delta, counts),
    }


def _bounds(delta: Delta, counts: Counts | None, *, with_base: bool) -> dict[str, dict[str, float] | None]:
    order0 = None if counts is None else _bound(measure.order0(delta, counts), delta, counts)
    # Exponents are those of the old weights.
    conditioned = _bound(measure.conditioned(counts), delta, counts) if counts is not None and with_base else None
    return {"order0": order0, "conditioned": conditioned}


def _bound(found: Bound, delta: Delta, counts: Counts) -> dict[str, float] | None:
    """None where nothing changed: then any number of bits per change would do."""
    if not (changed := sum(counts.tensors.values())):
        return None
    return {"bits_per_changed": found.bits / changed, "size_bytes": found.bits / 8, "ratio": 8 * delta.layout.size_bytes / found.bits}


def _speeds(delta: Delta, counts: Counts | None, verify_s: float) -> dict[str, float | None]:
    """Of this one run, on whatever else the machine does: objects that are verified, and weights whose changes are decoded."""
    decoded = counts is not None and counts.decode_s > 0
    return {
        "verify_gb_s": delta.head.size_bytes / verify_s / 1e9,
        "decode_gb_s": counts.decoded_bytes / counts.decode_s / 1e9 if counts is not None and decoded else None,
    }
