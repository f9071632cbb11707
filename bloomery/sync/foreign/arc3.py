"""arc_v3, a tensor: where elements changed as gaps, their mantissas, and whole those that changed in more than that.

A payload is an envelope, a pickle that names a compression and holds a compressed pickle with all of it. Where that would be larger, and for numbers
without a mantissa, it is a safetensors file with an arc_v2 payload in it. The package takes what it found smallest by a deadline; here equal weights
give equal bytes.
"""

import bz2
import math
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np
import zstandard

from bloomery.sync.codec.layout import MAX_ELEMENTS
from bloomery.sync.foreign import arc2, archive, gaps, mantissas, pickles
from bloomery.sync.foreign.bounded import unbz2, unzstd
from bloomery.sync.foreign.changed import Bits, Changed, checksum_of, read_checksum
from bloomery.sync.foreign.fields import Fields
from bloomery.sync.foreign.gaps import WIDTHS, Positions, Rows
from bloomery.sync.foreign.pickles import Value
from bloomery.types import tensor_file
from bloomery.types.errors import Corrupt, shown
from bloomery.types.tensor_file import TensorSpec

PREFIX: Final = b"ARC3_ENVELOPE\0"
_VERSION: Final = 1
_FIELDS_BYTES: Final = 4096
"""More than the names and numbers of a payload take."""
MOST_DESCRIBED_BYTES: Final = 256 << 20
"""Of a payload whose tensor is not at hand."""
_MOST_SIZES: Final = 64
_LEVEL: Final = 1
_TENSOR, _FALLBACK, _FALLBACK_NAME = "tensor", "fallback_name", "arc_v2"


class Form(NamedTuple):
    """A number with a mantissa: what torch calls its type, and the mantissa's bits."""

    dtype: str
    mantissa_bits: int


FORMS: Final[Mapping[str, Form]] = {
    "F32": Form("torch.float32", 23),
    "F16": Form("torch.float16", 10),
    "BF16": Form("torch.bfloat16", 7),
    "F8_E4M3": Form("torch.float8_e4m3fn", 3),
    "F8_E5M2": Form("torch.float8_e5m2", 2),
}
"""By the name that safetensors has for it."""


def encode(old: Bits, new: Bits, spec: TensorSpec) -> bytes:
    """The payload of a tensor whose elements [n] were `old` and are `new`."""
    checksum = str(checksum_of(new))
    candidates = [archive.write({_TENSOR: arc2.encode(old, new)}, {_TENSOR: checksum, _FALLBACK: _FALLBACK_NAME})]
    if (form := FORMS.get(spec.dtype)) is not None:
        for payload in _payloads(old, new, spec.shape, form, checksum):
            raw = pickles.write(payload)
            for codec, zipped in (("zstd", zstandard.ZstdCompressor(level=_LEVEL).compress(raw)), ("bz2", bz2.compress(raw))):
                candidates.append(PREFIX + pickles.write({"codec": codec, "data": zipped}))
    return min(candidates, key=len)


def decode(payload: memoryview, old: Bits, spec: TensorSpec, checksum: int) -> Changed:
    """What changes of a tensor with elements `old` [n]; Corrupt for a payload of another, or of another checksum."""
    if (fields := _opened(payload, _most_bytes(spec))) is None:
        return arc2.decode(_fallback(payload, checksum), old)
    if (form := FORMS.get(spec.dtype)) is None:
        raise Corrupt(f"numbers of type {spec.dtype} have no mantissa that changes")
    if _begin(fields, spec.shape, form, checksum) == "none":
        fields.done()
        return Changed(np.zeros(0, np.int64), old[:0])
    return _read_changed(fields, old, spec.shape, form)


def looks_so(payload: memoryview) -> bool:
    """Whether it may be one, by its first bytes."""
    return _is_envelope(payload) or archive.looks_so(payload)


class Said(NamedTuple):
    """What a payload says of itself."""

    encoding: str
    size_bytes: int
    elements: int | None
    changed: int | None
    """Elements; None in both for an arc_v2 payload, which knows bytes alone."""


def describe(payload: memoryview) -> Said:
    """Without the tensor that it is of, and so without a look at what it does: Corrupt for one that can be of none."""
    if (fields := _opened(payload, MOST_DESCRIBED_BYTES)) is None:
        if archive.read(payload).payloads.keys() != {_TENSOR}:
            raise Corrupt("a payload that is no envelope holds one tensor")
        return Said("xor zstd", len(payload), None, None)
    # A thousand sizes have a product that nobody can print.
    if len(shape := fields.numbers("shape")) > _MOST_SIZES or (elements := math.prod(shape)) > MAX_ELEMENTS:
        raise Corrupt(f"a shape of {len(shape)} sizes is none that a tensor has")
    if fields.one_of("strategy", "none", "mantissa_xor") == "none":
        return Said("none", len(payload), elements, 0)
    indices = fields.fields("indices")
    kind = indices.one_of("kind", "flat", "row")
    changed = indices.number("count", at_most=elements) if kind == "flat" else gaps.count_rows(indices)
    transform, values = fields.one_of("transform", *mantissas.TRANSFORMS), fields.fields("mantissa_stream").one_of("kind", *mantissas.KINDS)
    return Said(f"{kind} {transform} {values}", len(payload), elements, changed)


def _payloads(old: Bits, new: Bits, shape: tuple[int, ...], form: Form, checksum: str) -> Iterator[dict[str, Value]]:
    """Every way to say the same: positions through the tensor, and row by row."""
    positions = np.flatnonzero(old != new)
    begin: dict[str, Value] = {"version": _VERSION, "shape": shape, "dtype": form.dtype, "checksum": checksum}
    if not len(positions):
        yield {**begin, "strategy": "none"}
        return
    before, after = old[positions], new[positions]
    mask = (1 << form.mantissa_bits) - 1
    alone = (before ^ after) <= mask
    beside = np.flatnonzero(~alone)
    payload: dict[str, Value] = {
        **begin,
        "strategy": "mantissa_xor",
        "mantissa_bits": form.mantissa_bits,
        "total_bits": 8 * old.itemsize,
        "uint_dtype": old.dtype.name,
        **mantissas.write((before & mask).astype(np.int64), (after & mask).astype(np.int64), alone),
        "exception_positions": gaps.write_flat(beside),
        "exception_dtype": old.dtype.name,
        "exception_values": after[beside].tobytes(),
    }
    yield {**payload, "indices": {"kind": "flat", **gaps.write_flat(positions)}}
    yield {**payload, "indices": gaps.write_rows(positions, shape)}


def _opened(payload: memoryview, most_bytes: int) -> Fields | None:
    """The fields in an envelope; None for a payload that is none."""
    if not _is_envelope(payload):
        return None
    envelope = Fields(pickles.read(payload[len(PREFIX) :]), "the envelope")
    unzip = unbz2 if envelope.one_of("codec", "zstd", "bz2") == "bz2" else unzstd
    raw = unzip(envelope.data("data"), at_most=most_bytes)
    envelope.done()
    return Fields(pickles.read(raw), "the payload")


def _is_envelope(payload: memoryview) -> bool:
    return bytes(payload[: len(PREFIX)]) == PREFIX


def _most_bytes(spec: TensorSpec) -> int:
    """What a payload of a tensor can take in which everything has changed, each gap and each position of an exception in the widest numbers."""
    elements, gap = math.prod(spec.shape), WIDTHS["uint64"] if math.prod(spec.shape) >> 32 else WIDTHS["uint32"]
    return _FIELDS_BYTES + Rows.of(spec.shape).height * (WIDTHS["uint64"] + 1) + 2 * elements * (gap + tensor_file.ITEM_BYTES[spec.dtype])


def _begin(fields: Fields, shape: tuple[int, ...], form: Form, checksum: int) -> str:
    """The strategy of a payload that is of this tensor."""
    fields.exactly("version", _VERSION)
    fields.exactly("shape", shape)
    fields.exactly("dtype", form.dtype)
    _same_checksum(fields.text("checksum"), checksum)
    return fields.one_of("strategy", "none", "mantissa_xor")


def _read_changed(fields: Fields, old: Bits, shape: tuple[int, ...], form: Form) -> Changed:
    fields.exactly("mantissa_bits", form.mantissa_bits)
    fields.exactly("total_bits", 8 * old.itemsize)
    for name in ("uint_dtype", "exception_dtype"):
        fields.exactly(name, old.dtype.name)
    positions = _read_positions(fields.fields("indices"), shape)
    before, mask = old[positions], (1 << form.mantissa_bits) - 1
    mantissa = mantissas.read(fields, (before & mask).astype(np.int64), form.mantissa_bits)
    values = before & ~old.dtype.type(mask) | mantissa.astype(old.dtype)
    beside = gaps.read_flat(fields.fields("exception_positions"), len(positions))
    whole = gaps.numbers(fields.data("exception_values"), old.dtype.name)
    fields.done()
    if len(whole) != len(beside):
        raise Corrupt(f"{len(beside)} elements are due whole, and there are {len(whole)}")
    values[beside] = whole
    return Changed(positions, values)


def _read_positions(indices: Fields, shape: tuple[int, ...]) -> Positions:
    flat = indices.one_of("kind", "flat", "row") == "flat"
    positions = gaps.read_flat(indices, math.prod(shape)) if flat else gaps.read_rows(indices, shape)
    # A tensor without elements has rows all the same, and none of them holds a position.
    if not len(positions) or not math.prod(shape):
        raise Corrupt("a payload without changes has the strategy `none`")
    return positions


def _fallback(payload: memoryview, checksum: int) -> memoryview:
    """The arc_v2 payload in a safetensors file."""
    found = archive.read(payload)
    name = found.metadata.get(_FALLBACK, "")
    if found.payloads.keys() != {_TENSOR} or found.metadata.keys() != {_TENSOR, _FALLBACK} or name != _FALLBACK_NAME:
        raise Corrupt(f"a payload that is no envelope is one tensor of {_FALLBACK_NAME}, not {len(found.payloads)} of `{shown(name)}`")
    _same_checksum(found.metadata[_TENSOR], checksum)
    return found.payloads[_TENSOR]


def _same_checksum(text: str, checksum: int) -> None:
    if (found := read_checksum(text)) != checksum:
        raise Corrupt(f"the payload is of a tensor with the Adler-32 {found}, and the file says {checksum}")
