"""Deltas as objects: `encode` makes one of two sets of weights, `Delta.parse` reads one, whatever bytes it is given.

Both hold one chunk at a time beside the weights and the object, which may be mapped files. What is done with deltas is in `applying` and `merge`.
"""

from collections.abc import Callable, Iterator
from io import BytesIO
from typing import BinaryIO, Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bloomery.sync.codec import choose, container, fast, fast_zstd, kernels
from bloomery.sync.codec.choose import CODECS, Codec
from bloomery.sync.codec.container import WHOLE, Entry, Head, Kind, Records
from bloomery.sync.codec.layout import Chunk, Layout, Weights
from bloomery.sync.codec.numbers import NUMBERS, Changes, Differences, Number
from bloomery.sync.codec.ordered import in_order
from bloomery.sync.codec.states import States, state_of
from bloomery.sync.state_hash import NOTHING, Bits, StateHash, change, hash_elements
from bloomery.types.errors import Conflict

Choice = Literal["auto", "fast", "fast+zstd", "tight", "raw", "planes"]
"""`auto`: for every chunk the shortest payload. Another codec gives way to `raw` where it cannot write a chunk, or not in fewer bytes."""
CHOICES: Final[dict[Choice, Codec | None]] = {
    "auto": None,
    "fast": Codec.FAST,
    "fast+zstd": Codec.FAST_ZSTD,
    "tight": Codec.TIGHT,
    "raw": Codec.RAW,
    "planes": Codec.PLANES,
}


class Distances(Protocol):
    """A codec that says by how much elements move, and so can be read without the old ones."""

    def differences(self, payload: memoryview, count: int, kind: Number) -> Differences: ...

    def encode_differences(self, indices: Bits, by: Bits, count: int, kind: Number) -> bytes: ...


DISTANCES: Final[dict[Codec, Distances]] = {Codec.FAST: fast, Codec.FAST_ZSTD: fast_zstd}
Told = Callable[[Chunk], object]
"""Is told of every chunk that is done."""


class Delta:
    """An object that was parsed; its bytes are read when they are asked for, and must stay."""

    def __init__(self, head: Head, data: memoryview) -> None:
        self.head, self._data = head, data

    @classmethod
    def parse(cls, data: bytes | memoryview, *, trusted: bool = False) -> "Delta":
        """Of a whole object, mapped or in memory; Corrupt unless it is one. `trusted`: whoever calls has just hashed these bytes himself."""
        view = memoryview(data).cast("B")
        return cls(container.parse(view, trusted=trusted), view)

    @property
    def kind(self) -> Kind:
        """A base starts from nothing."""
        return self.head.kind

    @property
    def layout(self) -> Layout:
        """Of the weights before and after."""
        return self.head.layout

    @property
    def records(self) -> Records:
        """By chunk."""
        return self.head.records

    @property
    def old_root(self) -> StateHash:
        """Of the weights that it starts from."""
        return self.head.old_root

    @property
    def new_root(self) -> StateHash:
        """Of the weights that it leads to."""
        return self.head.new_root

    def payload(self, number: int) -> memoryview:
        """Of a chunk."""
        record = self.records[number]
        return self._data[record.offset : record.offset + record.length]

    def differences(self, number: int) -> Differences:
        """By how much which elements of a chunk move, of a payload that can be read without the old ones."""
        record, chunk, payload = self.records[number], self.layout.chunk(number), self.payload(number)
        container.check_payload(record, payload)
        found = DISTANCES[record.codec].differences(payload, chunk.numel, NUMBERS[chunk.dtype])
        container.check_count(record, found.indices)
        return found

    def changes(self, number: int, old: Bits, state: StateHash = NOTHING) -> Changes:
        """What becomes of a chunk's elements `old` [numel], and of their state, which is not looked at; Corrupt where the payload does not say."""
        return self.head.changes(number, self.payload(number), old, state)

    def elements(self, number: int) -> Bits:
        """All elements [numel] of a chunk whose codec is `WHOLE`; perhaps a view of the object, at any byte."""
        return self.head.elements(number, self.payload(number))


class BaseWeights:
    """What a base is of, read where it lies."""

    def __init__(self, base: Delta) -> None:
        self.layout, self._base = base.layout, base

    def read(self, chunk: Chunk) -> Bits:
        """See `Weights`."""
        if self._base.records[chunk.number].codec == Codec.EMPTY:
            return np.zeros(chunk.numel, chunk.unsigned)
        return np.require(self._base.elements(chunk.number), requirements=["ALIGNED"])

    def write(self, chunk: Chunk, indices: NDArray[np.uint32], values: Bits) -> None:
        """Objects are as they are."""
        raise TypeError("the weights of a base are read only")


class Written(NamedTuple):
    """An object that was made."""

    head: Head
    changed: int
    """Elements that differ, which records of raw chunks do not say."""


def encode(old: Weights | None, new: Weights, codec: Choice = "auto", states: States | None = None) -> bytes:
    """What changed from `old` to `new`, or a base where nothing was before. `states`: of `old`, where they are known; else they are computed."""
    file = BytesIO()
    write(file, old, new, codec=codec, states=states)
    return file.getvalue()


def write(
    file: BinaryIO,
    old: Weights | None,
    new: Weights,
    *,
    codec: Choice = "auto",
    states: States | None = None,
    workers: int = 1,
    told: Told | None = None,
) -> Written:
    """The same into an empty file that can be read too, by so many threads."""
    layout = new.layout
    if old is not None and (difference := layout.difference(old.layout)):
        raise Conflict(f"a delta is of weights with the same tensors, and these have others: {difference}")

    def entry(chunk: Chunk) -> "Encoded":
        if old is None:
            return encoded_base(chunk, new.read(chunk), codec)
        before = old.read(chunk)
        h_old = hash_elements(before, chunk.first) if states is None else state_of(states[chunk.number])
        return encoded(chunk, before, new.read(chunk), h_old, codec)

    changed = 0

    def entries() -> Iterator[Entry]:
        nonlocal changed
        for chunk, made in in_order(entry, layout.chunks(), workers):
            changed += made.changed
            yield made.entry
            if told is not None:
                told(chunk)

    head = container.write(file, "base" if old is None else "delta", layout, entries())
    return Written(head, changed)


class Encoded(NamedTuple):
    """A chunk's entry, and how many of its elements differ."""

    entry: Entry
    changed: int


def encoded(chunk: Chunk, old: Bits, new: Bits, h_old: StateHash, codec: Choice = "auto") -> Encoded:
    """One chunk of a delta."""
    kind, wanted = NUMBERS[chunk.dtype], CHOICES[codec]
    if wanted is None:
        chosen, payload, (indices, _) = choose.encode(old, new, kind)
    else:
        indices = kernels.find(old, new, kind).indices
        chosen, payload = _by(wanted, old, new, chunk) if len(indices) else (Codec.EMPTY, b"")
    h_new = hash_elements(new, chunk.first) if chosen in WHOLE else h_old + change(indices, old[indices], new[indices], chunk.first)
    return Encoded(Entry(chosen, payload, chunk.numel if chosen in WHOLE else len(indices), h_old, h_new), len(indices))


def encoded_base(chunk: Chunk, new: Bits, codec: Choice = "auto") -> Encoded:
    """One chunk of a base: `raw` where that is asked for, else in byte planes."""
    state = hash_elements(new, chunk.first)
    if not (changed := int(np.count_nonzero(new))):
        return Encoded(Entry(Codec.EMPTY, b"", 0, StateHash(), state), 0)
    return Encoded(encoded_whole(chunk, new, StateHash(), state, Codec.RAW if codec == "raw" else Codec.PLANES), changed)


def encoded_whole(chunk: Chunk, new: Bits, h_old: StateHash, h_new: StateHash, codec: Codec = Codec.PLANES) -> Entry:
    """One chunk that is written whole, whatever was there."""
    return Entry(*_by(codec, new, new, chunk), chunk.numel, h_old, h_new)


def _by(codec: Codec, old: Bits, new: Bits, chunk: Chunk) -> tuple[Codec, bytes]:
    payload = CODECS[codec].encode(old, new, NUMBERS[chunk.dtype])
    return (Codec.RAW, new.tobytes()) if payload is None else (codec, payload)
