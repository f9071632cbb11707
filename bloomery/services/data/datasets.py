"""Data sets: names with immutable, content-addressed versions.

A version's rows are one compressed blob of lines. Held-out rows (`eval`, `validation`) are pinned: every later version holds them, and no
later version takes their like into `train` (`dataset_rows.assemble`). `curation` makes new rows of judged traffic.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import zstandard
from blake3 import blake3
from sqlalchemy import Connection, Select, insert, select
from sqlalchemy import Row as DatabaseRow

from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import Repeatable, answer_before, once
from bloomery.services.data.curation import Curation, curated_rows
from bloomery.services.data.dataset_rows import HELD_OUT, Assembled, Opened, Row, StoredRows, assemble, parse, stored_lines
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs
from bloomery.store.database import Database
from bloomery.types.errors import Conflict, InvalidInput, NotFound, Unavailable
from bloomery.types.ids import new_id, now_us
from bloomery.types.resources import Curate, Dataset, DatasetRow, DatasetVersion, ImportRows, Page, Split

OPENED_BYTES: Final = 128 << 20
"""Lines of versions that stay in memory for whoever reads them page by page; a version with more is unpacked again for each page."""

Splits = Mapping[Split, Sequence[Row]]


class _Version(NamedTuple):
    id: str
    stored: StoredRows


class Datasets:
    """Imports, curates and reads versions."""

    def __init__(self, database: Database, blobs: AsyncBlobs, curation: Curation, *, opened_bytes: int = OPENED_BYTES) -> None:
        self._database = database
        self._blobs = blobs
        self._curation = curation
        self._opened = Opened(opened_bytes)

    async def create(self, p: Principal, name: str, *, request: Repeatable | None = None) -> Dataset:
        """An empty data set. A `request` that comes again, here and below, changes nothing and is answered what it was."""
        p.require("train")
        return await self._database.write(once(p, request, Dataset, lambda connection: _create(connection, p.project, name)))

    async def get(self, p: Principal, name: str) -> Dataset:
        """A data set with its versions."""
        p.require("read", "train")
        return await self._database.read(lambda connection: _load(connection, _named(connection, p.project, name)))

    async def list(self, p: Principal, *, limit: int = 50, offset: int = 0) -> Page[Dataset]:
        """All data sets, oldest first."""
        p.require("read", "train")
        query = select(rows.dataset).where(rows.dataset.c.project == p.project).order_by(rows.dataset.c.id).limit(limit + 1).offset(offset)
        found = await self._database.read(lambda connection: [_load(connection, row) for row in connection.execute(query)])
        return Page(data=found[:limit], offset=offset, has_more=len(found) > limit)

    async def import_rows(self, p: Principal, name: str, given: ImportRows, *, request: Repeatable | None = None) -> DatasetVersion:
        """A version of the rows of files; a broken row refuses all of them."""
        p.require("train")
        if (made := await answer_before(self._database, p, request, DatasetVersion)) is not None:
            return made
        if not given.splits:
            raise InvalidInput("give the content of at least one split", field="splits")
        dataset = await self.get(p, name)
        parsed = await asyncio.to_thread(lambda: {split: parse(given.format, content, split) for split, content in given.splits.items()})
        recipe = {"kind": "import", "format": given.format}
        return await self._add_version(p, dataset, request, parent=given.parent, given=parsed, recipe=recipe, counts={})

    async def curate(self, p: Principal, name: str, choice: Curate, *, request: Repeatable | None = None) -> DatasetVersion:
        """The parent's rows and what judged traffic adds to them."""
        p.require("train")
        if (made := await answer_before(self._database, p, request, DatasetVersion)) is not None:
            return made
        dataset = await self.get(p, name)
        parent = (await self._open(p, dataset, choice.parent)).stored
        judged = await self._curation.judged(p, choice)
        accepted = await asyncio.to_thread(lambda: curated_rows(judged, parent.rows("train")))
        recipe = {"kind": "curate", **choice.model_dump(exclude={"parent"})}
        given: Splits = {"train": accepted.rows}
        return await self._add_version(p, dataset, request, parent=choice.parent, given=given, recipe=recipe, counts=accepted.counts)

    async def rows(self, p: Principal, name: str, version: str, split: Split, *, limit: int = 50, offset: int = 0) -> Page[DatasetRow]:
        """Rows of one split, in order."""
        p.require("read", "train")
        stored = (await self._open(p, await self.get(p, name), version)).stored
        return await asyncio.to_thread(lambda: _page(stored, split, limit, offset))

    async def _add_version(
        self,
        p: Principal,
        dataset: Dataset,
        request: Repeatable | None,
        *,
        parent: str | None,
        given: Splits,
        recipe: dict[str, Any],
        counts: dict[str, int],
    ) -> DatasetVersion:
        above = None if parent is None else await self._open(p, dataset, parent)
        latest = dataset.versions[-1].id if dataset.versions else None
        pinned = None if latest is None else (await self._open(p, dataset, latest)).stored
        built = await asyncio.to_thread(_build, pinned, above, given, recipe)
        await self._store(built.key, built.stored)
        row = built.row | {"counts": json.dumps(counts | built.assembled.counts)}
        add = once(p, request, DatasetVersion, lambda connection: _append(connection, p.project, dataset, latest, row, built.assembled))
        return await self._database.write(add)

    async def _store(self, key: str, packed: bytes) -> None:
        try:
            await self._blobs.put(key, packed)
        except OSError as error:
            raise Unavailable(
                f"the {len(packed)} bytes of this version cannot be written ({error.strerror}) and nothing was added: "
                "is the server's disk full? Free space there and ask again"
            ) from error

    async def _open(self, p: Principal, dataset: Dataset, version: str) -> _Version:
        query = _version(p.project, dataset.id, version)
        row = await self._database.read(lambda connection: connection.execute(query).first())
        if row is None:
            raise NotFound(f"data set `{dataset.name}` has no version `{version}`", field="version")
        # The key is the hash of the content, so what is remembered under it cannot be out of date.
        if (stored := self._opened.get(row.key)) is None:
            packed = await self._blobs.get(row.key)
            stored = await asyncio.to_thread(lambda: StoredRows(zstandard.decompress(packed)))
            self._opened.keep(row.key, stored)
        return _Version(row.id, stored)


class _Built(NamedTuple):
    assembled: Assembled
    row: dict[str, Any]
    key: str
    stored: bytes


def _build(latest: StoredRows | None, above: _Version | None, given: Splits, recipe: dict[str, Any]) -> _Built:
    pinned: Splits = {split: latest.rows(split) for split in HELD_OUT} if latest else {}
    inherited = above.stored.rows("train") if above else []
    parent = above.id if above else None
    assembled = assemble(pinned, inherited, given)
    content = stored_lines(assembled.splits)
    manifest = blake3(content).hexdigest()
    key = f"datasets/{manifest}.jsonl.zst"
    text = json.dumps(recipe | {"parent": parent}, sort_keys=True)
    row = {
        "id": new_id("version"),
        "recipe": json.dumps(recipe),
        "recipe_hash": blake3(text.encode()).hexdigest(),
        "manifest": manifest,
        "parent": parent,
        "key": key,
        "created_us": now_us(),
    }
    return _Built(assembled, row, key, zstandard.compress(content))


def _page(stored: StoredRows, split: Split, limit: int, offset: int) -> Page[DatasetRow]:
    data = [
        DatasetRow(messages=list(row.messages), label_source=row.label_source, source_span=row.source_span)
        for row in stored.page(split, limit=limit, offset=offset)
    ]
    return Page(data=data, offset=offset, has_more=offset + limit < stored.count(split))


def _create(connection: Connection, project: str, name: str) -> Dataset:
    table = rows.dataset.c
    if connection.execute(select(table.id).where(table.project == project, table.name == name)).first():
        raise Conflict(f"there is a data set `{name}` already: add a version to it", field="name")
    connection.execute(insert(rows.dataset), {"id": new_id("dataset"), "project": project, "name": name, "created_us": now_us()})
    return _load(connection, _named(connection, project, name))


def _append(connection: Connection, project: str, dataset: Dataset, latest: str | None, row: dict[str, Any], assembled: Assembled) -> DatasetVersion:
    table = rows.dataset_version.c
    if (known := connection.execute(same_version(dataset.id, row["manifest"], row["parent"])).first()) is not None:
        return _version_of(known, dataset.name)
    last = connection.execute(select(table.id, table.number).where(table.dataset_id == dataset.id).order_by(table.number.desc())).first()
    if latest != (None if last is None else last.id):
        # The other one may have pinned rows that this one takes into train.
        raise Conflict(f"another version of `{dataset.name}` was added meanwhile: ask again")
    stored = row | {"project": project, "dataset_id": dataset.id, "number": 1 if last is None else last.number + 1}
    connection.execute(insert(rows.dataset_version), stored)
    connection.execute(insert(rows.dataset_item), _items(project, row["id"], assembled))
    return _version_of(connection.execute(select(rows.dataset_version).where(table.id == row["id"])).one(), dataset.name)


def same_version(dataset_id: str, manifest: str, parent: str | None) -> Select[Any]:
    """The version of a data set with this content and this parent, which may be none."""
    table = rows.dataset_version.c
    return select(rows.dataset_version).where(table.dataset_id == dataset_id, table.manifest == manifest, table.parent.is_not_distinct_from(parent))


def _items(project: str, version_id: str, assembled: Assembled) -> list[dict[str, Any]]:
    placed = [(split, row) for split in sorted(assembled.splits) for row in assembled.splits[split]]
    return [
        {
            "project": project,
            "version_id": version_id,
            "item_hash": row.hash,
            "position": position,
            "split": split,
            "source_span": row.source_span,
            "label_source": row.label_source,
        }
        for position, (split, row) in enumerate(placed)
    ]


def _named(connection: Connection, project: str, name: str) -> DatabaseRow[Any]:
    row = connection.execute(select(rows.dataset).where(rows.dataset.c.project == project, rows.dataset.c.name == name)).one_or_none()
    if row is None:
        raise NotFound(f"no data set `{name}`", field="name")
    return row


def _version(project: str, dataset_id: str, version: str) -> Select[Any]:
    table = rows.dataset_version.c
    by_name = (table.id == version) | (table.manifest == version)
    return select(rows.dataset_version).where(table.project == project, table.dataset_id == dataset_id, by_name).order_by(table.number.desc())


def _load(connection: Connection, row: DatabaseRow[Any]) -> Dataset:
    table = rows.dataset_version.c
    query = select(rows.dataset_version).where(table.dataset_id == row.id).order_by(table.number)
    versions = [_version_of(version, row.name) for version in connection.execute(query)]
    return Dataset(id=row.id, name=row.name, versions=versions, created_us=row.created_us)


def _version_of(row: DatabaseRow[Any], dataset: str) -> DatasetVersion:
    return DatasetVersion(
        id=row.id,
        dataset=dataset,
        number=row.number,
        manifest=row.manifest,
        parent=row.parent,
        counts=json.loads(row.counts),
        recipe=json.loads(row.recipe),
        created_us=row.created_us,
    )
