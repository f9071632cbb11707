"""Tables of a database that another release wrote: those of a newer one are refused, those of an earlier one changed.

They are changed before the first process starts: where there are many rows that takes minutes, and processes are to be ready within a time.
"""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from bloomery import __version__
from bloomery.config.data_dir import DataDir
from bloomery.types.errors import Conflict, Corrupt, blame

_VERSIONS: Final = Path(__file__).parents[1] / "store" / "migrations" / "versions"


def check(data: DataDir) -> None:
    """Refuse tables that a newer release changed: what stands in them is not known here. Changes nothing."""
    if newer := [revision for revision in _revisions(data.database) if revision not in _known()]:
        problem = f"{data.root} was written by a newer Bloomery (tables {max(newer)}, this one, {__version__}, knows {newest_revision()})"
        raise Conflict(f"{problem}: upgrade Bloomery to use it, or restore a backup of an earlier one into another --data-dir")


def bring_up_to_date(data: DataDir, say: Callable[[str], None]) -> None:
    """Change the tables that are not as this release has them, and say so before; the caller holds the lock. Undone where it is broken off."""
    if not any(revision < newest_revision() for revision in _revisions(data.database)):
        return
    say("the database is of an earlier release: its tables are changed first, which takes minutes where much is recorded")
    # The supervisor has no other use for SQLAlchemy, and would start later with it.
    from bloomery.store.database import Database

    with Database(data.database):
        pass
    say("the tables are up to date")


def newest_revision() -> str:
    """The number that the last of the changes has in the name of its file."""
    return max(_known())


def _known() -> set[str]:
    return {path.name.partition("_")[0] for path in _VERSIONS.glob("[0-9]*.py")}


def _revisions(path: Path) -> list[str]:
    """Of the tables of a database, one; none of what has no tables yet."""
    if not path.exists():
        return []
    with blame(Corrupt, f"{path} cannot be read"), closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
        # A server that was killed at its first start left a database without tables.
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchone():
            return []
        return [revision for (revision,) in database.execute("SELECT version_num FROM alembic_version")]
