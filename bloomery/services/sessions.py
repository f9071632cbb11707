"""Sessions of SDK clients: who is connected, which names their runs have, and which weights their samplers hold.

A contract's name of a run is an alias row; a sampling session pins the weights it was created with.
"""

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row, insert, select, update

from bloomery.services.principal import Principal
from bloomery.services.run_rows import TINKER
from bloomery.services.target import Target
from bloomery.services.versions import Version
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import Conflict, Gone, NotFound
from bloomery.types.generation import Weights
from bloomery.types.ids import new_id, now_us

REMEMBERED: Final = 4096
"""Sampling sessions kept in memory: every sample asks for its own."""


class Session(NamedTuple):
    """One client's session."""

    id: str
    tags: list[str]
    user_metadata: dict[str, Any]
    sdk_version: str
    created_us: int
    heartbeat_us: int
    finished_us: int | None


class SamplingSession(NamedTuple):
    """A sampler of a client: weights that stay what they are."""

    id: str
    session_id: str | None
    base_model: str
    base_hash: str
    model_path: str | None
    weights: Weights

    @property
    def target(self) -> Target:
        """What `Sampling` samples with."""
        return Target(self.weights, self.base_hash, None, None, self.model_path or self.base_model)


class Sessions:
    """Creates and finds them; every look-up is confined to the caller's project."""

    def __init__(self, database: Database, *, remembered: int = REMEMBERED) -> None:
        self._database = database
        self._remembered = remembered
        self._samplers: dict[tuple[str, str], SamplingSession] = {}
        """By project and id, the least recently used first. Their rows are written once, and neither changed nor deleted."""

    async def create(self, p: Principal, *, tags: list[str], user_metadata: dict[str, Any], sdk_version: str) -> Session:
        """A fresh session."""
        now = now_us()
        session_id = new_id("session")
        row = {
            "id": session_id,
            "project": p.project,
            "tags": json.dumps(tags),
            "user_metadata": json.dumps(user_metadata),
            "sdk_version": sdk_version,
            "created_us": now,
            "heartbeat_us": now,
        }
        await self._database.write(lambda connection: connection.execute(insert(rows.session), row))
        return await self.get(p, session_id)

    async def get(self, p: Principal, session_id: str) -> Session:
        """One session."""
        return await self._database.read(lambda connection: _session(connection, p.project, session_id))

    async def list(self, p: Principal, *, limit: int, offset: int) -> list[Session]:
        """Sessions, newest first."""
        query = select(rows.session).where(rows.session.c.project == p.project).order_by(rows.session.c.id.desc()).limit(limit).offset(offset)
        return await self._database.read(lambda connection: [_session_of(row) for row in connection.execute(query)])

    async def heartbeat(self, p: Principal, session_id: str) -> None:
        """Still there."""
        await self.require_open(p, session_id)
        await self._set(session_id, heartbeat_us=now_us())

    async def require_open(self, p: Principal, session_id: str) -> Session:
        """The session; Gone once it was finished."""
        session = await self.get(p, session_id)
        if session.finished_us is not None:
            raise Gone(f"session `{session_id}` was finished: begin a new one", field="session_id")
        return session

    async def finish(self, p: Principal, session_id: str, reason: str) -> None:
        """The client is done; its runs and samplers stay."""
        session = await self.get(p, session_id)
        if session.finished_us is None:
            await self._set(session_id, finished_us=now_us(), finish_reason=reason)

    async def run_names(self, p: Principal, session_id: str) -> Sequence[str]:
        """Names of the runs of a session, oldest first. A run's name begins with its session's id."""
        table = rows.alias.c
        query = select(table.name).where(table.project == p.project, table.contract == TINKER, table.kind == "run")
        query = query.where(table.name.startswith(f"{session_id}:", autoescape=True)).order_by(table.created_us)
        return await self._database.read(lambda connection: connection.execute(query).scalars().all())

    async def create_sampling(self, p: Principal, session_id: str, seq: int, version: Version, model_path: str | None) -> SamplingSession:
        """Pin weights under a session's own number; asked again for the same number, the same answer."""
        row = {
            "id": f"{session_id}:sample:{seq}",
            "project": p.project,
            "session_id": session_id,
            "seq": seq,
            "base_model": version.base_model,
            "base_hash": version.base_hash,
            "model_path": model_path,
            "version": version.weights.version,
            "key": version.weights.key,
            "created_us": now_us(),
        }
        return await self._database.write(lambda connection: _pin(connection, row))

    async def get_sampling(self, p: Principal, sampling_session_id: str) -> SamplingSession:
        """One sampling session."""
        key = (p.project, sampling_session_id)
        found = self._samplers.pop(key, None)
        if found is None:
            found = await self._database.read(lambda connection: _sampling(connection, *key))
        self._samplers[key] = found
        if len(self._samplers) > self._remembered:
            del self._samplers[next(iter(self._samplers))]
        return found

    async def samplers(self, p: Principal, session_id: str) -> Sequence[str]:
        """Ids of a session's samplers, oldest first."""
        table = rows.sampling_session.c
        query = select(table.id).where(table.project == p.project, table.session_id == session_id).order_by(table.created_us)
        return await self._database.read(lambda connection: connection.execute(query).scalars().all())

    async def _set(self, session_id: str, **values: Any) -> None:
        statement = update(rows.session).where(rows.session.c.id == session_id).values(**values)
        await self._database.write(lambda connection: connection.execute(statement))


def _session(connection: Connection, project: str, session_id: str) -> Session:
    row = connection.execute(select(rows.session).where(rows.session.c.project == project, rows.session.c.id == session_id)).one_or_none()
    if row is None:
        raise NotFound(f"no session `{session_id}`", field="session_id")
    return _session_of(row)


def _session_of(row: Row[Any]) -> Session:
    return Session(row.id, json.loads(row.tags), json.loads(row.user_metadata), row.sdk_version, row.created_us, row.heartbeat_us, row.finished_us)


def _pin(connection: Connection, row: dict[str, Any]) -> SamplingSession:
    table = rows.sampling_session.c
    _session(connection, row["project"], row["session_id"])
    known = connection.execute(select(rows.sampling_session).where(table.id == row["id"])).one_or_none()
    if known is None:
        connection.execute(insert(rows.sampling_session), row)
    elif (known.version, known.model_path) != (row["version"], row["model_path"]):
        raise Conflict(f"sampler {row['seq']} of session `{row['session_id']}` holds other weights already", field="sampling_session_seq_id")
    return _sampling(connection, row["project"], row["id"])


def _sampling(connection: Connection, project: str, sampling_session_id: str) -> SamplingSession:
    table = rows.sampling_session.c
    row = connection.execute(select(rows.sampling_session).where(table.project == project, table.id == sampling_session_id)).one_or_none()
    if row is None:
        raise NotFound(f"no sampling session `{sampling_session_id}`", field="sampling_session_id")
    return SamplingSession(row.id, row.session_id, row.base_model, row.base_hash, row.model_path, Weights(version=row.version, key=row.key))
