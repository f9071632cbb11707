"""Sessions of SDK clients: who is connected, which names their runs have, and which weights their samplers hold.

A contract's name of a run is an alias row; a sampling session pins the weights it was created with, until nobody asks it any more (`ephemeral`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row, func, insert, select, update

from bloomery.services.access.principal import Principal
from bloomery.services.held import require_kept
from bloomery.services.one_row import one_row
from bloomery.services.training.run_rows import TINKER
from bloomery.services.weights.target import Target
from bloomery.services.weights.versions import Version
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import Conflict, Gone
from bloomery.types.generation import Weights
from bloomery.types.ids import new_id, now_us

REMEMBERED: Final = 4096
"""Sampling sessions kept in memory: every sample asks for its own."""

SamplerKey = tuple[str, str]
"""The project and the id of a sampler."""


class Session(NamedTuple):
    """One client's session."""

    id: str
    tags: list[str]
    user_metadata: dict[str, Any]
    sdk_version: str
    created_us: int
    heartbeat_us: int
    finished_us: int | None
    display_name: str | None = None


class SamplingSession(NamedTuple):
    """A sampler of a client: weights that stay what they are, unless it follows its run."""

    id: str
    session_id: str | None
    base_model: str
    base_hash: str
    model_path: str | None
    weights: Weights
    follows: bool = False
    """Whether it takes over what its run saves in flight."""

    @property
    def target(self) -> Target:
        """What `Sampling` samples with."""
        return Target(self.weights, self.base_hash, None, None, self.model_path or self.base_model)


class Sessions:
    """Creates and finds them; every look-up is confined to the caller's project. Whoever trains or samples has sessions."""

    def __init__(self, database: Database, *, remembered: int = REMEMBERED) -> None:
        self._database = database
        self._remembered = remembered
        self._samplers: dict[SamplerKey, SamplingSession] = {}
        """The least recently used first. What samplers that follow nobody hold does not change before `forget`."""
        self._forgotten = 0
        """How often samplers were forgotten."""
        self._asked_us: dict[SamplerKey, int] = {}
        """When samplers were asked last; what of it is not in the database yet."""

    async def create(
        self, p: Principal, *, tags: list[str], user_metadata: dict[str, Any], sdk_version: str, display_name: str | None = None
    ) -> Session:
        """A fresh session."""
        p.require("train", "infer")
        now = now_us()
        session_id = new_id("session")
        row = {
            "id": session_id,
            "project": p.project,
            "tags": json.dumps(tags),
            "user_metadata": json.dumps(user_metadata),
            "sdk_version": sdk_version,
            "display_name": display_name,
            "created_us": now,
            "heartbeat_us": now,
        }
        await self._database.write(lambda connection: connection.execute(insert(rows.session), row))
        return await self._get(p, session_id)

    async def get(self, p: Principal, session_id: str) -> Session:
        """One session."""
        p.require("read", "train")
        return await self._get(p, session_id)

    async def list(self, p: Principal, *, limit: int, offset: int) -> list[Session]:
        """Sessions, newest first."""
        p.require("read", "train")
        query = select(rows.session).where(rows.session.c.project == p.project).order_by(rows.session.c.id.desc()).limit(limit).offset(offset)
        return await self._database.read(lambda connection: [_session_of(row) for row in connection.execute(query)])

    async def heartbeat(self, p: Principal, session_id: str) -> None:
        """Still there."""
        p.require("train", "infer")
        await self.require_open(p, session_id)
        await self._set(session_id, heartbeat_us=now_us())

    async def require_open(self, p: Principal, session_id: str) -> Session:
        """The session; Gone once it was finished."""
        p.require("train", "infer")
        session = await self._get(p, session_id)
        if session.finished_us is not None:
            raise Gone(f"session `{session_id}` was finished: begin a new one", field="session_id")
        return session

    async def finish(self, p: Principal, session_id: str, reason: str) -> None:
        """The client is done; its runs stay, and its samplers while others ask them."""
        p.require("train", "infer")
        session = await self._get(p, session_id)
        if session.finished_us is None:
            await self._set(session_id, finished_us=now_us(), finish_reason=reason)

    async def run_names(self, p: Principal, session_id: str) -> Sequence[str]:
        """Names of the runs of a session, oldest first. A run's name begins with its session's id."""
        p.require("read", "train")
        table = rows.alias.c
        query = select(table.name).where(table.project == p.project, table.contract == TINKER, table.kind == "run")
        query = query.where(table.name.startswith(f"{session_id}:", autoescape=True)).order_by(table.created_us)
        return await self._database.read(lambda connection: connection.execute(query).scalars().all())

    async def create_sampling(self, p: Principal, session_id: str, seq: int, version: Version, model_path: str | None) -> SamplingSession:
        """Pin weights under a session's own number; asked again for the same number, the same answer."""
        p.require("infer", "train")
        row = _sampler_row(p, session_id, seq, version) | {"model_path": model_path}
        return await self._database.write(lambda connection: _pin(connection, row))

    async def follow(self, p: Principal, session_id: str, seq: int, version: Version, *, run_id: str, saved: int) -> SamplingSession:
        """A sampler that begins with what operation `saved` of a run published, and the run's other such samplers move on to that with it.

        Asked again for the same number, the same sampler; nobody goes back to older weights.
        """
        p.require("infer", "train")
        row = _sampler_row(p, session_id, seq, version) | {"follows_run": run_id, "follows_seq": saved}
        return await self._database.write(lambda connection: _follow(connection, row))

    async def get_sampling(self, p: Principal, sampling_session_id: str) -> SamplingSession:
        """One sampling session."""
        p.require("infer", "read")
        key = (p.project, sampling_session_id)
        found, forgotten = self._samplers.pop(key, None), self._forgotten
        if found is None:
            found = await self._database.read(lambda connection: _sampling(connection, *key))
        self.note_asked(*key)
        # What was read before others let go of their weights may be one of them.
        if found.follows or forgotten != self._forgotten:
            return found
        self._samplers[key] = found
        if len(self._samplers) > self._remembered:
            del self._samplers[next(iter(self._samplers))]
        return found

    async def join_sampling(self, p: Principal, sampling_session_id: str) -> int:
        """A number for one more client of a sampler: 1, 2, ..., never given twice. The first client is 0."""
        p.require("infer")
        key = (p.project, sampling_session_id)
        return await self._database.write(lambda connection: _join(connection, *key))

    def note_asked(self, project: str, sampling_session_id: str) -> None:
        """Somebody samples with this sampler, or waits for a sample of it."""
        self._asked_us[project, sampling_session_id] = now_us()

    async def store_asked(self) -> None:
        """Store when samplers were asked last; called now and then, off the request path."""
        asked_us = dict(self._asked_us)
        if asked_us:
            await self._database.write(lambda connection: _store_asked(connection, asked_us))
            self._asked_us = {key: at_us for key, at_us in self._asked_us.items() if at_us > asked_us.get(key, 0)}

    def forget(self, samplers: Iterable[SamplerKey]) -> None:
        """These let go of their weights: whoever asks one reads its row again."""
        self._forgotten += 1
        for key in samplers:
            self._samplers.pop(key, None)

    async def samplers(self, p: Principal, session_id: str) -> Sequence[str]:
        """Ids of a session's samplers, oldest first."""
        p.require("read", "train")
        table = rows.sampling_session.c
        query = select(table.id).where(table.project == p.project, table.session_id == session_id).order_by(table.created_us)
        return await self._database.read(lambda connection: connection.execute(query).scalars().all())

    async def _get(self, p: Principal, session_id: str) -> Session:
        return await self._database.read(lambda connection: _session(connection, p.project, session_id))

    async def _set(self, session_id: str, **values: Any) -> None:
        statement = update(rows.session).where(rows.session.c.id == session_id).values(**values)
        await self._database.write(lambda connection: connection.execute(statement))


def _session(connection: Connection, project: str, session_id: str) -> Session:
    query = select(rows.session).where(rows.session.c.project == project, rows.session.c.id == session_id)
    row = one_row(connection, query, f"session `{session_id}`", field="session_id")
    return _session_of(row)


def _session_of(row: Row[Any]) -> Session:
    tags, metadata = json.loads(row.tags), json.loads(row.user_metadata)
    return Session(row.id, tags, metadata, row.sdk_version, row.created_us, row.heartbeat_us, row.finished_us, row.display_name)


def _pin(connection: Connection, row: dict[str, Any]) -> SamplingSession:
    table = rows.sampling_session.c
    _session(connection, row["project"], row["session_id"])
    known = connection.execute(select(rows.sampling_session).where(table.id == row["id"])).one_or_none()
    if known is None:
        require_kept(connection, row["key"])
        connection.execute(insert(rows.sampling_session), row)
    elif (known.version, known.model_path) != (row["version"], row["model_path"]):
        raise Conflict(f"sampler {row['seq']} of session `{row['session_id']}` holds other weights already", field="sampling_session_seq_id")
    return _sampling(connection, row["project"], row["id"])


def _sampler_row(p: Principal, session_id: str, seq: int, version: Version) -> dict[str, Any]:
    return {
        "id": f"{session_id}:sample:{seq}",
        "project": p.project,
        "session_id": session_id,
        "seq": seq,
        "base_model": version.base_model,
        "base_hash": version.base_hash,
        "version": version.weights.version,
        "key": version.weights.key,
        "created_us": now_us(),
    }


def _follow(connection: Connection, row: dict[str, Any]) -> SamplingSession:
    table = rows.sampling_session.c
    _session(connection, row["project"], row["session_id"])
    known = connection.execute(select(rows.sampling_session).where(table.id == row["id"])).one_or_none()
    if known is None:
        connection.execute(insert(rows.sampling_session), row)
    elif known.follows_run != row["follows_run"]:
        raise Conflict(f"sampler {row['seq']} of session `{row['session_id']}` holds other weights already", field="sampling_session_seq_id")
    elif known.gone_us is not None:
        raise _gone(known.id)
    team = (table.follows_run == row["follows_run"]) & table.gone_us.is_(None)
    newest = connection.execute(select(rows.sampling_session).where(team).order_by(table.follows_seq.desc()).limit(1)).one()
    weights = {name: getattr(newest, name) for name in ("version", "key", "follows_seq")}
    connection.execute(update(rows.sampling_session).where(team, table.follows_seq < newest.follows_seq).values(weights))
    if known is None:
        # What it was made for may have gone, but then a newer save that the others follow has superseded it.
        require_kept(connection, newest.key)
    return _sampling(connection, row["project"], row["id"])


def _join(connection: Connection, project: str, sampling_session_id: str) -> int:
    table = rows.sampling_session.c
    _sampling(connection, project, sampling_session_id)
    where = table.id == sampling_session_id
    connection.execute(update(rows.sampling_session).where(where).values(clones=func.coalesce(table.clones, 0) + 1))
    number: int = connection.execute(select(table.clones).where(where)).scalar_one()
    return number


def _store_asked(connection: Connection, asked_us: Mapping[SamplerKey, int]) -> None:
    table = rows.sampling_session.c
    for (project, sampler_id), at_us in asked_us.items():
        connection.execute(update(rows.sampling_session).where(table.project == project, table.id == sampler_id).values(asked_us=at_us))


def _sampling(connection: Connection, project: str, sampling_session_id: str) -> SamplingSession:
    table = rows.sampling_session.c
    query = select(rows.sampling_session).where(table.project == project, table.id == sampling_session_id)
    row = one_row(connection, query, f"sampling session `{sampling_session_id}`", field="sampling_session_id")
    if row.gone_us is not None:
        raise _gone(sampling_session_id)
    return SamplingSession(
        row.id, row.session_id, row.base_model, row.base_hash, row.model_path, Weights(version=row.version, key=row.key), row.follows_run is not None
    )


def _gone(sampling_session_id: str) -> Gone:
    why = "their name is gone, or they never had one, and nobody sampled from them for a while"
    remedy = "save the run's weights again for another sampler, under a name if they shall stay"
    return Gone(f"sampler `{sampling_session_id}` let its weights go, because {why}: {remedy}", field="sampling_session_id")
