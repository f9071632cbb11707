"""One lane of a journal: records of one kind in append-only segment files.

A record is a checksummed header (length, seq, kind, checksum of the payload) and the payload. A lane appends and syncs, reads by `seq`, rotates
and drops. Every record of a segment has a higher `seq` than those of the segments before it; inside one they lie as they arrived.
Files are named `<lane>-<seq of the first record>.seg`.
"""

import errno
import logging
import os
import struct
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest, xxh32_intdigest

from bloomery.disk.durable import sync_directory
from bloomery.obs.failpoints import failpoint
from bloomery.types.errors import Corrupt, Gone, NotFound

log = logging.getLogger(__name__)

_FIELDS: Final = struct.Struct("<IqB3xQ")
_CHECK: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _CHECK.size
_PAGE: Final = 4096
_SHORT: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR}
"""Errors that say what the machine lacks at the moment, and nothing about a file."""


class Record(NamedTuple):
    """What is appended."""

    seq: int
    payload: bytes


class RecordPlace(NamedTuple):
    """Where a record lies."""

    segment: Path
    offset: int
    length: int


class Held(NamedTuple):
    """A segment: its highest `seq`, its size, and every `seq` in it."""

    newest: int
    bytes: int
    seqs: list[int]


class Torn(NamedTuple):
    """An append that the process did not live to finish: the end of the last segment, from `offset`; `seq` where the header is whole."""

    segment: Path
    offset: int
    seq: int | None


class Lane:
    """The segments of one kind in one directory; not for two threads at once, except `read`."""

    def __init__(self, directory: Path, *, name: str, kind: int, label: str, segment_bytes: int) -> None:
        self.places: dict[int, RecordPlace] = {}
        self.last = -1
        """Highest `seq` that was here."""
        self.complete_through = -1
        """Nothing up to here is still to come; the owner moves it on."""
        self.torn: Torn | None = None
        self._directory, self._name, self._kind, self._label, self._limit = directory, name, kind, label, segment_bytes
        self._newest: dict[Path, int] = {}
        """Highest `seq` of every segment, oldest segment first."""
        self._bytes: dict[Path, int] = {}
        """Of every segment."""
        self._file: int | None = None
        self._size = 0
        for path in segments(directory, name):
            self._index(path)

    def start(self) -> None:
        """Remove what was never acknowledged and get ready to append to the last segment."""
        if self.torn is not None:
            log.warning("%s: dropping what is cut off at offset %d, as of an append that was never acknowledged", self.torn.segment, self.torn.offset)
            self.torn.segment.unlink() if self.torn.offset == 0 else os.truncate(self.torn.segment, self.torn.offset)
            self.torn = None
        for path in segments(self._directory, self._name):
            if path not in self._newest:
                path.unlink(missing_ok=True)
        if self._newest:
            self._open(next(reversed(self._newest)))
        sync_directory(self._directory)

    def append(self, records: Sequence[Record]) -> None:
        """Write records and sync; when this returns they are durable, when it raises none of them is there."""
        if self._file is None or (self._size >= self._limit and self._whole()):
            self._begin(records[0].seq)
        assert self._file is not None
        path, start = next(reversed(self._newest)), self._size
        data = b"".join(_pack(self._kind, record) for record in records)
        try:
            _write_all(self._file, data)
            failpoint(f"journal.{self._label}.written")
            os.fdatasync(self._file)
        except OSError:
            if start == 0:
                self._discard(path)
            else:
                os.ftruncate(self._file, start)
            raise
        failpoint(f"journal.{self._label}.synced")
        for record in records:
            self.places[record.seq] = RecordPlace(path, self._size, len(record.payload))
            self._size += HEADER_BYTES + len(record.payload)
            self._newest[path] = max(self._newest[path], record.seq)
            self.last = max(self.last, record.seq)
        self._bytes[path] = self._size

    def read(self, seq: int) -> bytes:
        """The payload of a record, its checksum verified."""
        place = self.places.get(seq)
        if place is None:
            raise NotFound(f"the journal holds no {self._label} {seq}")
        try:
            with readable(place.segment), place.segment.open("rb") as file:
                data = os.pread(file.fileno(), HEADER_BYTES + place.length, place.offset)
        except FileNotFoundError as error:
            raise Gone(f"{self._label} {seq} was dropped from the journal") from error
        header = _header(data, 0)
        if header is None or header != (place.length, seq, self._kind, header.checksum) or not _intact(header, data[HEADER_BYTES:]):
            raise damage(place.segment, f"{self._label} {seq} at offset {place.offset} does not match its checksum")
        return data[HEADER_BYTES:]

    def rotate(self) -> None:
        """Let the next append begin a segment, so that this one can be dropped by itself."""
        if self._file is not None and self._whole():
            os.close(self._file)
            self._file = None

    @property
    def size_bytes(self) -> int:
        """Of all segments."""
        return sum(self._bytes.values())

    def droppable(self, through: int) -> list[Held]:
        """The segments that hold nothing after `through`, oldest first."""
        held = {path: Held(newest, self._bytes[path], []) for path, newest in self._newest.items() if newest <= through}
        for seq, place in self.places.items():
            if place.segment in held:
                held[place.segment].seqs.append(seq)
        return list(held.values())

    def drop(self, through: int) -> None:
        """Delete the segments that hold nothing after `through`; nothing up to there may still be to come."""
        self.drop_only({newest for newest in self._newest.values() if newest <= through})

    def drop_only(self, newest: Set[int]) -> None:
        """The same of the segments with these highest `seq`s, wherever they lie."""
        for path in [path for path, highest in self._newest.items() if highest in newest]:
            if path == next(reversed(self._newest)):
                self.close()
            self.places = {seq: place for seq, place in self.places.items() if place.segment != path}
            del self._newest[path], self._bytes[path]
            path.unlink()
            failpoint("segment.dropped")

    def close(self) -> None:
        """Give the file back."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _whole(self) -> bool:
        """Whether no `seq` is still to come that belongs before one that is here."""
        return all(seq in self.places for seq in range(self.complete_through + 1, self.last + 1))

    def _begin(self, first: int) -> None:
        self.close()
        path = self._directory / f"{self._name}-{first:012d}.seg"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self._size, self._newest[path], self._bytes[path] = 0, first, 0
        try:
            sync_directory(self._directory)
        except OSError:
            self._discard(path)
            raise

    def _discard(self, path: Path) -> None:
        """Have the segment that was begun last be none: its name says where it belongs, and what comes instead may belong elsewhere."""
        self.close()
        del self._newest[path], self._bytes[path]
        path.unlink()

    def _open(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._size = os.fstat(self._file).st_size
        # A record that was written but not synced by the last process is about to be acted upon.
        os.fdatasync(self._file)

    def _index(self, path: Path) -> None:
        if self.torn is not None:
            raise damage(self.torn.segment, f"the record at offset {self.torn.offset} is cut off, and later segments exist")
        with readable(path):
            data = path.read_bytes()
        for offset, header in _walk(path, data, self._kind):
            if isinstance(header, Torn):
                self.torn = header
                return
            self.places[header.seq] = RecordPlace(path, offset, header.length)
            self._newest[path] = max(self._newest.get(path, header.seq), header.seq)
            self._bytes[path] = offset + HEADER_BYTES + header.length
            self.last = max(self.last, header.seq)


def damage(segment: Path, what: str) -> Corrupt:
    """What is wrong with a segment, and what to do about it."""
    return Corrupt(
        f"run `{segment.parent.name}`, segment {segment.name}: {what}; bring its directory back from a backup, then stop and start the server"
    )


@contextmanager
def readable(segment: Path) -> Iterator[None]:
    """A segment that the machine cannot read is damaged; one that was dropped meanwhile, and what the machine lacks, are no damage."""
    try:
        yield
    except OSError as error:
        if error.errno in _SHORT or (isinstance(error, FileNotFoundError) and not segment.is_symlink()):
            raise
        raise damage(segment, f"it cannot be read ({error.strerror})") from error


def segments(directory: Path, name: str) -> list[Path]:
    """The segment files of a lane, oldest first."""
    return sorted(directory.glob(f"{name}-*.seg"))


def named_seq(segment: Path) -> int:
    """The `seq` of a segment's first record, by its name."""
    return int(segment.stem.rpartition("-")[2])


def lowest_seq(paths: Iterable[Path]) -> int | None:
    """Lowest `seq` of these segments of a lane, oldest first, by headers alone; None without any."""
    return next((min(found) for path in paths if (found := _seqs(path))), None)


def last_seq(directory: Path, name: str) -> int:
    """Highest `seq` of a lane by its newest headers alone, -1 without any: a guess that `Lane` verifies when it matters."""
    for path in reversed(segments(directory, name)):
        if found := _seqs(path):
            return max(found)
    return -1


def _seqs(path: Path) -> list[int]:
    found, offset = [], 0
    with readable(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while (header := _header(os.pread(file.fileno(), HEADER_BYTES, offset), 0)) is not None:
            offset += HEADER_BYTES + header.length
            # What is cut off was never acknowledged.
            if offset > size:
                break
            found.append(header.seq)
    return found


class _Header(NamedTuple):
    length: int
    seq: int
    kind: int
    checksum: int


def _pack(kind: int, record: Record) -> bytes:
    fields = _FIELDS.pack(len(record.payload), record.seq, kind, xxh3_64_intdigest(record.payload))
    return fields + _CHECK.pack(xxh32_intdigest(fields)) + record.payload


def _header(data: bytes, offset: int) -> _Header | None:
    fields = data[offset : offset + _FIELDS.size]
    check = data[offset + _FIELDS.size : offset + HEADER_BYTES]
    if len(check) < _CHECK.size or _CHECK.unpack(check)[0] != xxh32_intdigest(fields):
        return None
    return _Header(*_FIELDS.unpack(fields))


def _intact(header: _Header, payload: bytes | memoryview) -> bool:
    return len(payload) == header.length and xxh3_64_intdigest(payload) == header.checksum


def _walk(path: Path, data: bytes, kind: int) -> Iterator[tuple[int, "_Header | Torn"]]:
    """Every record with its offset; a torn end comes last. Only what an interrupted append can leave is torn, all else is damage."""
    offset = 0
    while offset < len(data):
        header = _header(data, offset)
        if header is None and _unwritten(data, offset):
            yield offset, Torn(path, offset, None)
            return
        if header is None or header.kind != kind:
            raise damage(path, f"no record begins at offset {offset}, where one should")
        end = offset + HEADER_BYTES + header.length
        if not _intact(header, memoryview(data)[offset + HEADER_BYTES : end]):
            if end < len(data):
                raise damage(path, f"record {header.seq} at offset {offset} does not match its checksum")
            yield offset, Torn(path, offset, header.seq)
            return
        yield offset, header
        offset = end


def _unwritten(data: bytes, offset: int) -> bool:
    """A header that did not reach the disk: cut off, or zeros to the end of the file from its start or from the page border that it crosses."""
    border = -(-offset // _PAGE) * _PAGE
    start = border if border < offset + HEADER_BYTES else offset
    return len(data) - offset < HEADER_BYTES or not any(data[offset:]) or not any(data[start:])


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
