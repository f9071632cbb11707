"""The safetensors files that payloads travel in: tensors of bytes, and a text about each in the metadata.

What is read is taken apart strictly, since a header is JSON from a network: it names every byte behind it once, and nothing else.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from bloomery.types import tensor_file
from bloomery.types.errors import Corrupt, shown
from bloomery.types.tensor_file import START_BYTES, TensorSpec

_MAX_HEADER_BYTES: Final = 64 << 20
"""Hundreds of thousands of tensors."""
_METADATA: Final = "__metadata__"
_ENTRY: Final = {"dtype", "shape", "data_offsets"}


class Archive(NamedTuple):
    """Bytes by name, and texts."""

    payloads: dict[str, memoryview]
    metadata: dict[str, str]


def write(payloads: Mapping[str, bytes], metadata: Mapping[str, str]) -> bytes:
    """The file; equal arguments give equal bytes."""
    ordered = dict(sorted(payloads.items()))
    specs = {name: TensorSpec("U8", (len(payload),)) for name, payload in ordered.items()}
    return b"".join([tensor_file.header(specs, dict(sorted(metadata.items()))), *ordered.values()])


def looks_so(start: bytes | memoryview) -> bool:
    """Whether a file that begins with these bytes may be one."""
    return len(start) > START_BYTES and int.from_bytes(start[:START_BYTES], "little") <= _MAX_HEADER_BYTES and start[START_BYTES] == ord("{")


def read(data: memoryview) -> Archive:
    """Its payloads, views of `data`, in the order of their names; Corrupt for a file of anything but bytes."""
    size = int.from_bytes(data[:START_BYTES], "little")
    if len(data) < START_BYTES or size > min(_MAX_HEADER_BYTES, len(data) - START_BYTES):
        raise Corrupt(f"a file of {len(data)} bytes holds no safetensors header")
    header = _parsed(bytes(data[START_BYTES : START_BYTES + size]))
    metadata, values = header.pop(_METADATA, {}), data[START_BYTES + size :]
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise Corrupt("the metadata of a safetensors file are texts")
    spans = {name: _span(name, entry, len(values)) for name, entry in header.items()}
    reached = 0
    for start, stop in sorted(spans.values()):
        if start != reached:
            raise Corrupt(f"the tensors of a safetensors file lie back to back, and byte {min(start, reached)} is of none or of two")
        reached = stop
    if reached != len(values):
        raise Corrupt(f"{len(values) - reached} bytes of a safetensors file are of no tensor")
    return Archive({name: values[start:stop] for name, (start, stop) in sorted(spans.items())}, metadata)


def _span(name: str, entry: Any, size: int) -> tuple[int, int]:
    """Where a payload lies among `size` bytes."""
    if isinstance(entry, dict) and entry.keys() == _ENTRY and entry["dtype"] == "U8":
        match entry["shape"], entry["data_offsets"]:
            case [int(count)], [int(start), int(stop)] if count == stop - start and 0 <= start <= stop <= size:
                return start, stop
    raise Corrupt(f"tensor `{shown(name)}` of a delta is no row of bytes that its file holds")


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"a file has no safetensors header: {shown(str(error))}") from error
    if not isinstance(found, dict):
        raise Corrupt("a file has no safetensors header")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Corrupt("a safetensors header names something twice")
    return found
