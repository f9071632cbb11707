"""Who did what in a project: its events of one day; and what its checkpoints take up."""

import json
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, func, select

from bloomery.services.access.principal import Principal
from bloomery.services.training.checkpoints import owned
from bloomery.store import rows
from bloomery.store.database import Database


class Entry(NamedTuple):
    """One event: its kind is `<what>.<happened>`, `subject` the id of what it is about."""

    at_us: int
    kind: str
    subject: str
    data: dict[str, Any]


class Storage(NamedTuple):
    """Named checkpoints, snapshots and exports that are there now."""

    checkpoints: int
    size_bytes: int


class Audit:
    """Reads the outbox and adds up."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def entries(self, p: Principal, *, since_us: int, until_us: int, about: str | None) -> list[Entry]:
        """Events from `since_us` to before `until_us`, oldest first; with `about` only those of kinds that begin with it."""
        p.require("admin")
        table = rows.event.c
        query = select(rows.event).where(table.project == p.project, table.created_us >= since_us, table.created_us < until_us)
        if about is not None:
            query = query.where(table.kind.startswith(f"{about}.", autoescape=True))
        return await self._database.read(lambda connection: _entries(connection, query.order_by(table.seq)))

    async def storage(self, p: Principal) -> Storage:
        """What the project's checkpoints take up; blobs that several share are counted for each."""
        p.require("read", "admin")
        query = select(func.count(), func.sum(rows.checkpoint.c.size_bytes)).where(owned(p.project), rows.checkpoint.c.name.is_not(None))
        count, size = await self._database.read(lambda connection: connection.execute(query).one())
        return Storage(count, int(size or 0))


def _entries(connection: Connection, query: Select[Any]) -> list[Entry]:
    return [Entry(row.created_us, row.kind, row.subject, json.loads(row.data)) for row in connection.execute(query)]
