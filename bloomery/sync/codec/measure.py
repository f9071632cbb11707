"""What a delta consists of, how near it comes to what it could be, and how fast it is read here.

Two bounds say how few bits the changes of a delta could take. `order0` codes positions as if they were uniform within a tensor, and differences by
how often each occurs: no codec that looks at indices, bitmaps or exclusive ors alone gets below it. `conditioned` does both within the elements of
one exponent, which the receiver knows because he has the old weights.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bloomery.sync.codec.applying import Steps, place_of
from bloomery.sync.codec.choose import Codec
from bloomery.sync.codec.container import WHOLE
from bloomery.sync.codec.delta import DISTANCES, Delta
from bloomery.sync.codec.layout import Chunk, Weights
from bloomery.sync.codec.numbers import NUMBERS
from bloomery.sync.state_hash import Bits, hash_elements
from bloomery.types.errors import Conflict

_NEAR: Final = 127
"""Differences as large as this count each by itself; what is larger takes one symbol and an element's bits."""
_FAR: Final = 0


class Found(NamedTuple):
    """The changes of one chunk."""

    chunk: Chunk
    indices: NDArray[np.uint32]
    by: Bits
    old: Bits | None
    """Its elements before, where they are at hand."""


@dataclass
class Counts:
    """How often what occurs in a delta, gathered chunk by chunk."""

    tensors: dict[str, int] = field(default_factory=dict)
    """Elements of each tensor that changed."""
    by_exponent: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Of each dtype, differences by the exponent of the old element [exponents, 256]; one exponent where it is not known."""
    of_exponent: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Of each dtype, elements by exponent [exponents]."""
    decode_s: float = 0.0
    decoded_bytes: int = 0


class Bound(NamedTuple):
    """Bits that all changes take."""

    positions: float
    values: float

    @property
    def bits(self) -> float:
        """Of both."""
        return self.positions + self.values


def is_readable(delta: Delta, base: Weights | None) -> bool:
    """Whether what changed can be told: of distances always, of other chunks with the weights before them."""
    return base is not None or (delta.kind == "delta" and bool(np.isin(delta.records.array["codec"], (Codec.EMPTY, *DISTANCES)).all()))


def count(delta: Delta, base: Weights | None) -> Counts:
    """Go through all changes of a delta that `is_readable`; Conflict where `base` is not what it starts from."""
    if base is not None:
        Steps([delta]).check_layout(base.layout)
    counts = Counts(dict.fromkeys((tensor.name for tensor in delta.layout.tensors), 0))
    for found in _found(delta, base, counts):
        kind = NUMBERS[found.chunk.dtype]
        exponents = np.zeros(found.chunk.numel, np.int64) if found.old is None else kind.exponents(found.old).astype(np.int64)
        size = 1 << kind.exponent_bits
        per_exponent = counts.of_exponent.setdefault(found.chunk.dtype, np.zeros(size, np.int64))
        per_exponent += np.bincount(exponents, minlength=size)
        symbols = counts.by_exponent.setdefault(found.chunk.dtype, np.zeros((size, 256), np.int64))
        np.add.at(symbols, (exponents[found.indices], _symbols(found.by, kind.item_bytes)), 1)
        for part in delta.layout.parts(found.chunk):
            begin, end = np.searchsorted(found.indices, (part.at, part.at + part.stop - part.start))
            counts.tensors[part.tensor.name] += int(end - begin)
    return counts


def order0(delta: Delta, counts: Counts) -> Bound:
    """Positions uniform within each tensor, differences by how often they occur in the dtype."""
    positions = sum(_mixed_bits(np.array([counts.tensors[tensor.name]]), np.array([tensor.numel])) for tensor in delta.layout.tensors)
    values = sum(_value_bits(symbols.sum(axis=0, keepdims=True), dtype) for dtype, symbols in counts.by_exponent.items())
    return Bound(positions, values)


def conditioned(counts: Counts) -> Bound:
    """Positions uniform, and differences by how often they occur, within the elements of one exponent in the dtype."""
    positions = sum(_mixed_bits(symbols.sum(axis=1), counts.of_exponent[dtype]) for dtype, symbols in counts.by_exponent.items())
    return Bound(positions, sum(_value_bits(symbols, dtype) for dtype, symbols in counts.by_exponent.items()))


def codecs(delta: Delta) -> Mapping[str, dict[str, int]]:
    """Chunks, their elements, and bytes of payload, by codec."""
    records, numels = delta.records.array, delta.layout.chunk_sizes.numels
    found = {}
    for codec in Codec:
        if (of := records["codec"] == codec).any():
            sizes = {"chunks": int(of.sum()), "elements": int(numels[of].sum()), "bytes": int(records["length"][of].sum(dtype=np.int64))}
            found[label(codec)] = sizes
    return found


class Counted(NamedTuple):
    """Of chunks whose records say how many elements differ."""

    elements: int
    changed: int
    payload_bytes: int


def counted(delta: Delta) -> Counted:
    """Of all chunks but those that are written whole, which say nothing of it."""
    records = delta.records.array
    of = ~np.isin(records["codec"], WHOLE)
    elements = int(delta.layout.chunk_sizes.numels[of].sum())
    return Counted(elements, int(records["changed"][of].sum(dtype=np.int64)), int(records["length"][of].sum(dtype=np.int64)))


def label(codec: Codec) -> str:
    """As options call it."""
    return "fast+zstd" if codec == Codec.FAST_ZSTD else codec.name.lower()


def tensors(delta: Delta, counts: Counts | None) -> list[dict[str, Any]]:
    """What every tensor is, which codecs its chunks have, and how many of its elements changed where that was counted."""
    used: dict[str, list[str]] = {tensor.name: [] for tensor in delta.layout.tensors}
    for chunk in delta.layout.chunks():
        name = label(delta.records[chunk.number].codec)
        for part in delta.layout.parts(chunk):
            if name not in used[part.tensor.name]:
                used[part.tensor.name].append(name)
    found = []
    for tensor in delta.layout.tensors:
        changed = None if counts is None else counts.tensors[tensor.name]
        found.append({"name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape, "codecs": used[tensor.name], "changed": changed})
    return found


def _found(delta: Delta, base: Weights | None, counts: Counts) -> Iterator[Found]:
    for chunk in delta.layout.chunks():
        record, kind = delta.records[chunk.number], NUMBERS[chunk.dtype]
        if base is None or delta.kind == "base":
            old = None if base is None else np.zeros(chunk.numel, chunk.unsigned)
        else:
            old = base.read(chunk)
            if hash_elements(old, chunk.first) != record.h_old:
                raise Conflict(f"these weights are not those that the delta starts from: {place_of(delta.layout, chunk.number)} is in another state")
        began = time.perf_counter()
        if old is not None:
            indices, values, _ = delta.changes(chunk.number, old)
            counts.decode_s += time.perf_counter() - began
            by = kind.ordered(values) - kind.ordered(old[indices])
            indices, by = indices[by != 0], by[by != 0]
        elif record.codec == Codec.EMPTY:
            indices, by = np.zeros(0, np.uint32), np.zeros(0, chunk.unsigned)
        else:
            indices, by = delta.differences(chunk.number)
            counts.decode_s += time.perf_counter() - began
        counts.decoded_bytes += chunk.size_bytes
        yield Found(chunk, indices, by, old)


def _symbols(by: Bits, item_bytes: int) -> NDArray[np.int64]:
    """Differences [n] as symbols from 1 on, or the one that says that it is far."""
    signed = by.view(f"i{item_bytes}").astype(np.int64)
    # Both ways: of eight bytes one difference has no absolute value.
    return np.where((signed >= -_NEAR) & (signed <= _NEAR), signed + _NEAR + 1, _FAR)


def _mixed_bits(some: NDArray[np.int64], of: NDArray[np.int64]) -> float:
    """Entropy of which `some` of so many things [n] it is, in every class."""
    return _log_sum(of) - _log_sum(some) - _log_sum(of - some)


def _value_bits(symbols: NDArray[np.int64], dtype: str) -> float:
    """Entropy of symbols [classes, 256] in every class, and the elements that are far written out."""
    return _log_sum(symbols.sum(axis=1)) - _log_sum(symbols) + float(symbols[:, _FAR].sum()) * NUMBERS[dtype].item_bytes * 8


def _log_sum(counts: NDArray[np.int64]) -> float:
    """Of n log2 n."""
    positive = counts[counts > 0].astype(np.float64)
    return float((positive * np.log2(positive)).sum())
