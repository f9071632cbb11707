"""Searching the sessions of a project, newest first, page by page."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row, Select, func, or_, select

from bloomery.services.access.principal import Principal
from bloomery.services.training.checkpoints import there
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.ids import now_us

SILENT_US: Final = 120 * 1_000_000
"""A client beats every ten seconds and itself warns of a lost server after so long."""


class SessionCursor(NamedTuple):
    """Behind which session a page begins."""

    created_us: int
    session_id: str


class Ended(NamedTuple):
    """How a client finished: success, errored or interrupted."""

    reason: str
    detail: str | None


class Found(NamedTuple):
    """One session. `ended` is None while it is not; `active`: its client was heard of lately."""

    id: str
    created_us: int
    display_name: str | None
    user_metadata: dict[str, str]
    active: bool
    ended: Ended | None
    checkpoints: int = 0
    checkpoint_bytes: int = 0


class SessionFilter(NamedTuple):
    """What must hold. `words` are looked for in the name, and a session of id `session_id` needs no such name; `reasons` None means any."""

    session_id: str | None = None
    words: tuple[str, ...] = ()
    metadata: Mapping[str, str] = {}
    active: bool = True
    finished: bool = True
    silent: bool = True
    """Neither finished nor heard of lately."""
    reasons: frozenset[str] | None = None


class SessionPage(NamedTuple):
    """Some of what was found, and where the next page begins."""

    sessions: list[Found]
    next: SessionCursor | None


class SessionSearch:
    """Reads sessions and counts what they saved."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, p: Principal, wanted: SessionFilter, *, behind: SessionCursor | None, limit: int) -> SessionPage:
        """One page."""
        p.require("read", "train")
        return await self._database.read(lambda connection: _find(connection, p.project, wanted, behind, limit))


def _find(connection: Connection, project: str, wanted: SessionFilter, behind: SessionCursor | None, limit: int) -> SessionPage:
    matching = (session for session in _sessions(connection, project, behind) if _matches(session, wanted))
    page = [session for session, _ in zip(matching, range(limit + 1), strict=False)]
    more = len(page) > limit
    shown = _counted(connection, page[:limit])
    return SessionPage(shown, SessionCursor(shown[-1].created_us, shown[-1].id) if more else None)


def _sessions(connection: Connection, project: str, behind: SessionCursor | None) -> Iterator[Found]:
    table, now = rows.session.c, now_us()
    query: Select[Any] = select(rows.session).where(table.project == project)
    if behind is not None:
        earlier = (table.created_us == behind.created_us) & (table.id < behind.session_id)
        query = query.where(or_(table.created_us < behind.created_us, earlier))
    for row in connection.execute(query.order_by(table.created_us.desc(), table.id.desc())):
        yield _found(row, now)


def _found(row: Row[Any], now: int) -> Found:
    ended = None
    if row.finished_us is not None:
        reason, _, detail = (row.finish_reason or "").partition(": ")
        ended = Ended(reason, detail or None)
    return Found(row.id, row.created_us, row.display_name, json.loads(row.user_metadata), ended is None and row.heartbeat_us > now - SILENT_US, ended)


def _matches(session: Found, wanted: SessionFilter) -> bool:
    named = (session.display_name or "").casefold()
    by_name = bool(wanted.words) and all(word.casefold() in named for word in wanted.words)
    asked = wanted.session_id is not None or bool(wanted.words)
    if asked and not by_name and session.id != wanted.session_id:
        return False
    if any(session.user_metadata.get(key) != value for key, value in wanted.metadata.items()):
        return False
    if session.ended is not None:
        return wanted.finished and (wanted.reasons is None or session.ended.reason in wanted.reasons)
    return wanted.active if session.active else wanted.silent


def _counted(connection: Connection, sessions: list[Found]) -> list[Found]:
    table, run = rows.checkpoint.c, rows.run.c
    query = select(run.session_id, func.count(), func.sum(table.size_bytes)).select_from(rows.checkpoint.join(rows.run, table.run_id == run.id))
    mine = (run.session_id.in_([session.id for session in sessions]), there(), table.name.is_not(None))
    counts = {row[0]: (row[1], int(row[2])) for row in connection.execute(query.where(*mine).group_by(run.session_id))}
    return [session._replace(checkpoints=found[0], checkpoint_bytes=found[1]) for session in sessions for found in [counts.get(session.id, (0, 0))]]
