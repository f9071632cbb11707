"""Files and directories that appear under their name whole or not at all, and never in the place of something that is there.

They are made beside their place under a hidden name, which whoever makes them holds locked. What `kill -9` leaves under such a name is nobody's, and
goes when the same thing is made again.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import BinaryIO, Final, NamedTuple

from bloomery.disk.durable import make_directory, sync_directory, sync_tree
from bloomery.types.errors import Conflict

_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""What file systems say that have no hard links."""


class Partial(NamedTuple):
    """A file that has not got its name yet."""

    file: BinaryIO
    path: Path


def refuse_existing(path: Path) -> None:
    """Conflict where something is there, a link that leads nowhere among it."""
    if os.path.lexists(path):
        raise Conflict(f"{path} is there already: choose another name")


@contextmanager
def new_file(path: Path) -> Iterator[Partial]:
    """An empty file to write and read, which gets its name when the block ends well."""
    refuse_existing(path)
    partial = _beside(path)
    with open(_claimed(partial, path, os.O_RDWR | os.O_CREAT), "w+b") as file:
        # The hidden name goes before the lock does: then it may be another's.
        try:
            yield Partial(file, partial)
            file.flush()
            os.fsync(file.fileno())
            _name(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    sync_directory(path.parent)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """An empty directory to fill, which gets its name when the block ends well. Files in it are synced by whoever writes them."""
    refuse_existing(path)
    partial = _beside(path)
    handle = _claimed(partial, path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield partial
        sync_tree(partial)
        refuse_existing(path)
        # Had an empty directory come there meanwhile, it would be replaced, at no loss; anything else is an error.
        partial.rename(path)
    except BaseException:
        rmtree(partial)
        raise
    finally:
        os.close(handle)
    sync_directory(path.parent)


def _beside(path: Path) -> Path:
    make_directory(path.parent)
    return path.with_name(f".{path.name}.partial")


def _claimed(partial: Path, path: Path, flags: int) -> int:
    """A locked handle of something new and empty under the hidden name; Conflict while another process has it."""
    while True:
        if flags & os.O_DIRECTORY:
            partial.mkdir(exist_ok=True)
        handle = os.open(partial, flags | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise Conflict(f"{path} is being written by another process") from None
        if _is_named(partial, handle):
            if _is_new(partial, handle):
                return handle
            # Left by somebody who was killed. A file may have its real name already, and is not written to.
            _remove(partial)
        # Otherwise whoever had it has just finished.
        os.close(handle)


def _is_named(partial: Path, handle: int) -> bool:
    try:
        return os.path.samestat(partial.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _is_new(partial: Path, handle: int) -> bool:
    mine = os.fstat(handle)
    return not any(partial.iterdir()) if partial.is_dir() else (mine.st_size, mine.st_nlink) == (0, 1)


def _remove(partial: Path) -> None:
    if partial.is_dir():
        rmtree(partial)
    else:
        partial.unlink(missing_ok=True)


def _name(partial: Path, path: Path) -> None:
    try:
        # Unlike renaming, linking replaces nothing.
        os.link(partial, path)
    except FileExistsError:
        raise Conflict(f"{path} is there already: choose another name") from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        refuse_existing(path)
        partial.rename(path)
