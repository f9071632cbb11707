"""The data directory's layout version: created, checked, or brought up to date before anything else opens a file in it.

Tables of the database are those of `tables`; here are steps for everything around it.
"""

from collections.abc import Callable, Mapping
from typing import Final

from bloomery.config.data_dir import DataDir
from bloomery.disk.durable import make_directory, write_privately
from bloomery.types.errors import Conflict, Corrupt, InvalidInput

CURRENT: Final = 1

Migration = Callable[[DataDir], None]
MIGRATIONS: Final[Mapping[int, Migration]] = {}
"""By the version they start from; each must be safe to run again after a crash half way."""


def check(data: DataDir) -> int | None:
    """The version of a directory that can be used, None of one that would be new; says why another cannot. Changes nothing."""
    if not data.root.exists():
        return None
    if not data.root.is_dir():
        raise Conflict(f"{data.root} is not a directory: give an empty or new directory as --data-dir")
    if data.version.exists():
        return check_version(data.version.read_text(), str(data.root))
    if not data.lock.exists() and any(data.root.iterdir()):
        raise Conflict(f"{data.root} holds files that are not Bloomery's: give an empty or new directory as --data-dir")
    return None


def create(data: DataDir) -> None:
    """Make the directory unless it is there; somebody else's files are left alone."""
    check(data)
    try:
        make_directory(data.root, mode=0o700)
    except OSError as error:
        problem = f"{data.root} cannot be made ({error.strerror})"
        raise InvalidInput(f"{problem}: give a directory that you may write as --data-dir", field="data_dir") from None


def bring_up_to_date(data: DataDir, migrations: Mapping[int, Migration] = MIGRATIONS, current: int = CURRENT) -> None:
    """Run the missing steps in order; the caller holds the lock."""
    found = version_of(data, current)
    for step in range(found, current):
        migrations[step](data)
        _write_version(data, step + 1)
    data.logs.mkdir(mode=0o700, exist_ok=True)


def version_of(data: DataDir, current: int = CURRENT) -> int:
    """The directory's version, written first if it is new; a newer one than ours is refused."""
    if not data.version.exists():
        _write_version(data, current)
    return check_version(data.version.read_text(), str(data.root), current)


def check_version(text: str, where: str, current: int = CURRENT) -> int:
    """Parse a VERSION; this program reads its own and older ones."""
    if not text.strip().isdigit():
        raise Corrupt(f"{where}: VERSION holds {text.strip()[:40]!r}, not a number: restore a backup")
    found = int(text)
    if found > current:
        raise Conflict(f"{where} was written by a newer Bloomery (layout {found}, this one knows {current}): upgrade Bloomery to use it")
    return found


def _write_version(data: DataDir, version: int) -> None:
    write_privately(data.version, f"{version}\n".encode())
