"""The bytes of format BD1: a head that says what every chunk is, the chunks' payloads one behind the other, and a hash of it all.

    object  = head | payloads | blake3 of everything before it (32)
    head    = header (64) | table of tensors | a record per chunk (48 each)

All numbers are little-endian. Whatever follows from something else is not written down (offsets follow from lengths) or must agree with it (the sums
of the header, what codecs imply), so an object has one encoding, and nothing in it can point outside of it. Whoever has the head can trust it before
any payload is there: the header has its checksum. `docs/weight-sync.md` has the layout byte by byte.
"""

import struct
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, BinaryIO, Final, Literal, NamedTuple, overload

import numpy as np
import xxhash
from blake3 import blake3
from numpy.typing import NDArray

from bloomery.sync.codec.choose import CODECS, ELEMENTS, Codec
from bloomery.sync.codec.layout import CHUNK_LOG2, MAX_TABLE_BYTES, Layout
from bloomery.sync.codec.numbers import NUMBERS, Changes
from bloomery.sync.codec.states import root_of, row_of
from bloomery.sync.state_hash import NOTHING, Bits, StateHash
from bloomery.types.errors import Corrupt

Kind = Literal["base", "delta"]

MAGIC: Final = b"BD1\0"
VERSION: Final = 1
HEADER: Final = struct.Struct("<4sHBBIIQQ16sQQ")
RECORD: Final = np.dtype(
    [("length", "<u4"), ("changed", "<u4"), ("checksum", "<u4"), ("codec", "u1"), ("zero", "u1", 3), ("old", "<u8", 2), ("new", "<u8", 2)]
)
TRAILER_BYTES: Final = 32
_KINDS: Final[tuple[Kind, ...]] = ("base", "delta")
_CHECKSUM_BYTES: Final = 8
_PIECE_BYTES: Final = 4 << 20


WHOLE: Final = tuple(ELEMENTS)
"""Codecs that write every element of their chunk, whatever was there."""


class Record(NamedTuple):
    """What the head says of one chunk."""

    number: int
    offset: int
    """Of the payload, from the first byte of the object."""
    length: int
    changed: int
    """Elements that the payload writes: those that differ, or all of the chunk for codecs that are `WHOLE`."""
    checksum: int
    """Low 32 bits of the payload's xxh3-64; 0 without one."""
    codec: Codec
    h_old: StateHash
    """State hash of the chunk's elements before, and after."""
    h_new: StateHash


class Records(Sequence[Record]):
    """Of all chunks of an object, in order."""

    def __init__(self, array: NDArray[Any], start: int) -> None:
        """`array` [chunks] of dtype `RECORD`; the first payload begins at `start`."""
        self.array = array
        self._stops = np.cumsum(array["length"], dtype=np.int64) + start

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, place: int) -> Record: ...
    @overload
    def __getitem__(self, place: slice) -> list[Record]: ...
    def __getitem__(self, place: int | slice) -> Record | list[Record]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        number = range(len(self))[place]
        row = self.array[number]
        length, changed, checksum, codec = (int(row[field]) for field in ("length", "changed", "checksum", "codec"))
        old, new = (StateHash(*map(int, row[field])) for field in ("old", "new"))
        return Record(number, int(self._stops[number]) - length, length, changed, checksum, Codec(codec), old, new)


class Entry(NamedTuple):
    """One chunk of an object that is written."""

    codec: Codec
    payload: bytes | memoryview
    changed: int
    old: StateHash
    new: StateHash


class Head:
    """Everything about an object but its payloads."""

    def __init__(self, kind: Kind, layout: Layout, records: NDArray[Any]) -> None:
        """Records [chunks] of dtype `RECORD`; Corrupt where they contradict themselves, the kind or the layout."""
        _check_records(kind, layout, records)
        self.kind, self.layout = kind, layout
        self.head_bytes = HEADER.size + len(layout.table) + records.nbytes
        self.payload_bytes = int(records["length"].sum(dtype=np.uint64))
        self.changed = int(records["changed"].sum(dtype=np.uint64))
        """Elements that the payloads write."""
        self.records = Records(records, self.head_bytes)

    @classmethod
    def parse(cls, data: bytes | memoryview) -> "Head":
        """Of an object's first bytes, its head or more."""
        view = memoryview(data).cast("B")
        header = _Header.parse(view)
        if len(view) < header.head_bytes:
            raise Corrupt(f"a delta of {len(view)} bytes is cut off within its head of {header.head_bytes}")
        tail = bytes(view[HEADER.size : header.head_bytes])
        if _head_checksum(bytes(view[: HEADER.size - _CHECKSUM_BYTES]), tail) != header.checksum:
            raise Corrupt("the head of a delta does not match its checksum")
        layout = Layout.parse(tail[: header.table_bytes])
        if bytes.fromhex(layout.hash) != header.layout or layout.elements != header.elements or layout.chunk_count != header.chunks:
            raise Corrupt("the header of a delta says otherwise of its tensors than their table does")
        found = cls(header.kind, layout, np.frombuffer(tail, RECORD, offset=header.table_bytes))
        if found.changed != header.changed or found.payload_bytes != header.payload_bytes:
            raise Corrupt("the header of a delta says otherwise of its chunks than their records do")
        return found

    @property
    def size_bytes(self) -> int:
        """Of the whole object."""
        return self.head_bytes + self.payload_bytes + TRAILER_BYTES

    @cached_property
    def old_root(self) -> StateHash:
        """Of the weights that it starts from; of a base, nothing."""
        return root_of(self.records.array["old"])

    @cached_property
    def new_root(self) -> StateHash:
        """Of the weights that it leads to."""
        return root_of(self.records.array["new"])

    def to_bytes(self) -> bytes:
        """The head as it stands in the object."""
        table, records = self.layout.table, self.records.array
        sizes = (self.layout.elements, self.changed, bytes.fromhex(self.layout.hash), self.payload_bytes)
        fields = (MAGIC, VERSION, _KINDS.index(self.kind), CHUNK_LOG2, len(table), len(records), *sizes)
        header, tail = HEADER.pack(*fields, 0)[:-_CHECKSUM_BYTES], table + records.tobytes()
        return header + _head_checksum(header, tail).to_bytes(_CHECKSUM_BYTES, "little") + tail

    def changes(self, number: int, payload: bytes | memoryview, old: Bits, state: StateHash = NOTHING) -> Changes:
        """What the payload of a chunk makes of its elements `old` [numel], whose state hash is `state`; Corrupt where it is not the record's, or
        does not say so much. Whether it leads to the record's state is for the caller to see, who knows what they were."""
        record, chunk = self.records[number], self.layout.chunk(number)
        check_payload(record, payload)
        if record.codec == Codec.EMPTY:
            return Changes(np.zeros(0, np.uint32), old[:0], state)
        found = CODECS[record.codec].decode(memoryview(payload), old, NUMBERS[chunk.dtype], chunk.first, state)
        check_count(record, found.indices)
        return found

    def elements(self, number: int, payload: bytes | memoryview) -> Bits:
        """All elements [numel] of a chunk whose codec is `WHOLE`, perhaps a view; Corrupt where the payload is not the record's."""
        record, chunk = self.records[number], self.layout.chunk(number)
        check_payload(record, payload)
        return ELEMENTS[record.codec].elements(memoryview(payload), chunk.numel, NUMBERS[chunk.dtype])


class _Header(NamedTuple):
    """The first 64 bytes, as far as they can be judged alone."""

    kind: Kind
    table_bytes: int
    chunks: int
    elements: int
    changed: int
    layout: bytes
    payload_bytes: int
    checksum: int

    @property
    def head_bytes(self) -> int:
        return HEADER.size + self.table_bytes + self.chunks * RECORD.itemsize

    @classmethod
    def parse(cls, data: memoryview) -> "_Header":
        if len(data) < HEADER.size:
            raise Corrupt(f"a delta has a header of {HEADER.size} bytes, and these are {len(data)} in all")
        magic, version, kind, chunk_log2, *fields = HEADER.unpack(data[: HEADER.size])
        if magic != MAGIC:
            raise Corrupt("this is no delta of format BD1: it begins with other bytes")
        if version != VERSION or kind >= len(_KINDS) or chunk_log2 != CHUNK_LOG2:
            raise Corrupt(f"this delta is of version {version}, kind {kind} and chunks of 2**{chunk_log2} elements, which nobody reads here")
        found = cls(_KINDS[kind], *fields)
        if found.table_bytes > MAX_TABLE_BYTES:
            raise Corrupt(f"a delta claims a table of {found.table_bytes} bytes, and there are at most {MAX_TABLE_BYTES}")
        return found


def head_bytes(start: bytes | memoryview) -> int:
    """How long an object's head is, from its first `HEADER.size` bytes."""
    return _Header.parse(memoryview(start)).head_bytes


def checksum(payload: bytes | memoryview) -> int:
    """As a record has it."""
    return xxhash.xxh3_64_intdigest(payload) & 0xFFFFFFFF if len(payload) else 0


def check_payload(record: Record, payload: bytes | memoryview) -> None:
    """Corrupt unless these are the bytes that a record names."""
    if len(payload) != record.length or checksum(payload) != record.checksum:
        raise Corrupt(f"the payload of chunk {record.number} does not match its checksum")


def check_count(record: Record, indices: NDArray[np.uint32]) -> None:
    """Corrupt unless a payload changed as many elements as its record says."""
    if len(indices) != record.changed:
        raise Corrupt(f"the payload of chunk {record.number} changes {len(indices)} elements, and its record says {record.changed}")


def parse(data: bytes | memoryview, *, trusted: bool = False) -> Head:
    """Of a whole object; Corrupt unless it is one, and nothing behind it. `trusted`: whoever calls has just hashed these bytes himself."""
    view = memoryview(data).cast("B")
    head = Head.parse(view)
    if head.size_bytes != len(view):
        raise Corrupt(f"a delta of {len(view)} bytes should have {head.size_bytes}: it is cut off, or something follows it")
    if not trusted and blake3(view[:-TRAILER_BYTES]).digest() != bytes(view[-TRAILER_BYTES:]):
        raise Corrupt("a delta does not match the hash at its end: it is damaged")
    return head


def write(file: BinaryIO, kind: Kind, layout: Layout, entries: Iterable[Entry]) -> Head:
    """An object of a layout's chunks in order, into an empty file that can be read too; holds one payload at a time."""
    records = np.zeros(layout.chunk_count, RECORD)
    file.seek(HEADER.size + len(layout.table) + records.nbytes)
    for row, entry in zip(records, entries, strict=True):
        row["length"], row["changed"], row["checksum"], row["codec"] = len(entry.payload), entry.changed, checksum(entry.payload), entry.codec
        row["old"], row["new"] = row_of(entry.old), row_of(entry.new)
        file.write(entry.payload)
    head = Head(kind, layout, records)
    file.seek(0)
    file.write(head.to_bytes())
    file.seek(0)
    state = blake3()
    while piece := file.read(_PIECE_BYTES):
        state.update(piece)
    file.write(state.digest())
    return head


def _check_records(kind: Kind, layout: Layout, records: NDArray[Any]) -> None:
    """What must hold of every record, so that one state of affairs has one encoding."""
    codec, length, changed = records["codec"], records["length"], records["changed"]
    numels, item_bytes = layout.chunk_sizes
    empty, whole, raw = codec == Codec.EMPTY, np.isin(codec, WHOLE), codec == Codec.RAW
    same = (records["old"] == records["new"]).all(axis=1)
    wrong = {
        "a codec that there is not": ~np.isin(codec, (Codec.EMPTY, *CODECS)),
        "bytes that should be zero": records["zero"].any(axis=1) | (empty & (records["checksum"] != 0)),
        "a payload where nothing changes, or none where something does": (empty != same) | (empty != (length == 0)) | (empty != (changed == 0)),
        "more elements than the chunk": changed > numels,
        "a codec that writes all elements, and does not": whole & (changed != numels),
        "raw elements of another size than the chunk's": raw & (length != numels * item_bytes),
        "elements that are larger than raw ones": np.isin(codec, (Codec.PLANES, Codec.TIGHT)) & (length >= numels * item_bytes),
        "more bytes than any distances take": np.isin(codec, (Codec.FAST, Codec.FAST_ZSTD)) & (length > _most_bytes(numels, item_bytes)),
    }
    if kind == "base":
        wrong["something before it, in a base"] = records["old"].any(axis=1)
        wrong["a codec that needs what was before, in a base"] = ~(empty | whole)
    for what, where in wrong.items():
        if where.any():
            raise Corrupt(f"chunk {int(np.argmax(where))} of a delta has {what}")


def _most_bytes(numels: NDArray[np.int64], item_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of distances, whose sums may be longer than elements: the longer head; for each element a gap, an exception gap, both sizes, and a sign."""
    return 32 + numels * (3 + item_bytes) + (numels + 7) // 8


def _head_checksum(header: bytes, tail: bytes) -> int:
    return xxhash.xxh3_64_intdigest(header + tail)
