"""Files and directories whose names survive a power cut."""

import os
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(directory: Path, mode: int = 0o777) -> None:
    """Create a directory and those above it, durably; `mode` is its own."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(mode, parents=True, exist_ok=True)
    for path in missing:
        sync_directory(path.parent)


def write_privately(path: Path, data: bytes) -> None:
    """A file for its owner alone: the old one or the new one, whole, after a power cut too."""
    replace(path, data, mode=0o600)


def replace(path: Path, data: bytes | memoryview, *, mode: int = 0o666) -> None:
    """The old file or the new one, whole, after a power cut too."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    put_beside(fresh, path, data, mode=mode)
    sync_directory(path.parent)


def put_beside(fresh: Path, path: Path, data: bytes | memoryview, *, mode: int = 0o666) -> None:
    """The same, by way of the name `fresh`, which nobody has; a power cut may take the name `path` until its directory is synced."""
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def sync_tree(directory: Path) -> None:
    """Make the names in a directory and in all below it durable."""
    for below, _, _ in os.walk(directory):
        sync_directory(Path(below))
