"""Files in the place of memory: mapped, they take none of their own, however large they are."""

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO


def mapped(handle: int) -> memoryview:
    """A whole file, to be read; the mapping goes with the last view of it."""
    size_bytes = os.fstat(handle).st_size
    return memoryview(mmap.mmap(handle, size_bytes, access=mmap.ACCESS_READ) if size_bytes else b"")


def mapped_file(file: IO[bytes]) -> memoryview:
    """All that was written to a file, to be read."""
    file.flush()
    return mapped(file.fileno())


@contextmanager
def nameless_file(folder: Path | None) -> Iterator[BinaryIO]:
    """A file without a name in a folder, which is made. It goes when the block ends, or with the last view of it where it was mapped."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        yield file


def room(size_bytes: int, folder: Path | None) -> memoryview:
    """A file without a name, mapped to be written to. A disk without room for all of it is an error here, and would kill whoever writes later."""
    with nameless_file(folder) as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        return memoryview(mmap.mmap(file.fileno(), size_bytes))
