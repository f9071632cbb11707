"""Rows where they lie: in files while a version is made, and in a version's blob afterwards. Neither needs memory for all of them.

A `Spool` is a file that is gone with its process. A blob has the rows of each split in blocks, compressed one by one, and an index of them at its
end, in a frame that zstd skips: reading a page costs a block. Blobs of earlier releases are one frame without an index, and are read as a whole.
"""

import io
import json
import struct
import sys
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import IO, Any, Final, NamedTuple, Self

import zstandard
from blake3 import blake3

from bloomery.services.data.row import Row, stored_row
from bloomery.types.resources import Split

BLOCK_BYTES: Final = 1 << 20
"""Of lines, after which a block ends."""
IN_MEMORY: Final = 1 << 20
"""Bytes of a spool that are no file yet."""
_INDEXED_BYTES: Final = 256
"""What a block takes in an index that is in memory."""
_SKIPPED: Final = struct.pack("<I", 0x184D2A5E)
"""How a frame begins that zstd skips."""
_TAIL: Final = struct.Struct("<I4s")
"""The last bytes of a blob with an index: how long that is, and that it is there."""
_MARK: Final = b"BLMI"

Part = Callable[[int, int], bytes]
"""Bytes of a blob, from one place to before another."""


class Spool:
    """Rows in a file: appended, read in order as often as one likes, and read by number."""

    def __init__(self, directory: Path | None = None) -> None:
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(IN_MEMORY, dir=None if directory is None else str(directory))  # noqa: SIM115 - closed with the spool
        self._starts = array("Q")
        self.size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def append(self, row: Row) -> None:
        """Behind all others."""
        line = row.line("train").encode() + b"\n"
        self._starts.append(self.size_bytes)
        self._file.seek(self.size_bytes)
        self._file.write(line)
        self.size_bytes += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Row:
        self._file.seek(self._starts[number])
        return stored_row(self._file.readline())

    def __iter__(self) -> Iterator[Row]:
        # By number, because somebody else may read or append between two rows.
        return (self[number] for number in range(len(self)))


class Block(NamedTuple):
    """Rows of one split that follow one another, and where their frame is."""

    split: Split
    rows: int
    start: int
    stop: int


class Written(NamedTuple):
    """A blob that was written: `manifest` is the hash of its rows whatever the order of their fields, `content` that of its lines."""

    manifest: str
    content: str
    items: list[tuple[str, Split, str | None, str]]
    """Hash, split, source and kind of source of each row."""


def write_blob(splits: Mapping[Split, Iterable[Row]], file: IO[bytes], block_bytes: int = BLOCK_BYTES) -> Written:
    """All rows, split by split in alphabetical order."""
    blocks: list[Block] = []
    manifest, content = blake3(), blake3()
    items: list[tuple[str, Split, str | None, str]] = []
    for split in sorted(splits):
        for rows in _in_blocks(splits[split], split, block_bytes):
            for row, line in rows:
                between = "\n" if items else ""
                manifest.update((between + row.canonical(split)).encode())
                content.update((between + line).encode())
                items.append((row.hash, split, row.source_span, row.label_source))
            start = file.tell()
            file.write(zstandard.compress("\n".join(line for _, line in rows).encode()))
            blocks.append(Block(split, len(rows), start, file.tell()))
    index = json.dumps({"blocks": blocks}).encode()
    payload = zstandard.compress(index)
    payload += _TAIL.pack(len(payload), _MARK)
    file.write(_SKIPPED + struct.pack("<I", len(payload)) + payload)
    return Written(manifest.hexdigest(), content.hexdigest(), items)


def _in_blocks(rows: Iterable[Row], split: Split, block_bytes: int) -> Iterator[list[tuple[Row, str]]]:
    block: list[tuple[Row, str]] = []
    size = 0
    for row in rows:
        line = row.line(split)
        block.append((row, line))
        size += len(line)
        if size >= block_bytes:
            yield block
            block, size = [], 0
    if block:
        yield block


class StoredRows:
    """The rows of a blob. Only its index is in memory, and what was read last (`Opened`)."""

    def __init__(self, part: Part, blocks: list[Block], in_memory_bytes: int = 0) -> None:
        self._part = part
        self._blocks = blocks
        self.size_bytes = in_memory_bytes + len(blocks) * _INDEXED_BYTES

    @classmethod
    def open(cls, size: int, part: Part) -> Self:
        """Read the index."""
        length, mark = _TAIL.unpack(part(size - _TAIL.size, size)) if size > _TAIL.size else (0, b"")
        if mark != _MARK or length > size - _TAIL.size:
            return cls._of_one_frame(part(0, size))
        index = json.loads(zstandard.decompress(part(size - _TAIL.size - length, size - _TAIL.size)))
        return cls(part, [Block(*block) for block in index["blocks"]])

    @classmethod
    def _of_one_frame(cls, packed: bytes) -> Self:
        """As releases before this one stored them."""
        lines = zstandard.decompress(packed).split(b"\n")
        splits: dict[Split, list[Row]] = {}
        for line in filter(None, lines):
            splits.setdefault(json.loads(line)["split"], []).append(stored_row(line))
        file = io.BytesIO()
        write_blob(splits, file)
        content = file.getvalue()
        opened = cls.open(len(content), lambda start, stop: content[start:stop])
        return cls(opened._part, opened._blocks, len(content))

    def count(self, split: Split) -> int:
        """Rows of a split."""
        return sum(block.rows for block in self._blocks if block.split == split)

    def rows(self, split: Split) -> Iterator[Row]:
        """All rows of a split, in order."""
        for block in self._blocks:
            if block.split == split:
                yield from map(stored_row, self.lines(block))

    def page(self, split: Split, *, limit: int, offset: int, lines_of: Callable[[Block], list[bytes]] | None = None) -> list[Row]:
        """At most `limit` rows of a split behind the first `offset`; `lines_of` may know those of a block already."""
        found: list[Row] = []
        for block in self._blocks:
            if block.split != split:
                continue
            if offset < block.rows and len(found) < limit:
                found += map(stored_row, (lines_of or self.lines)(block)[offset : offset + limit - len(found)])
            offset = max(0, offset - block.rows)
        return found

    def spread(self, split: Split, most: int) -> Iterator[tuple[int, Row]]:
        """At most so many rows of a split, evenly spread over it, each with its place."""
        count, first = self.count(split), 0
        chosen = range(count) if count <= most else [number * count // most for number in range(most)]
        for block in self._blocks:
            if block.split != split:
                continue
            wanted = chosen[bisect_left(chosen, first) : bisect_left(chosen, first + block.rows)]
            if wanted:
                lines = self.lines(block)
                yield from ((number, stored_row(lines[number - first])) for number in wanted)
            first += block.rows

    def lines(self, block: Block) -> list[bytes]:
        """The lines of a block."""
        return zstandard.decompress(self._part(block.start, block.stop)).split(b"\n")


class Opened:
    """What was asked for last of blobs, as much as stays within `limit_bytes` together. What is larger alone is not kept."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: dict[Any, tuple[int, Any]] = {}
        self._bytes = 0
        # Pages are read on many threads.
        self._lock = Lock()

    def get(self, key: Any) -> Any:
        """What is under a key, if it is still kept."""
        with self._lock:
            if (found := self._kept.pop(key, None)) is None:
                return None
            self._kept[key] = found
            return found[1]

    def keep(self, key: Any, value: Any, size_bytes: int) -> None:
        """Remember a value, and forget those that nobody asked for the longest until all of them fit."""
        with self._lock:
            if size_bytes > self._limit_bytes or key in self._kept:
                return
            self._kept[key] = (size_bytes, value)
            self._bytes += size_bytes
            while self._bytes > self._limit_bytes:
                oldest = next(iter(self._kept))
                self._bytes -= self._kept.pop(oldest)[0]


class Blob(NamedTuple):
    """The stored rows of a version, through what is kept of them."""

    key: str
    stored: StoredRows
    opened: Opened

    def page(self, split: Split, *, limit: int, offset: int) -> list[Row]:
        """At most `limit` rows of a split behind the first `offset`."""
        return self.stored.page(split, limit=limit, offset=offset, lines_of=self._lines)

    def _lines(self, block: Block) -> list[bytes]:
        if (lines := self.opened.get((self.key, block.start))) is None:
            lines = self.stored.lines(block)
            self.opened.keep((self.key, block.start), lines, sum(map(sys.getsizeof, lines)))
        found: list[bytes] = lines
        return found
