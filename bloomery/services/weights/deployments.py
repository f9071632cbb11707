"""Served names. A deployment has numbered revisions, of which exactly one is live; states change in `_switch` alone, by compare-and-swap.

The api is the only writer, so what every name serves is held in memory: a request that names it touches no disk, and a change counts at once.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, get_args

from pydantic import TypeAdapter
from sqlalchemy import Column, Connection, Row, Select, bindparam, func, insert, select, update
from sqlalchemy.sql.dml import ReturningUpdate

from bloomery.services.access.auth import name_of
from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import Repeatable, answer_before, answered, once
from bloomery.services.engines.models import Models
from bloomery.services.held import require_kept
from bloomery.services.listeners import Listeners
from bloomery.services.one_row import one_row
from bloomery.services.training.history import Successor
from bloomery.services.weights.staging import Staging
from bloomery.services.weights.target import Target
from bloomery.services.weights.versions import Version, Versions
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.store.events import record_event
from bloomery.types.deployments import Deployment, Revision, Swap, SwapKind
from bloomery.types.errors import Conflict, InvalidInput, NotFound
from bloomery.types.generation import Weights
from bloomery.types.ids import new_id, now_us
from bloomery.types.resources import Page, Price

_SWAP: Final = "deployment."
"""What the kinds of events begin with that tell of a swap."""
MAX_EVIDENCE_CHARS: Final = 65_536
MAX_EVIDENCE_LEVELS: Final = 32
"""Whoever lists deployments gets every evidence; what is nested deeper than encoders go would make all of them unreadable."""


class RevisionState(StrEnum):
    """A revision is ready, serves, and is replaced; a rollback makes a retired one live again."""

    READY = "ready"
    LIVE = "live"
    RETIRED = "retired"


NEXT: Final = {
    RevisionState.READY: {RevisionState.LIVE},
    RevisionState.LIVE: {RevisionState.RETIRED},
    RevisionState.RETIRED: {RevisionState.LIVE},
}


class _Live(NamedTuple):
    """What a name serves."""

    target: Target
    base_model: str


class _Looked(NamedTuple):
    """What a request was answered when it came before, the version that it names, and who asks: None where there is none."""

    made: Deployment | None
    found: Version | None
    by: str


class _Asked(NamedTuple):
    """What is told of a swap beside its revisions: who asked for it, and how long whoever serves took to be ready."""

    by: str
    staging_s: float


class Deployments:
    """Creates deployments and moves their traffic between versions; `load` first, where there may be some already."""

    def __init__(self, database: Database, models: Models, versions: Versions, staging: Staging, bases: set[str]) -> None:
        """`bases`: filled with the base models that something is deployed on."""
        self.moved = Listeners()
        """When a name serves something else."""
        self._database = database
        self._models = models
        self._versions = versions
        self._staging = staging
        self.bases = bases
        self._live: dict[tuple[str, str], _Live] = {}
        """By project and name."""

    async def load(self) -> None:
        """Read what every name serves."""
        for row in await self._database.read(lambda connection: connection.execute(_LIVE).all()):
            self._remember(row)

    async def create(self, p: Principal, name: str, version: str, evidence: dict[str, Any], *, request: Repeatable | None = None) -> Deployment:
        """Serve a version under a new name. A `request` that comes again, here and below, changes nothing and is answered what it was."""
        p.require("deploy")
        made, found, by = await self._looked(p, request, lambda connection: self._versions.look(connection, p.project, version))
        if made is not None:
            return made
        _check_evidence(evidence)
        if name in {base.alias for base in self._models.all()}:
            raise Conflict(f"`{name}` is the name of a base model; choose another", field="name")
        if found is None:
            raise await self._versions.unknown(p.project, version)
        asked = await self._staged(name, found, by)
        return await self._move(p, name, request, lambda connection: _create(connection, asked, p.project, name, found, evidence))

    async def promote(self, p: Principal, name: str, version: str, evidence: dict[str, Any], *, request: Repeatable | None = None) -> Deployment:
        """Make a version live as a new revision, once whoever serves it has proved it; the one before it retires in the same moment."""
        p.require("deploy")
        made, found, by = await self._looked(p, request, lambda connection: self._versions.look(connection, p.project, version))
        if made is not None:
            return made
        _check_evidence(evidence)
        if found is None:
            raise await self._versions.unknown(p.project, version)
        live = self._live.get((p.project, name))
        # What is refused anyway is loaded nowhere.
        fits = live is not None and live.target.base_hash == found.base_hash
        asked = await self._staged(name, found if fits else None, by)
        return await self._move(p, name, request, lambda connection: _promote(connection, asked, p.project, name, found, evidence))

    async def rollback(self, p: Principal, name: str, number: int, *, request: Repeatable | None = None) -> Deployment:
        """Make an earlier revision live again, once whoever serves it has proved it."""
        p.require("deploy")
        made, earlier, by = await self._looked(p, request, lambda connection: _earlier(connection, p.project, name, number))
        if made is not None:
            return made
        asked = await self._staged(name, earlier, by)
        return await self._move(p, name, request, lambda connection: _rollback(connection, asked, p.project, name, number))

    async def set_price(self, p: Principal, name: str, price: Price | None, *, request: Repeatable | None = None) -> Deployment:
        """Say what its tokens cost from now on; what was recorded before keeps its cost."""
        p.require("deploy")
        if (made := await answer_before(self._database, p, request, Deployment)) is not None:
            return made
        return await self._move(p, name, request, lambda connection: _set_price(connection, p.project, name, price))

    async def get(self, p: Principal, name: str) -> Deployment:
        """One deployment with its revisions."""
        p.require("read", "deploy")
        return await self._database.read(lambda connection: _load(connection, _row(connection, p.project, name)))

    async def list(self, p: Principal, *, limit: int = 50, offset: int = 0) -> Page[Deployment]:
        """All deployments, oldest first."""
        p.require("read", "deploy")
        query = select(rows.deployment).where(rows.deployment.c.project == p.project).order_by(rows.deployment.c.id).limit(limit + 1).offset(offset)
        found = await self._database.read(lambda connection: [_load(connection, row) for row in connection.execute(query)])
        return Page(data=found[:limit], offset=offset, has_more=len(found) > limit)

    async def swaps(self, p: Principal, name: str, *, limit: int = 50, offset: int = 0) -> Page[Swap]:
        """Every time when another revision became live, the newest first."""
        p.require("read", "deploy")
        found = await self._database.read(lambda connection: _swaps(connection, p.project, name, limit + 1, offset))
        return Page(data=found[:limit], offset=offset, has_more=len(found) > limit)

    async def names(self, p: Principal) -> Sequence[str]:
        """All that may be asked for an answer, oldest first."""
        p.require("infer", "read", "deploy")
        query = select(rows.deployment.c.name).where(rows.deployment.c.project == p.project).order_by(rows.deployment.c.id)
        return await self._database.read(lambda connection: connection.scalars(query).all())

    async def target(self, p: Principal, name: str) -> Target | None:
        """What the name serves now, or None where there is no such deployment."""
        p.require("infer")
        live = self._live.get((p.project, name))
        return None if live is None else live.target

    async def live_version(self, p: Principal, name: str) -> Version | None:
        """The version that the name serves now, for who does something else with it than ask it."""
        p.require("read", "train", "deploy")
        live = self._live.get((p.project, name))
        return None if live is None else Version(live.target.weights, live.target.base_hash, live.base_model)

    def expect(self, successor: Successor) -> None:
        """What a run published behind what a name serves is most likely to be promoted next: it is to be in memory by then."""
        served = (live.target for (project, _), live in self._live.items() if project == successor.project)
        # Two projects may have published the same adapter, and so may two runs on different bases.
        if any((target.weights.version, target.base_hash) == (successor.before, successor.base_hash) for target in served):
            self._staging.stage_ahead(successor.base_hash, successor.weights)

    async def _looked(self, p: Principal, request: Repeatable | None, find: Callable[[Connection], Version | None]) -> _Looked:
        """One look at the database for all of it: on busy processors whoever moves a name waits for every thread that has something to do for him."""

        def look(connection: Connection) -> _Looked:
            made = answered(connection, p, request, Deployment)
            return _Looked(made, None if made is not None else find(connection), name_of(connection, p))

        return await self._database.read(look)

    async def _staged(self, name: str, version: Version | None, by: str) -> _Asked:
        """The version is ready to be served under the name; without one, nothing is waited for."""
        begun_s = time.monotonic()
        if version is not None:
            await self._staging.stage(name, version)
        return _Asked(by, time.monotonic() - begun_s)

    async def _move(self, p: Principal, name: str, request: Repeatable | None, change: Callable[[Connection], Deployment]) -> Deployment:
        """Commit a change of what a name serves. Shielded: what is in memory follows what is stored, also when the caller has hung up meanwhile."""
        return await asyncio.shield(self._moved(p.project, name, once(p, request, Deployment, change)))

    async def _moved(self, project: str, name: str, change: Callable[[Connection], Deployment]) -> Deployment:
        # Of changes at once, the answers come in the order of the commits.
        of = {"project": project, "name": name}
        moved, row = await self._database.write(lambda connection: (change(connection), connection.execute(_LIVE_OF, of).one()))
        self._remember(row)
        return moved

    def _remember(self, row: Row[Any]) -> None:
        weights = Weights(version=row.version, key=row.key)
        found = {"deployment_id": row.deployment_id, "revision_id": row.id, "price": _price(row)}
        target = Target(weights, row.base_hash, row.name, row.number, row.name, **found)
        self._live[row.project, row.name] = _Live(target, row.base_model)
        self.bases.add(row.base_hash)
        self.moved.tell()


def _check_evidence(evidence: dict[str, Any]) -> None:
    level: list[Any] = [evidence]
    for _ in range(MAX_EVIDENCE_LEVELS):
        level = [item for outer in level if isinstance(outer, dict | list) for item in (outer.values() if isinstance(outer, dict) else outer)]
    if level:
        raise InvalidInput(f"`evidence` is nested in more than {MAX_EVIDENCE_LEVELS} levels: make it flatter", field="evidence")
    try:
        json.dumps(evidence, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise InvalidInput("`evidence` holds half a surrogate pair, or a number that is not finite: JSON has neither", field="evidence") from None
    if (size := len(json.dumps(evidence))) > MAX_EVIDENCE_CHARS:
        raise InvalidInput(f"`evidence` has {size} characters, at most {MAX_EVIDENCE_CHARS} are kept: give a summary", field="evidence")


def _create(connection: Connection, asked: _Asked, project: str, name: str, found: Version, evidence: dict[str, Any]) -> Deployment:
    if connection.execute(_NAMED, {"project": project, "name": name}).first():
        raise Conflict(f"there is a deployment `{name}` already: `bloomery deployment promote {name} VERSION` has it serve another", field="name")
    deployment_id = new_id("deployment")
    now = now_us()
    names = {"id": deployment_id, "project": project, "name": name, "base_model": found.base_model, "base_hash": found.base_hash}
    connection.execute(insert(rows.deployment), names | {"created_us": now, "updated_us": now})
    return _promote(connection, asked, project, name, found, evidence)


def _promote(connection: Connection, asked: _Asked, project: str, name: str, found: Version, evidence: dict[str, Any]) -> Deployment:
    deployment = _row(connection, project, name)
    if found.base_hash != deployment.base_hash:
        raise InvalidInput(
            f"version `{found.weights.version}` belongs to the base model `{found.base_model}`; deployment `{name}` is served by "
            f"`{deployment.base_model}`: create another deployment for it",
            field="version",
        )
    require_kept(connection, found.weights.key)
    last = connection.scalar(_LAST_NUMBER, {"deployment": deployment.id})
    revision = {
        "id": new_id("revision"),
        "project": project,
        "deployment_id": deployment.id,
        "number": (last or 0) + 1,
        "version": found.weights.version,
        "key": found.weights.key,
        "state": RevisionState.READY,
        "evidence": json.dumps(evidence),
        "created_us": now_us(),
        "updated_us": now_us(),
    }
    connection.execute(_REVISION, revision)
    return _make_live(connection, deployment, revision["id"], RevisionState.READY, asked, "promoted")


def _rollback(connection: Connection, asked: _Asked, project: str, name: str, number: int) -> Deployment:
    deployment = _row(connection, project, name)
    table = rows.revision.c
    wanted = connection.execute(select(rows.revision).where(table.deployment_id == deployment.id, table.number == number)).one_or_none()
    if wanted is None:
        raise NotFound(f"deployment `{name}` has no revision {number}", field="revision")
    if wanted.state == RevisionState.LIVE:
        raise Conflict(f"revision {number} of `{name}` is live already", field="revision")
    return _make_live(connection, deployment, wanted.id, RevisionState(wanted.state), asked, "rolled_back")


def _set_price(connection: Connection, project: str, name: str, price: Price | None) -> Deployment:
    deployment = _row(connection, project, name)
    values = {"price": None if price is None else price.model_dump_json()}
    connection.execute(update(rows.deployment).where(rows.deployment.c.id == deployment.id).values(values))
    return _load(connection, _row(connection, project, name))


def _earlier(connection: Connection, project: str, name: str, number: int) -> Version | None:
    row = connection.execute(_EARLIER, {"project": project, "name": name, "number": number}).one_or_none()
    return None if row is None else Version(Weights(version=row.version, key=row.key), row.base_hash, row.base_model)


def _make_live(
    connection: Connection, deployment: Row[Any], revision_id: str, state: RevisionState, asked: _Asked, how: Literal["promoted", "rolled_back"]
) -> Deployment:
    # None is live where this is the first.
    before = _switch(connection, _OF_DEPLOYMENT, deployment.id, RevisionState.LIVE, RevisionState.RETIRED)
    number = _switch(connection, _OF_ID, revision_id, state, RevisionState.LIVE)
    if number is None:
        raise Conflict(f"revision `{revision_id}` is not {state} any more: look again")
    connection.execute(_TOUCHED, {"deployment": deployment.id, "now": now_us()})
    kind = _SWAP + ("created" if before is None else how)
    told = {"from_revision": before, "to_revision": number, "staging_s": round(asked.staging_s, 3), "by": asked.by}
    record_event(connection, deployment.project, kind, deployment.id, **told)
    return _load(connection, deployment)


def _switch(connection: Connection, change: ReturningUpdate[int], of: str, old: RevisionState, new: RevisionState) -> int | None:
    """Of those that are `old`; the number of the one that was, None where none was."""
    if new not in NEXT[old]:
        raise Conflict(f"a revision cannot go from {old} to {new}")
    return connection.scalar(change, {"of": of, "old": old, "new": new, "now": now_us()})


def _switching(which: Column[str]) -> ReturningUpdate[int]:
    change = update(rows.revision).where(which == bindparam("of"), rows.revision.c.state == bindparam("old"))
    return change.values(state=bindparam("new"), updated_us=bindparam("now")).returning(rows.revision.c.number)


# Put together once: to do so takes longer than what they ask, and whoever moves a name waits for all of them.
_OF_DEPLOYMENT: Final = _switching(rows.revision.c.deployment_id)
_OF_ID: Final = _switching(rows.revision.c.id)
_LAST_NUMBER: Final = select(func.max(rows.revision.c.number)).where(rows.revision.c.deployment_id == bindparam("deployment"))
_REVISION: Final = insert(rows.revision)
_TOUCHED: Final = update(rows.deployment).where(rows.deployment.c.id == bindparam("deployment")).values(updated_us=bindparam("now"))
_ALL_OF_DEPLOYMENT: Final = (
    select(*(rows.revision.c[name] for name in Revision.model_fields))
    .where(rows.revision.c.deployment_id == bindparam("deployment"))
    .order_by(rows.revision.c.number)
)
_shown: Final = TypeAdapter(list[Revision])


def _swaps(connection: Connection, project: str, name: str, limit: int, offset: int) -> list[Swap]:
    query = _swaps_of(project, _row(connection, project, name).id).limit(limit).offset(offset)
    return [Swap(kind=row.kind.removeprefix(_SWAP), at_us=row.created_us, **json.loads(row.data)) for row in connection.execute(query)]


def _swaps_of(project: str, deployment_id: str) -> Select[Any]:
    table = rows.event.c
    return (
        select(rows.event)
        .where(table.subject == deployment_id, table.project == project, table.kind.in_([_SWAP + kind for kind in get_args(SwapKind)]))
        .order_by(table.seq.desc())
    )


_REVISIONS: Final = rows.revision.join(rows.deployment, rows.revision.c.deployment_id == rows.deployment.c.id)
_LIVE: Final[Select[Any]] = (
    select(rows.revision, *(rows.deployment.c[name] for name in ("name", "base_hash", "base_model", "price")))
    .select_from(_REVISIONS)
    .where(rows.revision.c.state == RevisionState.LIVE)
)
"""The live revision of every name."""


_OF_NAME: Final = (rows.deployment.c.project == bindparam("project"), rows.deployment.c.name == bindparam("name"))
_LIVE_OF: Final[Select[Any]] = _LIVE.where(*_OF_NAME)
_NAMED: Final = select(rows.deployment).where(*_OF_NAME)
_EARLIER: Final = (
    select(rows.revision, rows.deployment.c.base_hash, rows.deployment.c.base_model)
    .select_from(_REVISIONS)
    .where(*_OF_NAME, rows.revision.c.number == bindparam("number"))
)


def _row(connection: Connection, project: str, name: str) -> Row[Any]:
    return one_row(connection, _NAMED.params(project=project, name=name), f"deployment `{name}`", field="name")


def _load(connection: Connection, row: Row[Any]) -> Deployment:
    found = connection.execute(_ALL_OF_DEPLOYMENT, {"deployment": row.id})
    # All in one go: a loop that promotes each of its versions has thousands.
    revisions = _shown.validate_python([{**revision._mapping, "evidence": json.loads(revision.evidence)} for revision in found])
    return Deployment(
        id=row.id,
        name=row.name,
        base_model=row.base_model,
        base_hash=row.base_hash,
        live=next(revision for revision in revisions if revision.state == RevisionState.LIVE),
        revisions=revisions,
        price=_price(row),
        created_us=row.created_us,
        updated_us=max(revision.updated_us for revision in revisions),
    )


def _price(row: Row[Any]) -> Price | None:
    return None if row.price is None else Price.model_validate_json(row.price)
