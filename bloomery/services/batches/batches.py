"""Batches as their callers see them: asked for, shown, cancelled. What is done for them is done by the runner."""

import json
from typing import Any, Final

from sqlalchemy import Connection, func, insert, select

from bloomery.services.access.principal import Principal
from bloomery.services.batches.batch_rows import OPEN, batch_of, one, own, switch
from bloomery.services.data.files import Files
from bloomery.services.listeners import Listeners
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.batches import Batch, BatchPage, BatchState, NewBatch
from bloomery.types.errors import Conflict, InvalidInput
from bloomery.types.ids import new_id, now_us

MAX_OPEN: Final = 64
"""Batches of a project that have not ended."""
_INPUT: Final = "input_file_id"


class Batches:
    """Makes and steers them."""

    def __init__(self, database: Database, files: Files) -> None:
        self._database, self._files = database, files
        self.changed = Listeners()
        """Told when there is one more, or one is to be cancelled."""

    async def create(self, p: Principal, asked: NewBatch) -> Batch:
        """A batch that waits to be looked at. It is answered for the caller's key: with its scopes, and within its limits."""
        p.require("infer")
        content, now = await self._files.content(p, asked.input_file, field=_INPUT), now_us()
        if content.file.purpose != "batch":
            raise InvalidInput(f"`{_INPUT}` is a file for `{content.file.purpose}`: upload one for `batch`", field=_INPUT)
        values: dict[str, Any] = {"id": new_id("batch"), "project": p.project, "key_id": p.key_id, "asked": asked.model_dump_json()}
        values |= {"state": BatchState.VALIDATING, "input_key": content.key, "input_bytes": content.file.size_bytes, "problems": "[]"}
        values |= {"total": 0, "completed": 0, "failed": 0, "times": json.dumps({BatchState.VALIDATING: now})}
        values |= {"created_us": now, "expires_us": now + asked.window_h * 3_600_000_000}

        def add(connection: Connection) -> Batch:
            table = rows.batch.c
            there = connection.scalar(select(func.count()).where(table.project == p.project, table.state.in_(OPEN))) or 0
            if there >= MAX_OPEN:
                raise Conflict(f"{there} batches have not ended yet, and a project has at most {MAX_OPEN} such: wait for one, or cancel one")
            connection.execute(insert(rows.batch).values(values))
            return batch_of(one(connection, p, values["id"]))

        made = await self._database.write(add)
        self.changed.tell()
        return made

    async def get(self, p: Principal, batch: str) -> Batch:
        """One batch."""
        p.require("infer", "read")
        return await self._database.read(lambda connection: batch_of(one(connection, p, batch)))

    async def list(self, p: Principal, *, after: str | None = None, limit: int = 20) -> BatchPage:
        """Batches, newest first, behind the one that is called `after`."""
        p.require("infer", "read")

        def look(connection: Connection) -> list[Batch]:
            query = own(p).order_by(rows.batch.c.id.desc()).limit(limit + 1)
            if after is not None:
                query = query.where(rows.batch.c.id < one(connection, p, after, field="after").id)
            return [batch_of(row) for row in connection.execute(query)]

        found = await self._database.read(look)
        return BatchPage(data=found[:limit], has_more=len(found) > limit)

    async def cancel(self, p: Principal, batch: str) -> Batch:
        """Begin no more of its requests; what was answered stays. A second time changes nothing."""
        p.require("infer")

        def change(connection: Connection) -> Batch:
            row = one(connection, p, batch)
            if row.state not in (BatchState.CANCELLING, BatchState.CANCELLED):
                switch(connection, row, BatchState.CANCELLING)
            return batch_of(one(connection, p, batch))

        cancelled = await self._database.write(change)
        self.changed.tell()
        return cancelled
