"""The safetensors layout without torch: 8 bytes of header length, a JSON header, then the values of all tensors back to back.

Who writes puts the values behind `header`, in its order; who reads finds them with `places`.
"""

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from bloomery.types.errors import Corrupt

ITEM_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
START_BYTES: Final = 8
METADATA: Final[Mapping[str, str]] = {"format": "pt"}
"""Of the files of weights that are written here: others expect it."""
_MAX_HEADER_BYTES: Final = 100 << 20
"""As many as the format allows."""
_ALIGNMENT: Final = 8
_REMEMBERED: Final = 8
_REMEMBERED_BYTES: Final = 1 << 16
"""Headers of adapters are; what a longer one takes to read is little beside its values."""


class TensorSpec(NamedTuple):
    """A tensor without its values; `dtype` as safetensors calls it (F32, BF16, ...)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of the values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class TensorPlace(NamedTuple):
    """Where a tensor's values lie in a file, from its first byte on."""

    spec: TensorSpec
    start: int
    stop: int


def header(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file whose values follow in the order of `tensors`; equal arguments give equal bytes."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, spec in tensors.items():
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, start + spec.size_bytes]}
        start += spec.size_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = text + b" " * (-len(text) % _ALIGNMENT)
    return len(padded).to_bytes(START_BYTES, "little") + padded


def header_bytes(start: bytes) -> int:
    """Length of the whole header, from the first `START_BYTES` bytes of a file."""
    return START_BYTES + int.from_bytes(start[:START_BYTES], "little")


def places(data: bytes | memoryview, *, size: int) -> Mapping[str, TensorPlace]:
    """Every tensor of a file of `size` bytes that begins with `data` (its header, or more).

    Whoever publishes or loads a version asks several times, and the versions of a run have one header, so the last ones are remembered.
    """
    begin = header_bytes(bytes(data[:START_BYTES]))
    text = _header_text(data, begin)
    return (_remembered_places if len(text) <= _REMEMBERED_BYTES else _places)(text, begin, size)


def metadata(data: bytes | memoryview) -> dict[str, str]:
    """What the header says beside the tensors."""
    found: dict[str, str] = _header(_header_text(data, header_bytes(bytes(data[:START_BYTES])))).get("__metadata__", {})
    return found


def _places(text: bytes, begin: int, size: int) -> Mapping[str, TensorPlace]:
    found: dict[str, TensorPlace] = {}
    for name, entry in _header(text).items():
        if name == "__metadata__":
            continue
        try:
            if entry["dtype"] not in ITEM_BYTES:
                raise Corrupt(f"tensor `{name}` of a weights file holds {entry['dtype']} numbers, which nobody reads here")
            spec = TensorSpec(entry["dtype"], tuple(entry["shape"]))
            first, last = entry["data_offsets"]
            counts = all(type(size) is int and size >= 0 for size in (*spec.shape, first, last))
            fits = counts and last - first == spec.size_bytes and last <= size - begin
        except (TypeError, KeyError, ValueError) as error:
            raise Corrupt(f"tensor `{name}` of a weights file has no form: {error!r}") from error
        if not fits:
            raise Corrupt(f"a weights file of {size} bytes does not hold its tensor `{name}`")
        found[name] = TensorPlace(spec, begin + first, begin + last)
    _check_apart(found)
    return MappingProxyType(found)


_remembered_places = lru_cache(_REMEMBERED)(_places)


def _check_apart(places: Mapping[str, TensorPlace]) -> None:
    """Whoever writes to a tensor writes to no other."""
    stop, before = 0, ""
    for name, place in sorted(places.items(), key=lambda item: item[1][1:]):
        if place.start < stop and place.start < place.stop:
            raise Corrupt(f"tensors `{before}` and `{name}` of a weights file lie in the same bytes")
        stop, before = max(stop, place.stop), name


def _header_text(data: bytes | memoryview, stop: int) -> bytes:
    if stop > _MAX_HEADER_BYTES:
        raise Corrupt(f"a weights file claims a header of {stop} bytes: it is no safetensors file")
    return bytes(data[START_BYTES:stop])


def _header(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"a weights file has no safetensors header: {error}") from error
    if not isinstance(found, dict):
        raise Corrupt("a weights file has no safetensors header")
    return found
