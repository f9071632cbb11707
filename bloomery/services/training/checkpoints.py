"""What runs saved: named training checkpoints, snapshots for sampling, and exports for other programs.

`announce` writes down, before the operation is journaled, under which key and name it saves; `settle` makes that row ready. What has no name and
expires as all such does is not announced: whoever trains waits for each of these writes. Nobody outside sees
automatic checkpoints, announcements, or what expired. Deleting removes the row: garbage collection removes blobs that no row names.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Select, delete, func, insert, or_, select, tuple_, update

from bloomery.services.access.principal import Principal
from bloomery.services.kinds import EXTERNAL, NAMED, PENDING, READY, SNAPSHOT, SOURCE
from bloomery.services.needed import needs_name, needs_saved
from bloomery.services.training.run_rows import TINKER
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import Conflict, InvalidInput, NotFound, shown
from bloomery.types.ids import expiry_us, new_id, now_us
from bloomery.types.operations import LoraSpec
from bloomery.types.resources import Checkpoint

FOLDERS: Final[Mapping[str, str]] = {NAMED: "weights", SNAPSHOT: "sampler_weights", EXTERNAL: "external_weights"}
MAX_TTL_S: Final = 10 * 365 * 86_400

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
PATH: Final = re.compile(r"tinker://(?P<run>[^/]+)/(?P<folder>[^/]+)/(?P<name>[^/]+)")
_SHOWN_CHARS: Final = 256
"""Of a path, where a message repeats it: more than a path that there is has."""


class CheckpointRow(NamedTuple):
    """One saved state (`kind` named), one published version (`kind` snapshot) or an export of it (`kind` external), and what it was trained on."""

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
    published_us: int | None
    """Since when every project may read it."""
    base_model: str
    base_hash: str
    lora: LoraSpec

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
    """What an operation will save, or (`kind` SOURCE) load."""

    project: str
    run_id: str
    seq: int
    kind: str
    name: str | None = None
    key: str = ""
    """Of the blob; what is published has none before it is."""
    ttl_s: int | None = None
    overwrite: bool = False
    metadata: Mapping[str, Any] = MappingProxyType({})


class Checkpoints:
    """Finds, lists, keeps and deletes. `find` and `named` are for reading (`readable`), `own` is for changing (`owned`)."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def announce(self, announcement: Announcement) -> str:
        """Claim name and key for an operation; asked again for the same operation, the same key."""
        return await self._database.write(lambda connection: _announce(connection, announcement))

    async def find(self, p: Principal, path: str) -> CheckpointRow:
        """What a `tinker://` path names, to be read."""
        p.require("read", "train")
        return await self._one(readable(p.project), _parse(path))

    async def own(self, p: Principal, path: str) -> CheckpointRow:
        """What a `tinker://` path names, to be changed: whoever may read it need not own it."""
        p.require("train")
        return await self._one(owned(p.project), _parse(path))

    async def named(self, p: Principal, run_id: str, kind: str, name: str) -> CheckpointRow:
        """By run (its id or its tinker id), kind and name."""
        p.require("read", "train")
        return await self._one(readable(p.project), _Named(run_id, kind, name), field="name")

    async def name_at(self, p: Principal, run_id: str, kind: str, seq: int) -> str | None:
        """The name under which an operation saved, while that is there."""
        p.require("read", "train")
        table = rows.checkpoint.c
        query = select(table.name).where(owned(p.project), table.kind == kind, table.seq == seq, of_run(run_id))
        return await self._database.read(lambda connection: connection.scalar(query))

    async def signed(self, checkpoint_id: str) -> CheckpointRow:
        """Whosever it is: for those who bring its id under this server's signature."""
        query = _checkpoints().where(there(), rows.checkpoint.c.id == checkpoint_id)
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        if row is None:
            raise NotFound("these weights were deleted, or expired", field="path")
        return _checkpoint(row)

    async def list(self, p: Principal, *, run_id: str | None = None, kind: str | None = None, limit: int = 100, offset: int = 0) -> CheckpointPage:
        """Named checkpoints and snapshots, or those of one kind, newest first."""
        p.require("read", "train")
        conditions = [owned(p.project), rows.checkpoint.c.name.is_not(None)]
        if kind is not None:
            conditions.append(rows.checkpoint.c.kind == kind)
        if run_id is not None:
            conditions.append(of_run(run_id))
        return await self._database.read(lambda connection: _page(connection, conditions, limit, offset))

    async def latest(self, p: Principal, run_ids: Sequence[str]) -> Mapping[tuple[str, str], CheckpointRow]:
        """The newest named one of each kind of these runs, by run id and kind."""
        p.require("read", "train")
        table = rows.checkpoint.c
        named = (owned(p.project), table.name.is_not(None), table.run_id.in_(run_ids))
        newest = select(table.run_id, table.kind, func.max(table.seq)).where(*named).group_by(table.run_id, table.kind)
        query = _checkpoints().where(tuple_(table.run_id, table.kind, table.seq).in_(newest))
        found = await self._database.read(lambda connection: [_checkpoint(row) for row in connection.execute(query)])
        return {(row.run_id, row.kind): row for row in found}

    async def set_ttl(self, p: Principal, path: str, ttl_s: int | None) -> None:
        """Let it expire in `ttl_s`, unless a job that has not ended needs it; None keeps it."""
        p.require("train")
        check_ttl(ttl_s)
        found = await self.own(p, path)

        def change(connection: Connection) -> None:
            if ttl_s is not None:
                _require_unneeded(connection, p.project, found)
            statement = update(rows.checkpoint).where(rows.checkpoint.c.id == found.id)
            connection.execute(statement.values(expires_us=expiry_us(ttl_s, now_us())))

        await self._database.write(change)

    async def delete(self, p: Principal, path: str) -> None:
        """Forget it, unless a job that has not ended needs it; a version that a deployment serves stays served."""
        p.require("train")
        found = await self.own(p, path)

        def forget(connection: Connection) -> None:
            _require_unneeded(connection, p.project, found)
            connection.execute(delete(rows.checkpoint).where(rows.checkpoint.c.id == found.id))

        await self._database.write(forget)

    async def _one(self, allowed: ColumnElement[bool], wanted: "_Named", field: str = "path") -> CheckpointRow:
        table = rows.checkpoint.c
        query = _checkpoints().where(allowed, table.kind == wanted.kind, table.name == wanted.name, of_run(wanted.run_id))
        row = await self._database.read(lambda connection: connection.execute(query.order_by(table.seq.desc()).limit(1)).first())
        if row is None:
            what = f"run `{shown(wanted.run_id, _SHOWN_CHARS)}` has no {FOLDERS[wanted.kind]} `{shown(wanted.name, _SHOWN_CHARS)}`"
            raise NotFound(f"{what}: it was never saved, was deleted, expired, or is another project's and not published", field=field)
        return _checkpoint(row)


class _Named(NamedTuple):
    """What a path spells."""

    run_id: str
    kind: str
    name: str


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


def owned(project: str) -> ColumnElement[bool]:
    """What belongs to a project and can be had: finished, not expired, not automatic."""
    return there() & (rows.checkpoint.c.project == project)


def readable(project: str) -> ColumnElement[bool]:
    """What a project may read and sample from: what it owns, and what others published."""
    return there() & ((rows.checkpoint.c.project == project) | rows.checkpoint.c.published_us.is_not(None))


def of_run(run_id: str) -> ColumnElement[bool]:
    """The checkpoints of a run by its id or its tinker id."""
    alias = rows.alias.c
    named = select(alias.target_id).where(
        alias.contract == TINKER, alias.kind == "run", alias.name == run_id, alias.project == rows.checkpoint.c.project
    )
    return or_(rows.checkpoint.c.run_id == run_id, rows.checkpoint.c.run_id.in_(named))


def checkpoint_lasts(connection: Connection, project: str, run_id: str, name: str) -> bool:
    """Whether a named checkpoint is there, for this project to read, until somebody deletes it."""
    table = rows.checkpoint.c
    lasting = (readable(project), table.kind == NAMED, table.name == name, of_run(run_id), table.expires_us.is_(None))
    return connection.execute(select(table.id).where(*lasting).limit(1)).first() is not None


def _require_unneeded(connection: Connection, project: str, found: CheckpointRow) -> None:
    if (needed := needs_saved(connection, project, found)) is not None:
        raise Conflict(f"`{found.path}` {needed}", field="path")


def _parse(path: str) -> _Named:
    parts = PATH.fullmatch(path)
    kinds = {folder: kind for kind, folder in FOLDERS.items()}
    if parts is None or parts["folder"] not in kinds:
        raise InvalidInput(
            f"`{shown(path, _SHOWN_CHARS)}` is no path of weights: use `tinker://<run>/weights/<name>` or `.../sampler_weights/<name>`", field="path"
        )
    return _Named(parts["run"], kinds[parts["folder"]], parts["name"])


def _announce(connection: Connection, announced: Announcement) -> str:
    table = rows.checkpoint.c
    mine = (table.run_id == announced.run_id, table.kind == announced.kind)
    if announced.name is not None and not announced.overwrite:
        others = (*mine, table.seq != announced.seq, table.name == announced.name)
        taken = select(table.id).where(*others, _unexpired())
        if connection.execute(taken).first() is not None:
            tinker_id = connection.scalar(_tinker_name(announced.run_id))
            # Of the two contracts only that one can.
            otherwise = ", or overwrite it (`overwrite=True`)" if tinker_id and announced.kind == NAMED else ""
            what = f"run `{tinker_id or announced.run_id}` has {FOLDERS[announced.kind]} `{announced.name}` already"
            raise Conflict(f"{what}: choose another name{otherwise}", field="name")
    if announced.overwrite and announced.kind == NAMED:
        tinker_id = connection.scalar(_tinker_name(announced.run_id))
        if (needed := needs_name(connection, announced.project, (announced.run_id, tinker_id), announced.name)) is not None:
            raise Conflict(f"{FOLDERS[NAMED]} `{announced.name}` of run `{tinker_id or announced.run_id}` {needed}", field="name")
    # What was to have this number before, of another kind, was not journaled: it would take what becomes of this one.
    others = (table.run_id == announced.run_id, table.seq == announced.seq, table.kind != announced.kind, table.state == PENDING)
    connection.execute(delete(rows.checkpoint).where(*others))
    metadata = json.dumps(dict(announced.metadata))
    # Announced before, but not journaled then: what is asked now counts.
    known = connection.execute(select(table.id, table.key).where(*mine, table.seq == announced.seq)).one_or_none()
    if known is not None:
        asked = {"name": announced.name, "ttl_s": announced.ttl_s, "metadata": metadata}
        # What is to be loaded is there; what is to be saved gets the place that it was promised.
        key = announced.key if announced.kind == SOURCE else str(known.key)
        connection.execute(update(rows.checkpoint).where(table.id == known.id).values(asked | {"key": key}))
        return key
    values = {name: value for name, value in announced._asdict().items() if name not in ("overwrite", "metadata")}
    values |= {"id": new_id("checkpoint"), "state": PENDING, "size_bytes": 0, "step": 0, "created_us": now_us()}
    connection.execute(insert(rows.checkpoint).values(values | {"metadata": metadata}))
    return announced.key


def _tinker_name(run_id: str | ColumnElement[str]) -> Select[Any]:
    """What the tinker contract calls a run, where it knows it."""
    alias = rows.alias.c
    return select(alias.name).where(alias.contract == TINKER, alias.kind == "run", alias.target_id == run_id).limit(1)


def _page(connection: Connection, conditions: list[ColumnElement[bool]], limit: int, offset: int) -> CheckpointPage:
    total = connection.scalar(select(func.count()).select_from(rows.checkpoint).where(*conditions))
    query = _checkpoints().where(*conditions).order_by(rows.checkpoint.c.created_us.desc(), rows.checkpoint.c.id.desc()).limit(limit).offset(offset)
    return CheckpointPage([_checkpoint(row) for row in connection.execute(query)], total or 0)


def there() -> ColumnElement[bool]:
    """What callers see: saved by name or for a sampler, and its time is not over."""
    table = rows.checkpoint.c
    return (table.state == READY) & table.kind.in_(FOLDERS) & _unexpired()


def _unexpired() -> ColumnElement[bool]:
    table = rows.checkpoint.c
    return or_(table.expires_us.is_(None), table.expires_us > now_us())


def _checkpoints() -> Select[Any]:
    run = rows.run.c
    name = _tinker_name(run.id).scalar_subquery()
    joined = rows.checkpoint.join(rows.run, rows.checkpoint.c.run_id == run.id)
    return select(rows.checkpoint, name.label("tinker_id"), run.base_model, run.base_hash, run.lora).select_from(joined)


def _checkpoint(row: Row[Any]) -> CheckpointRow:
    parsed = {"metadata": json.loads(row.metadata), "lora": msgspec.json.decode(row.lora, type=LoraSpec)}
    return CheckpointRow(**parsed, **{name: getattr(row, name) for name in CheckpointRow._fields if name not in parsed})
