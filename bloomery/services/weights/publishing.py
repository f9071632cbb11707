"""Weights that leave their run: published for every project to read, or copied into a run that only holds them.

A copy shares its blob with the original and outlives it. It lies in a run of its own, in state `copy`, which takes no operations.
"""

import json
from collections.abc import Callable
from hashlib import sha256
from typing import Final, NamedTuple

from sqlalchemy import Connection, insert, select, update

from bloomery.services.access.principal import Principal
from bloomery.services.kinds import COPY, READY
from bloomery.services.training.checkpoints import FOLDERS, CheckpointRow, Checkpoints, check_ttl, owned
from bloomery.services.training.run_rows import NewRun, add_run, one_run
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.store.events import record_event
from bloomery.types.errors import Conflict, NotFound
from bloomery.types.ids import expiry_us, new_id, now_us

NameOf = Callable[[str, int], str]
"""The contract's name for a session's run of a number."""
COPIED: Final = 0
"""The number of the operation that a copy lies under; runs begin with 0 only when they load."""


class SessionSlot(NamedTuple):
    """Where a copy goes: an open session of the caller's and its own number for it."""

    session_id: str
    number: int


class Destination(NamedTuple):
    """Where a copy goes: a project, into a session made for it. The same `request` again finds the same copy."""

    project: str
    request: str | None


class Publishing:
    """Publishes, takes back, copies."""

    def __init__(self, database: Database, checkpoints: Checkpoints) -> None:
        self._database, self._checkpoints = database, checkpoints

    async def publish(self, p: Principal, path: str) -> None:
        """Let every project read it; again changes nothing."""
        await self._set(p, path, now_us(), "checkpoint.published")

    async def unpublish(self, p: Principal, path: str) -> None:
        """Keep it to its project again. Copies and samplers that others made meanwhile stay theirs."""
        await self._set(p, path, None, "checkpoint.unpublished")

    async def copy(self, p: Principal, source: CheckpointRow, to: SessionSlot | Destination, *, ttl_s: int | None, name_of: NameOf) -> str:
        """Copy what the caller may read; the path of the copy."""
        p.require("train")
        check_ttl(ttl_s)
        project = to.project if isinstance(to, Destination) else p.project
        if project != p.project:
            p.require_server()
        return await self._database.write(lambda connection: _copy(connection, p, source, to, project, ttl_s, name_of))

    async def _set(self, p: Principal, path: str, published_us: int | None, event: str) -> None:
        p.require("train")
        found = await self._checkpoints.own(p, path)
        if (found.published_us is None) != (published_us is None):
            await self._database.write(lambda connection: _set(connection, p, found, published_us, event))


def _set(connection: Connection, p: Principal, found: CheckpointRow, published_us: int | None, event: str) -> None:
    mine = update(rows.checkpoint).where(owned(p.project), rows.checkpoint.c.id == found.id)
    connection.execute(mine.values(published_us=published_us))
    record_event(connection, p.project, event, found.run_id, path=found.path, by=p.key_id)


def _copy(
    connection: Connection, p: Principal, source: CheckpointRow, to: SessionSlot | Destination, project: str, ttl_s: int | None, name_of: NameOf
) -> str:
    slot = to if isinstance(to, SessionSlot) else SessionSlot(_session_for(connection, to, source), 0)
    name = name_of(slot.session_id, slot.number)
    run_id = add_run(connection, project, _run_for(connection, source, project, slot.session_id, name), COPY)
    known = connection.execute(select(rows.checkpoint.c.key).where(rows.checkpoint.c.run_id == run_id)).one_or_none()
    if known is None:
        _insert(connection, source, project, run_id, ttl_s)
        record_event(connection, project, "checkpoint.copied", run_id, source=source.path, to=name, by=p.key_id)
    elif known.key != source.key:
        if isinstance(to, Destination):
            raise Conflict(f"the request `{to.request}` made a copy of other weights: give this one another name", field="x-idempotency-key")
        raise Conflict(f"`{name}` holds a copy of other weights: give this one another number", field="model_seq_id")
    return f"tinker://{name}/{FOLDERS[source.kind]}/{source.name}"


def _session_for(connection: Connection, to: Destination, source: CheckpointRow) -> str:
    """A finished session that holds the copy; that of an earlier request of the same name, if there is one."""
    if connection.execute(select(rows.project.c.id).where(rows.project.c.id == to.project)).first() is None:
        raise NotFound(f"no project `{to.project}`", field="destination_project_id")
    session_id = new_id("session") if to.request is None else _session_of(to.project, to.request)
    if connection.execute(select(rows.session.c.id).where(rows.session.c.id == session_id)).first() is not None:
        return session_id
    now = now_us()
    values = {"id": session_id, "project": to.project, "tags": '["copy"]', "user_metadata": "{}", "sdk_version": "", "created_us": now}
    values |= {"heartbeat_us": now, "finished_us": now, "finish_reason": f"success: holds a copy of {source.path}"}
    connection.execute(insert(rows.session).values(values))
    return session_id


def _session_of(project: str, request: str) -> str:
    """An id that follows from the request: nobody else's session has it, and who is asked again finds it."""
    return f"session-{sha256(json.dumps([project, request]).encode()).hexdigest()[:32]}"


def _run_for(connection: Connection, source: CheckpointRow, project: str, session_id: str, name: str) -> NewRun:
    original = one_run(connection, None, source.run_id)
    # What others wrote about their run is not published with its weights.
    metadata = original.metadata if original.project == project else {}
    return NewRun(
        id=new_id("run"),
        base_model=source.base_model,
        base_hash=source.base_hash,
        lora=source.lora,
        micro_batch_tokens=original.micro_batch_tokens,
        metadata=metadata,
        name=None,
        session_id=session_id,
        tinker_id=name,
        first_seq=COPIED + 1,
    )


def _insert(connection: Connection, source: CheckpointRow, project: str, run_id: str, ttl_s: int | None) -> None:
    shared = {name: getattr(source, name) for name in ("kind", "name", "key", "digest", "version", "size_bytes", "step")}
    if connection.execute(select(rows.checkpoint.c.id).where(rows.checkpoint.c.id == source.id)).first() is None:
        raise NotFound(f"`{source.path}` was deleted meanwhile", field="source_path")
    now = now_us()
    values = {"id": new_id("checkpoint"), "project": project, "run_id": run_id, "seq": COPIED, "state": READY, "created_us": now}
    values |= {"metadata": json.dumps(dict(source.metadata)), "expires_us": expiry_us(ttl_s, now)}
    connection.execute(insert(rows.checkpoint).values(shared | values))
