"""Graders under names, with numbered versions that never change, and grading by them.

What is stored is the grader as it was read, so a version says what it grades by whoever asks; its hash is with every score that it gives.
"""

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, func, insert, select, update
from sqlalchemy import Row as DatabaseRow

from bloomery.grade.attack import Budget, attacked
from bloomery.grade.grader import Graded, Grader, RunsPrograms, sample_of
from bloomery.grade.models import Counted
from bloomery.services.access.auth import name_of
from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import Repeatable, once
from bloomery.services.grading.asked_models import AskedModels
from bloomery.services.grading.endpoints import Endpoints, is_elsewhere
from bloomery.services.grading.own_models import Served
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.store.events import record_event
from bloomery.types.errors import NotFound
from bloomery.types.graders import AttackReport, AttackRow, CreateGrader, GraderRun, GraderVersion, OutputRow, RunGrader, WaiveGrader, Waiver
from bloomery.types.grading import GradeInput
from bloomery.types.ids import new_id, now_us
from bloomery.types.resources import Page

FIELD: Final = "spec"


class Tried(NamedTuple):
    """What a grader said of some outputs, and the tokens that each model took for it."""

    grader: Grader
    graded: list[Graded]
    tokens: dict[str, int]


class Graders:
    """Keeps versions, and grades."""

    def __init__(self, database: Database, programs: RunsPrograms, served: Served, endpoints: Endpoints) -> None:
        self._database, self._programs, self._served, self._endpoints = database, programs, served, endpoints

    def check(self, p: Principal, spec: dict[str, Any], *, field: str = FIELD) -> None:
        """Refuse what is no grader."""
        p.require("read", "train")
        Grader.parse(spec, field=field)

    async def create(self, p: Principal, given: CreateGrader, *, request: Repeatable | None = None) -> GraderVersion:
        """A version under a name; the same grader again is the version that is there."""
        p.require("train")
        grader = Grader.parse(given.spec, field=FIELD)
        return await self._database.write(once(p, request, GraderVersion, lambda connection: _create(connection, p.project, given.name, grader)))

    async def get(self, p: Principal, name: str, version: int | None = None) -> GraderVersion:
        """A version of a grader; the newest, unless another is named."""
        p.require("read", "train")
        return await self._database.read(lambda connection: _version_of(_found(connection, p.project, name, version)))

    async def list(self, p: Principal, *, limit: int = 50, offset: int = 0) -> Page[GraderVersion]:
        """The newest version of every grader, by name."""
        p.require("read", "train")
        table = rows.grader.c
        newest = select(table.name, func.max(table.number).label("number")).where(table.project == p.project).group_by(table.name).subquery()
        query = (
            select(rows.grader)
            .join(newest, (table.name == newest.c.name) & (table.number == newest.c.number))
            .where(table.project == p.project)
            .order_by(table.name)
        )
        return await self._page(query, limit, offset)

    async def versions(self, p: Principal, name: str, *, limit: int = 50, offset: int = 0) -> Page[GraderVersion]:
        """All versions of a grader, oldest first."""
        await self.get(p, name)
        table = rows.grader.c
        return await self._page(select(rows.grader).where(table.project == p.project, table.name == name).order_by(table.number), limit, offset)

    async def run(self, p: Principal, name: str, given: RunGrader) -> GraderRun:
        """What a stored grader says of these rows."""
        p.require("train", "infer")
        version = await self._database.read(lambda connection: _version_of(_found(connection, p.project, name, given.version)))
        tried = await self.attempt(p, version.spec, given.rows)
        return GraderRun(name=name, version=version.version, hash=version.hash, results=[each.result for each in tried.graded])

    async def attack(self, p: Principal, version: GraderVersion, given: Sequence[AttackRow], budget: Budget) -> AttackReport:
        """Whether a stored grader pays without competence on these rows."""
        p.require("train")
        return await attacked(Grader.parse(version.spec), given, jail=self._programs, models=self._models(p), budget=budget)

    async def waive(self, p: Principal, name: str, given: WaiveGrader, *, request: Repeatable | None = None) -> GraderVersion:
        """Have jobs take a version whatever attacks find; who waives it again has the last word."""
        p.require("train")

        def change(connection: Connection) -> GraderVersion:
            row = _found(connection, p.project, name, given.version)
            waiver = Waiver(reason=given.reason, by=name_of(connection, p), created_us=now_us())
            connection.execute(update(rows.grader).where(rows.grader.c.id == row.id).values(waiver=waiver.model_dump_json()))
            record_event(connection, p.project, "grader.waived", row.id, name=name, version=row.number, reason=given.reason, by=waiver.by)
            return _version_of(_found(connection, p.project, name, row.number))

        return await self._database.write(once(p, request, GraderVersion, change))

    async def attempt(self, p: Principal, spec: dict[str, Any], outputs: Sequence[OutputRow], *, field: str = FIELD) -> Tried:
        """What a grader that is stored nowhere says of these rows."""
        p.require("train", "infer")
        grader = Grader.parse(spec, field=field)
        models = Counted(self._models(p))
        graded = await grader.grade_parts([_input(row) for row in outputs], jail=self._programs, models=models)
        return Tried(grader, graded, dict(models.tokens))

    async def require_models(self, p: Principal, models: Sequence[str]) -> None:
        """Refuse models that there are not, or that the caller may not ask."""
        p.require("train", "infer")
        for model in models:
            if is_elsewhere(model):
                self._endpoints.named(p, model)
            else:
                await self._served.sampling.resolve(p, model)

    def _models(self, p: Principal) -> AskedModels:
        return AskedModels(self._served, self._endpoints, p)

    async def _page(self, query: Any, limit: int, offset: int) -> Page[GraderVersion]:
        cut = query.limit(limit + 1).offset(offset)
        found = await self._database.read(lambda connection: [_version_of(row) for row in connection.execute(cut)])
        return Page(data=found[:limit], offset=offset, has_more=len(found) > limit)


def _input(row: OutputRow) -> GradeInput:
    return GradeInput(item=row.item, sample=sample_of(row.output, row.tools), messages=row.messages, trace=row.trace)


def _create(connection: Connection, project: str, name: str, grader: Grader) -> GraderVersion:
    table = rows.grader.c
    mine = (table.project == project) & (table.name == name)
    if (known := connection.execute(select(rows.grader).where(mine, table.hash == grader.hash)).one_or_none()) is not None:
        return _version_of(known)
    last = connection.execute(select(func.max(table.number)).where(mine)).scalar_one()
    number = (last or 0) + 1
    version = {
        "id": new_id("grader"),
        "project": project,
        "name": name,
        "number": number,
        "hash": grader.hash,
        "spec": json.dumps(grader.canonical, ensure_ascii=False),
        "created_us": now_us(),
    }
    connection.execute(insert(rows.grader), version)
    return _version_of(_found(connection, project, name, number))


def _found(connection: Connection, project: str, name: str, number: int | None) -> DatabaseRow[Any]:
    table = rows.grader.c
    query = select(rows.grader).where(table.project == project, table.name == name).order_by(table.number.desc()).limit(1)
    row = connection.execute(query if number is None else query.where(table.number == number)).one_or_none()
    if row is None:
        what = f"no grader `{name}`" if number is None else f"no version {number} of a grader `{name}`"
        raise NotFound(what, field="name" if number is None else "version")
    return row


def _version_of(row: DatabaseRow[Any]) -> GraderVersion:
    grader = Grader.parse(row.spec)
    return GraderVersion(
        id=row.id,
        name=row.name,
        version=row.number,
        hash=row.hash,
        spec=grader.canonical,
        models=grader.models,
        judges=grader.judges,
        created_us=row.created_us,
        waiver=None if row.waiver is None else Waiver.model_validate_json(row.waiver),
    )
