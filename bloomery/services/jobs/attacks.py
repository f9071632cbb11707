"""Attacks of graders on the prompts of data sets, kept with what came of them; and the gate that jobs pass before they train for rewards.

What an attack found holds for a version of a grader and a version of the data, so it is looked for once. A grader that pays without competence is
refused until another version mends it, or somebody waives it with a reason.
"""

import asyncio
from typing import Any
from weakref import WeakValueDictionary

from sqlalchemy import Connection, Row, Select, insert, select

from bloomery.grade.attack import Budget
from bloomery.services.access.principal import Principal
from bloomery.services.data.datasets import Datasets
from bloomery.services.grading.graders import Graders
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.datasets import DatasetVersion, PromptRow
from bloomery.types.errors import InvalidInput
from bloomery.types.graders import MAX_ATTACK_ROWS, MIN_ATTACK_ROWS, AttackGrader, AttackReport, AttackRow, GraderAttack, GraderVersion
from bloomery.types.ids import new_id, now_us
from bloomery.types.resources import Page, Split


class Attacks:
    """Attacks, and remembers."""

    def __init__(self, database: Database, datasets: Datasets, graders: Graders) -> None:
        self._database, self._datasets, self._graders = database, datasets, graders
        self._at_work: WeakValueDictionary[tuple[str, str, str, Split], asyncio.Lock] = WeakValueDictionary()
        """By project, grader, rows and split: who asks for what is being looked for gets what is found. One goes when nobody holds or awaits it."""

    async def attack(self, p: Principal, name: str, given: AttackGrader) -> GraderAttack:
        """Whether a stored grader pays without competence: on these rows, or on a data set, of which it may be known."""
        p.require("train")
        grader = await self._graders.get(p, name, given.version)
        budget = Budget(given.max_calls, given.max_tokens)
        if given.rows is not None:
            report = await self._graders.attack(p, grader, given.rows, budget)
            return GraderAttack(name=name, version=grader.version, waiver=grader.waiver, **dict(report))
        assert given.dataset is not None
        data = await self._datasets.version(p, given.dataset, given.dataset_version, field="dataset", version_field="dataset_version")
        async with self._at_work.setdefault((p.project, grader.hash, data.manifest, given.split), asyncio.Lock()):
            if not given.again and (known := await self.known(p, grader, data.manifest, given.split)) is not None:
                return known
            report = await self._on(p, grader, data, given.split, budget)
            return await self._database.write(lambda connection: _keep(connection, p.project, grader, data.manifest, given.split, report))

    async def known(self, p: Principal, grader: GraderVersion, manifest: str, split: Split) -> GraderAttack | None:
        """What came of the newest attack on these rows."""
        p.require("read", "train")
        table = rows.grader_attack.c
        query = _of(p, grader).where(table.manifest == manifest, table.split == split).limit(1)
        row = await self._database.read(lambda connection: connection.execute(query).first())
        return None if row is None else _attack_of(row, grader)

    async def list(self, p: Principal, name: str, *, version: int | None = None, limit: int = 50, offset: int = 0) -> Page[GraderAttack]:
        """Attacks of one version, the newest unless another is named, latest first."""
        p.require("read", "train")
        grader = await self._graders.get(p, name, version)
        query = _of(p, grader).limit(limit + 1).offset(offset)
        found = await self._database.read(lambda connection: [_attack_of(row, grader) for row in connection.execute(query)])
        return Page(data=found[:limit], offset=offset, has_more=len(found) > limit)

    async def _on(self, p: Principal, grader: GraderVersion, data: DatasetVersion, split: Split, budget: Budget) -> AttackReport:
        if data.kind != "prompt":
            raise InvalidInput(f"data set `{data.dataset}` has rows of the kind `{data.kind}`: graders are attacked on prompts", field="dataset")
        page = await self._datasets.rows(p, data.dataset, data.id, split, limit=MAX_ATTACK_ROWS)
        prompts = [AttackRow(item=row.item, messages=row.messages) for row in page.data if isinstance(row, PromptRow)]
        if len(prompts) < MIN_ATTACK_ROWS:
            why = f"{len(prompts)} prompts say nothing about a grader: {MIN_ATTACK_ROWS} are the fewest"
            return AttackReport(hash=grader.hash, verdict="undecided", why=why, attacks=0, grades=0, failed=0)
        return await self._graders.attack(p, grader, prompts, budget)


def _of(p: Principal, grader: GraderVersion) -> Select[Any]:
    table = rows.grader_attack.c
    query = select(rows.grader_attack).where(table.project == p.project, table.grader_hash == grader.hash)
    return query.order_by(table.created_us.desc(), table.id.desc())


def _keep(connection: Connection, project: str, grader: GraderVersion, manifest: str, split: Split, report: AttackReport) -> GraderAttack:
    values = {"id": new_id("attack"), "project": project, "grader_hash": grader.hash, "manifest": manifest, "split": split}
    values |= {"report": report.model_dump_json()}
    connection.execute(insert(rows.grader_attack).values(created_us=now_us(), **values))
    row = connection.execute(select(rows.grader_attack).where(rows.grader_attack.c.id == values["id"])).one()
    return _attack_of(row, grader)


def _attack_of(row: Row[Any], grader: GraderVersion) -> GraderAttack:
    kept = {"id": row.id, "dataset_version": row.manifest, "split": row.split, "created_us": row.created_us}
    return GraderAttack(name=grader.name, version=grader.version, waiver=grader.waiver, **kept, **dict(AttackReport.model_validate_json(row.report)))
