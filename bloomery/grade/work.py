"""Work directories of jails: made for a user, measured while somebody hostile changes them, and removed whatever is in them."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_ENTRIES: Final = 4096
"""Files and directories that one may have."""


def make(place: Path, owner: int | None) -> None:
    """One that belongs to another user, if one is named."""
    place.mkdir(mode=0o700)
    if owner is not None:
        os.chown(place, owner, owner)


def holds_more_than(work: Path, most_bytes: int) -> bool:
    """Or more files than it may, or such as cannot be counted."""
    total, entries = 0, 0
    try:
        for found in _below(work):
            entries += 1
            with suppress(FileNotFoundError):
                total += found.stat(follow_symlinks=False).st_blocks * 512
            if total > most_bytes or entries > _ENTRIES:
                return True
    except OSError:
        return True
    return False


def _below(work: Path) -> Iterator[os.DirEntry[str]]:
    """What is removed meanwhile is left out."""
    places = [os.fspath(work)]
    while places:
        with suppress(FileNotFoundError), os.scandir(places.pop()) as found:
            for entry in found:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    places.append(entry.path)


def remove(top: Path) -> None:
    """A directory of a process that has ended, however deep it dug: what is below a directory moves up, so that no path becomes long."""
    _open_to_us(top)
    while entries := [*top.iterdir()]:
        for entry in entries:
            if not _is_directory(entry):
                entry.unlink()
                continue
            _open_to_us(entry)
            for below in [*entry.iterdir()]:
                if _is_directory(below):
                    _open_to_us(below)
                    below.rename(top / os.urandom(16).hex())
                else:
                    below.unlink()
            entry.rmdir()
    top.rmdir()


def _is_directory(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def _open_to_us(directory: Path) -> None:
    if stat.S_IMODE(directory.lstat().st_mode) & stat.S_IRWXU != stat.S_IRWXU:
        directory.chmod(stat.S_IRWXU)
