"""Changes between two versions, decoded and lying in a file, so that a flip is nothing but writing them where they belong.

Each changed element is there with what it was and what it becomes. Writing it twice does no harm, and either version can be had from whatever
mixture of both a flip left that was killed. The file is this machine's own: it is whole when it has its name, and its hash says that it still is.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from bloomery.disk.durable import sync_directory
from bloomery.disk.mapped import mapped
from bloomery.sync.chain.state import Version
from bloomery.sync.codec.layout import Chunk, Layout
from bloomery.sync.codec.states import States
from bloomery.sync.state_hash import Bits
from bloomery.types.errors import Corrupt
from bloomery.types.wire import Wire

STAGED: Final = "staged"
"""Changes that the next flip writes."""
FLIPPED: Final = "flipped"
"""Those that the last one wrote, by which it can be taken back."""
_TAIL_BYTES: Final = 8 + 32


class Changed(NamedTuple):
    """Of one chunk: places [n] in order, and bits [n] before and after."""

    chunk: Chunk
    indices: NDArray[np.uint32]
    old: Bits
    new: Bits


class _Entry(Wire, frozen=True):
    number: int
    count: int
    offset: int


class _Footer(Wire, frozen=True):
    layout: str
    start: Version
    stop: Version
    old_table: bytes
    new_table: bytes
    entries: list[_Entry]


class StagingFile:
    """Written chunk by chunk; `finish` gives it its name. Holds nothing but where each chunk's changes are."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._fresh = folder, folder / f"{STAGED}.new"
        self._file: BinaryIO = self._fresh.open("wb")
        self._hash, self._offset = blake3(), 0
        self._entries: list[_Entry] = []

    def add(self, changed: Changed) -> None:
        """The next chunk."""
        self._entries.append(_Entry(number=changed.chunk.number, count=len(changed.indices), offset=self._offset))
        for part in (changed.indices, changed.old, changed.new):
            self._write(np.ascontiguousarray(part).tobytes())
            self._write(bytes(-self._offset % 8))

    def finish(self, layout: Layout, start: tuple[Version, States], stop: tuple[Version, States]) -> "Staged":
        """Make it durable; an earlier staged file is replaced."""
        footer = msgspec.msgpack.encode(
            _Footer(
                layout=layout.hash,
                start=start[0],
                stop=stop[0],
                old_table=start[1].tobytes(),
                new_table=stop[1].tobytes(),
                entries=self._entries,
            )
        )
        self._write(footer)
        self._write(len(footer).to_bytes(8, "little"))
        digest = self._hash.digest()
        self._file.write(digest)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._fresh.replace(self._folder / STAGED)
        sync_directory(self._folder)
        return Staged(self._folder / STAGED, layout)

    def discard(self) -> None:
        """Nothing is left of it."""
        self._file.close()
        self._fresh.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)
        self._offset += len(data)


class Staged:
    """A file of changes, read in place."""

    def __init__(self, path: Path, layout: Layout) -> None:
        """Of weights of this layout; Corrupt unless it is whole, and theirs."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _TAIL_BYTES:
                raise Corrupt(f"`{path.name}` is cut off")
            self._data = mapped(file.fileno())
        if blake3(self._data[:-32]).digest() != bytes(self._data[-32:]):
            raise Corrupt(f"`{path.name}` does not match the hash at its end: it is damaged")
        self.hash = bytes(self._data[-32:]).hex()
        length = int.from_bytes(self._data[-_TAIL_BYTES:-32], "little")
        self._footer = msgspec.msgpack.decode(self._data[size - _TAIL_BYTES - length : size - _TAIL_BYTES], type=_Footer)
        if self._footer.layout != layout.hash:
            raise Corrupt(f"`{path.name}` is of weights of another layout")
        self.path, self.layout = path, layout
        self.start, self.stop = self._footer.start, self._footer.stop
        self.old_table, self.new_table = (self._table(data) for data in (self._footer.old_table, self._footer.new_table))

    @property
    def elements(self) -> int:
        """That change."""
        return sum(entry.count for entry in self._footer.entries)

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return len(self._data)

    def changes(self) -> Iterator[Changed]:
        """Chunk by chunk; views of the file."""
        for entry in self._footer.entries:
            chunk = self.layout.chunk(entry.number)
            item = np.dtype(chunk.unsigned).itemsize
            first = entry.offset
            second = first + _padded(4 * entry.count)
            third = second + _padded(item * entry.count)
            yield Changed(
                chunk,
                np.frombuffer(self._data, np.uint32, entry.count, first),
                *(np.frombuffer(self._data, chunk.unsigned, entry.count, place) for place in (second, third)),
            )

    def _table(self, data: bytes) -> Any:
        return np.frombuffer(data, np.uint64).reshape(self.layout.chunk_count, 2)


def _padded(size: int) -> int:
    return size + -size % 8
