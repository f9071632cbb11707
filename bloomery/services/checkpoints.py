"""What runs saved: named training checkpoints, and snapshots for sampling.

`announce` writes down, before the operation is journaled, under which key and name it saves; `settle` makes that row ready. Nobody outside sees
automatic checkpoints, announcements, or what expired. Deleting removes the row: garbage collection removes blobs that no row names.
"""

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, delete, func, insert, or_, select, update

from bloomery.services.principal import Principal
from bloomery.services.run_rows import TINKER
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import Conflict, InvalidInput, NotFound
from bloomery.types.ids import new_id, now_us
from bloomery.types.resources import Checkpoint

NAMED: Final = "named"
SNAPSHOT: Final = "snapshot"
FOLDERS: Final[Mapping[str, str]] = {NAMED: "weights", SNAPSHOT: "sampler_weights"}
MAX_TTL_S: Final = 10 * 365 * 86_400

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
PATH: Final = re.compile(r"tinker://(?P<run>[^/]+)/(?P<folder>[^/]+)/(?P<name>[^/]+)")


class CheckpointRow(NamedTuple):
    """One saved state (`kind` named) or one published version (`kind` snapshot)."""

    id: str
    run_id: str
    tinker_id: str | None
    seq: int
    kind: str
    name: str | None
    key: str
    digest: str | None
    version: str | None
    size_bytes: int
    step: int
    metadata: Mapping[str, Any]
    created_us: int
    expires_us: int | None

    @property
    def path(self) -> str | None:
        """Its `tinker://` path; None for an ephemeral snapshot."""
        return None if self.name is None else f"tinker://{self.tinker_id or self.run_id}/{FOLDERS[self.kind]}/{self.name}"

    def shown(self) -> Checkpoint:
        """As `/api/v1` shows it."""
        names = ("run_id", "seq", "kind", "name", "digest", "version", "size_bytes", "step", "created_us")
        return Checkpoint(**{name: getattr(self, name) for name in names})


class CheckpointPage(NamedTuple):
    """Some of all named checkpoints and snapshots, newest first."""

    checkpoints: list[CheckpointRow]
    total: int


class Announcement(NamedTuple):
    """What an operation will save."""

    project: str
    run_id: str
    seq: int
    kind: str
    name: str | None
    key: str
    ttl_s: int | None
    overwrite: bool
    metadata: Mapping[str, Any]


class Checkpoints:
    """Finds, lists, keeps and deletes; every look-up is confined to the caller's project."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def announce(self, announcement: Announcement) -> str:
        """Claim name and key for an operation; asked again for the same operation, the same key."""
        return await self._database.write(lambda connection: _announce(connection, announcement))

    async def find(self, p: Principal, path: str) -> CheckpointRow:
        """What a `tinker://` path names."""
        parts = PATH.fullmatch(path)
        kinds = {folder: kind for kind, folder in FOLDERS.items()}
        if parts is None or parts["folder"] not in kinds:
            raise InvalidInput(f"`{path}` is no path of weights: use `tinker://<run>/weights/<name>` or `.../sampler_weights/<name>`", field="path")
        return await self.named(p, parts["run"], kinds[parts["folder"]], parts["name"])

    async def named(self, p: Principal, run_id: str, kind: str, name: str) -> CheckpointRow:
        """By run (its id or its tinker id), kind and name."""
        condition = (rows.checkpoint.c.kind == kind) & (rows.checkpoint.c.name == name) & of_run(run_id)
        return await self._one(p, condition, f"run `{run_id}` has no {FOLDERS[kind]} `{name}`")

    async def of_operation(self, p: Principal, run_id: str, seq: int) -> CheckpointRow:
        """What operation `seq` saved."""
        condition = (rows.checkpoint.c.kind.in_(FOLDERS)) & (rows.checkpoint.c.seq == seq) & of_run(run_id)
        return await self._one(p, condition, f"operation {seq} of run `{run_id}` saved nothing that is still there")

    async def list(self, p: Principal, *, run_id: str | None = None, kind: str | None = None, limit: int = 100, offset: int = 0) -> CheckpointPage:
        """Named checkpoints and snapshots, or those of one kind, newest first."""
        p.require("read")
        conditions = [_visible(p), rows.checkpoint.c.name.is_not(None)]
        if kind is not None:
            conditions.append(rows.checkpoint.c.kind == kind)
        if run_id is not None:
            conditions.append(of_run(run_id))
        return await self._database.read(lambda connection: _page(connection, conditions, limit, offset))

    async def set_ttl(self, p: Principal, path: str, ttl_s: int | None) -> None:
        """Let it expire in `ttl_s`; None keeps it."""
        p.require("train")
        check_ttl(ttl_s)
        found = await self.find(p, path)
        expires_us = None if ttl_s is None else now_us() + ttl_s * 1_000_000
        statement = update(rows.checkpoint).where(rows.checkpoint.c.id == found.id).values(expires_us=expires_us)
        await self._database.write(lambda connection: connection.execute(statement))

    async def delete(self, p: Principal, path: str) -> None:
        """Forget it; a version that a deployment serves stays served."""
        p.require("train")
        found = await self.find(p, path)
        await self._database.write(lambda connection: connection.execute(delete(rows.checkpoint).where(rows.checkpoint.c.id == found.id)))

    async def _one(self, p: Principal, condition: ColumnElement[bool], otherwise: str) -> CheckpointRow:
        query = _checkpoints().where(_visible(p), condition).order_by(rows.checkpoint.c.seq.desc()).limit(1)
        row = await self._database.read(lambda connection: connection.execute(query).first())
        if row is None:
            raise NotFound(f"{otherwise}: it was never saved, was deleted, or expired", field="path")
        return _checkpoint(row)


def check_name(name: str) -> None:
    """Names are parts of paths."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"`{name[:80]}` cannot be a name: up to 128 letters, digits and `._-`, beginning with a letter or digit", field="name")


def check_ttl(ttl_s: int | None) -> None:
    """A time to live that is one."""
    if ttl_s is not None and not 1 <= ttl_s <= MAX_TTL_S:
        raise InvalidInput(f"ttl_seconds is {ttl_s}: it must be from 1 to {MAX_TTL_S}, or left out to keep the checkpoint", field="ttl_seconds")


def new_key(run_id: str, seq: int) -> str:
    """Where a checkpoint's blob lies: never the same place twice, so that a row's blob is never replaced."""
    return f"checkpoints/{run_id}/{seq}-{secrets.token_hex(8)}.safetensors"


def _announce(connection: Connection, announced: Announcement) -> str:
    table = rows.checkpoint.c
    mine = (table.run_id == announced.run_id, table.kind == announced.kind)
    known = connection.execute(select(table.id, table.key, table.name).where(*mine, table.seq == announced.seq)).one_or_none()
    if known is not None:
        connection.execute(update(rows.checkpoint).where(table.id == known.id).values(name=announced.name, ttl_s=announced.ttl_s))
        return str(known.key)
    if announced.name is not None and not announced.overwrite:
        taken = select(table.id).where(*mine, table.name == announced.name, or_(table.expires_us.is_(None), table.expires_us > now_us()))
        if connection.execute(taken).first() is not None:
            raise Conflict(f"run `{announced.run_id}` has {FOLDERS[announced.kind]} `{announced.name}` already: choose another name", field="name")
    values = {name: value for name, value in announced._asdict().items() if name not in ("overwrite", "metadata")}
    values |= {"id": new_id("checkpoint"), "state": "pending", "size_bytes": 0, "step": 0, "created_us": now_us()}
    connection.execute(insert(rows.checkpoint).values(values | {"metadata": json.dumps(dict(announced.metadata))}))
    return announced.key


def _page(connection: Connection, conditions: list[ColumnElement[bool]], limit: int, offset: int) -> CheckpointPage:
    total = connection.scalar(select(func.count()).select_from(rows.checkpoint).where(*conditions))
    query = _checkpoints().where(*conditions).order_by(rows.checkpoint.c.created_us.desc(), rows.checkpoint.c.id.desc()).limit(limit).offset(offset)
    return CheckpointPage([_checkpoint(row) for row in connection.execute(query)], total or 0)


def _visible(p: Principal) -> ColumnElement[bool]:
    table = rows.checkpoint.c
    alive = or_(table.expires_us.is_(None), table.expires_us > now_us())
    return (table.project == p.project) & (table.state == "ready") & (table.kind != "auto") & alive


def of_run(run_id: str) -> ColumnElement[bool]:
    alias = rows.alias.c
    named = select(alias.target_id).where(
        alias.contract == TINKER, alias.kind == "run", alias.name == run_id, alias.project == rows.checkpoint.c.project
    )
    return or_(rows.checkpoint.c.run_id == run_id, rows.checkpoint.c.run_id.in_(named))


def _checkpoints() -> Select[Any]:
    alias, run_id = rows.alias.c, rows.checkpoint.c.run_id
    name = select(alias.name).where(alias.contract == TINKER, alias.kind == "run", alias.target_id == run_id).limit(1).scalar_subquery()
    return select(rows.checkpoint, name.label("tinker_id"))


def _checkpoint(row: Row[Any]) -> CheckpointRow:
    names = [name for name in CheckpointRow._fields if name != "metadata"]
    return CheckpointRow(**{name: getattr(row, name) for name in names}, metadata=json.loads(row.metadata))
