"""Data sets: names with immutable, content-addressed versions.

A version's rows are one blob (`stored_rows`). Held-out rows (`eval`, `validation`) are pinned: every later version holds them, and no
later version takes their like into `train` (`dataset_rows.assemble`). `importing` makes versions of files and rows, `curation` rows of judged
traffic.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar

from sqlalchemy import Connection, Select, delete, insert, select
from sqlalchemy import Row as DatabaseRow

from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import Repeatable, answer_before, once
from bloomery.services.data.curation import Curation, curated_rows
from bloomery.services.data.importing import Built, Ground, Prepared, made, prepare_files, prepare_rows, prepare_split, validate_file
from bloomery.services.data.reading import Source, unpacked
from bloomery.services.data.stored_rows import Blob, Opened, StoredRows
from bloomery.services.needed import needs_dataset
from bloomery.services.one_row import one_row
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs
from bloomery.store.database import Database
from bloomery.types.datasets import (
    AnyRow,
    Curate,
    Dataset,
    DatasetVersion,
    ImportRows,
    RowKind,
    RowProblem,
    SplitChoice,
    UploadRows,
    Validation,
    unfilled,
)
from bloomery.types.errors import Conflict, InvalidInput, NotFound, naming
from bloomery.types.ids import new_id, now_us
from bloomery.types.resources import Page, Split

OPENED_BYTES: Final = 128 << 20
"""Lines of versions that stay in memory for whoever reads them page by page; what does not fit is read and unpacked again."""
AT_ONCE: Final = 2
"""Versions that are made at the same time: each takes memory for the hashes of its rows, and a thread."""
_ITEMS_AT_ONCE: Final = 10_000

_T = TypeVar("_T")
_Preparing = Callable[[Dataset, Ground], Awaitable[Callable[[ExitStack], Prepared]]]
"""Looks at the data set and what its version is made on, and gives what makes it, which runs on a thread."""


class StoredVersion(NamedTuple):
    """A version and its rows."""

    id: str
    kind: RowKind
    manifest: str
    blob: Blob
    rejected_key: str | None


class Datasets:
    """Imports, curates and reads versions. `scratch`: where files lie while a version is made."""

    def __init__(
        self, database: Database, blobs: AsyncBlobs, curation: Curation, *, opened_bytes: int = OPENED_BYTES, scratch: Path | None = None
    ) -> None:
        self.scratch = scratch
        self._database = database
        self._blobs = blobs
        self._curation = curation
        self._opened = Opened(opened_bytes)
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def create(self, p: Principal, name: str, *, request: Repeatable | None = None) -> Dataset:
        """An empty data set. A `request` that comes again, here and below, changes nothing and is answered what it was."""
        p.require("train")
        return await self._database.write(once(p, request, Dataset, lambda connection: _create(connection, p.project, name)))

    async def get(self, p: Principal, name: str) -> Dataset:
        """A data set with its versions."""
        p.require("read", "train")
        return await self._database.read(lambda connection: _load(connection, _named(connection, p.project, name)))

    async def chosen(self, p: Principal, name: str, version: str | None, split: Split, *, split_field: str = "data.split") -> DatasetVersion:
        """The version of this id or manifest, or the newest, which has rows in a split; errors name the fields of `data` in a spec."""
        found = await self.version(p, name, version, field="data.dataset", version_field="data.version")
        if not found.counts.get(f"{split}.rows"):
            problem = f"version {found.number} of data set `{found.dataset}` has no rows in `{split}`"
            raise InvalidInput(f"{problem}: name another split, or make a version that has some", field=split_field)
        return found

    async def version(self, p: Principal, name: str, version: str | None, *, field: str, version_field: str) -> DatasetVersion:
        """The version of this id or manifest, or the newest; `field` and `version_field` are what named both."""
        with naming(field, NotFound):
            dataset = await self.get(p, name)
        if not dataset.versions:
            raise Conflict(f"data set `{dataset.name}` has no version yet: import rows first", field=field)
        found = [each for each in dataset.versions if version in (None, each.id, each.manifest)]
        if not found:
            raise NotFound(f"data set `{dataset.name}` has no version `{version}`", field=version_field)
        return found[-1]

    async def list(self, p: Principal, *, limit: int = 50, offset: int = 0) -> Page[Dataset]:
        """All data sets, oldest first."""
        p.require("read", "train")
        query = select(rows.dataset).where(rows.dataset.c.project == p.project).order_by(rows.dataset.c.id).limit(limit + 1).offset(offset)
        found = await self._database.read(lambda connection: [_load(connection, row) for row in connection.execute(query)])
        return Page(data=found[:limit], offset=offset, has_more=len(found) > limit)

    async def delete(self, p: Principal, name: str) -> None:
        """Forget a data set with all its versions, unless a job that has not ended needs its rows. What was made of them stays."""
        p.require("train")

        def forget(connection: Connection) -> None:
            row = _named(connection, p.project, name)
            if (needed := needs_dataset(connection, p.project, name)) is not None:
                raise Conflict(f"data set `{name}` {needed}", field="name")
            versions = select(rows.dataset_version.c.id).where(rows.dataset_version.c.dataset_id == row.id)
            connection.execute(delete(rows.dataset_item).where(rows.dataset_item.c.version_id.in_(versions)))
            connection.execute(delete(rows.dataset_version).where(rows.dataset_version.c.dataset_id == row.id))
            connection.execute(delete(rows.dataset).where(rows.dataset.c.id == row.id))

        await self._database.write(forget)

    async def import_rows(self, p: Principal, name: str, given: ImportRows, *, request: Repeatable | None = None) -> DatasetVersion:
        """A version of the rows of files; a broken row refuses all of them, unless it is to be skipped."""
        p.require("train")
        if not given.splits:
            raise InvalidInput("give the content of at least one split", field="splits")
        # What came in JSON is Unicode already.
        sources = [Source(split, given.format, BytesIO(content.encode())) for split, content in given.splits.items()]
        return await self._import(p, name, sources, given, request, origin=given.origin)

    async def upload(self, p: Principal, name: str, given: UploadRows, file: BinaryIO, *, request: Repeatable | None = None) -> DatasetVersion:
        """The same of one file, whose bytes are read as they are."""
        p.require("train")
        return await self._import(p, name, [Source(given.split, given.format, file)], given, request)

    async def of_files(self, p: Principal, name: str, files: Mapping[Split, BinaryIO], kind: RowKind | None) -> DatasetVersion:
        """The version of these rows, in a data set that is made where there is none; where any row is none, neither is made."""
        p.require("train")
        sources = [Source(split, "jsonl", file) for split, file in files.items()]

        def prepare(stack: ExitStack) -> Prepared:
            return prepare_files(sources, Ground(), kind=kind, choice=None, on_error="refuse", stack=stack, scratch=self.scratch)

        recipe = {"kind": "import", "format": "jsonl"}
        built = await self._work(lambda: made(prepare, Ground(), recipe, self._blobs.blobs, self.scratch))
        return await self._database.write(lambda connection: _append_named(connection, p.project, name, built))

    async def validate(self, p: Principal, given: UploadRows, file: BinaryIO, name: str | None = None) -> Validation:
        """What `upload` would do to a data set, or to a new one; nothing is stored."""
        p.require("train")
        ground, kind = Ground(), given.kind
        if name is not None:
            dataset = await self.get(p, name)
            ground, kind = await self._ground(p, dataset, given.parent), _kind(dataset, given.kind)
        source = Source(given.split, given.format, file)
        return await self._work(lambda: validate_file(source, ground, kind, given.choice, self.scratch))

    async def split(self, p: Principal, name: str, version: str, choice: SplitChoice, *, request: Repeatable | None = None) -> DatasetVersion:
        """A version that holds out some of the training rows of another."""
        p.require("train")
        if not choice.holds_out:
            raise InvalidInput("`eval` and `validation` are both 0: hold out a share of the rows", field="eval")
        recipe = {"kind": "split", **choice.model_dump(exclude_none=True)}

        async def prepared(dataset: Dataset, ground: Ground) -> Callable[[ExitStack], Prepared]:
            parent = await self.stored(p, name, version)
            return lambda stack: prepare_split(parent.blob, ground, parent.kind, choice, stack, self.scratch)

        return await self._add_version(p, name, request, parent=version, recipe=recipe, prepared=prepared)

    async def curate(self, p: Principal, name: str, choice: Curate, *, request: Repeatable | None = None) -> DatasetVersion:
        """The parent's rows and what judged traffic adds to them."""
        p.require("train")
        recipe = {"kind": "curate", **choice.model_dump(exclude={"parent"})}

        async def prepared(dataset: Dataset, ground: Ground) -> Callable[[ExitStack], Prepared]:
            if _kind(dataset, None) not in ("chat", None):
                raise InvalidInput(f"data set `{name}` holds `{_kind(dataset, None)}` rows, and traffic gives conversations", field="parent")
            judged = await self._curation.judged(p, choice)

            def prepare(stack: ExitStack) -> Prepared:
                accepted = curated_rows(judged, ground.inherited())
                return prepare_rows({"train": accepted.rows}, ground, "chat", accepted.counts, stack, self.scratch)

            return prepare

        return await self._add_version(p, name, request, parent=choice.parent, recipe=recipe, prepared=prepared)

    async def rows(self, p: Principal, name: str, version: str, split: Split, *, limit: int = 50, offset: int = 0) -> Page[AnyRow]:
        """Rows of one split, in order."""
        blob = (await self.stored(p, name, version)).blob
        return await asyncio.to_thread(lambda: _page(blob, split, limit, offset))

    async def rejected(self, p: Principal, name: str, version: str, *, limit: int = 50, offset: int = 0) -> Page[RowProblem]:
        """Rows of the files of an import that were skipped, and why."""
        key = (await self.stored(p, name, version)).rejected_key
        if key is None:
            return Page(data=[], offset=offset, has_more=False)
        packed = await self._blobs.get(key)
        found = await asyncio.to_thread(lambda: unpacked(packed, limit=limit + 1, offset=offset))
        return Page(data=found[:limit], offset=offset, has_more=len(found) > limit)

    async def stored(self, p: Principal, name: str, version: str) -> StoredVersion:
        """A version by its id or manifest, for whoever reads its rows."""
        return await self._open(p, await self.get(p, name), version)

    async def blob(self, key: str) -> Blob:
        """Stored rows by their key, which somebody who may read them was given."""
        stored = self._opened.get(key)
        if stored is None:
            stored = await asyncio.to_thread(self._read_index, key)
            # The key is the hash of the content, so what is remembered under it cannot be out of date.
            self._opened.keep(key, stored, stored.size_bytes)
        return Blob(key, stored, self._opened)

    async def _import(
        self,
        p: Principal,
        name: str,
        sources: Sequence[Source],
        given: ImportRows | UploadRows,
        request: Repeatable | None,
        *,
        origin: str | None = None,
    ) -> DatasetVersion:
        p.require("train")
        choice = given.choice
        recipe: dict[str, Any] = {"kind": "import", "format": given.format}
        recipe |= {"split": choice.model_dump(exclude_none=True)} if choice else {}
        recipe |= {"on_error": given.on_error} if given.on_error != "refuse" else {}
        recipe |= {"origin": origin} if origin else {}

        async def prepared(dataset: Dataset, ground: Ground) -> Callable[[ExitStack], Prepared]:
            kind = _kind(dataset, given.kind)
            return lambda stack: prepare_files(sources, ground, kind=kind, choice=choice, on_error=given.on_error, stack=stack, scratch=self.scratch)

        return await self._add_version(p, name, request, parent=given.parent, recipe=recipe, prepared=prepared)

    async def _add_version(
        self, p: Principal, name: str, request: Repeatable | None, *, parent: str | None, recipe: dict[str, Any], prepared: _Preparing
    ) -> DatasetVersion:
        if (known := await answer_before(self._database, p, request, DatasetVersion)) is not None:
            return known
        dataset = await self.get(p, name)
        ground = await self._ground(p, dataset, parent)
        prepare = await prepared(dataset, ground)
        built = await self._work(lambda: made(prepare, ground, recipe, self._blobs.blobs, self.scratch))
        latest = dataset.versions[-1].id if dataset.versions else None
        return await self._database.write(once(p, request, DatasetVersion, lambda connection: _append(connection, p.project, dataset, latest, built)))

    async def _work(self, work: Callable[[], _T]) -> _T:
        await self._turns.acquire()
        running = asyncio.get_running_loop().run_in_executor(None, work)
        # A caller who leaves does not stop the thread, so the turn ends when the thread does.
        running.add_done_callback(self._end_turn)
        return await asyncio.shield(running)

    def _end_turn(self, done: asyncio.Future[Any]) -> None:
        self._turns.release()
        if not done.cancelled():
            # Looked at here, because a caller who left does not.
            done.exception()

    async def _ground(self, p: Principal, dataset: Dataset, parent: str | None) -> Ground:
        above = None if parent is None else await self._open(p, dataset, parent)
        latest = await self._open(p, dataset, dataset.versions[-1].id) if dataset.versions else None
        return Ground(latest and latest.blob, above and above.blob, above and above.id)

    async def _open(self, p: Principal, dataset: Dataset, version: str) -> StoredVersion:
        query = _version(p.project, dataset.id, version)
        row = await self._database.read(lambda connection: connection.execute(query).first())
        if row is None:
            raise NotFound(f"data set `{dataset.name}` has no version `{version}`", field="version")
        return StoredVersion(row.id, row.kind or "chat", row.manifest, await self.blob(row.key), row.rejected_key)

    def _read_index(self, key: str) -> StoredRows:
        blobs = self._blobs.blobs
        return StoredRows.open(blobs.size(key), lambda start, stop: blobs.part(key, start, stop))


def _kind(dataset: Dataset, wanted: RowKind | None) -> RowKind | None:
    """That of all rows of a data set, whose held-out rows are in every version; None where it has none yet and none is wanted."""
    held = dataset.versions[-1].kind if dataset.versions else wanted
    if wanted not in (None, held):
        problem = f"data set `{dataset.name}` holds `{held}` rows, not `{wanted}`"
        raise InvalidInput(f"{problem}: give every kind of rows a data set of its own", field="kind")
    return held


def _page(blob: Blob, split: Split, limit: int, offset: int) -> Page[AnyRow]:
    data = [row.resource() for row in blob.page(split, limit=limit, offset=offset)]
    return Page[AnyRow](data=data, offset=offset, has_more=offset + limit < blob.stored.count(split))


def _create(connection: Connection, project: str, name: str) -> Dataset:
    table = rows.dataset.c
    if connection.execute(select(table.id).where(table.project == project, table.name == name)).first():
        raise Conflict(f"there is a data set `{name}` already: add a version to it", field="name")
    connection.execute(insert(rows.dataset), {"id": new_id("dataset"), "project": project, "name": name, "created_us": now_us()})
    return _load(connection, _named(connection, project, name))


def _append(connection: Connection, project: str, dataset: Dataset, latest: str | None, built: Built) -> DatasetVersion:
    table, row = rows.dataset_version.c, built.row
    if connection.execute(select(rows.dataset.c.id).where(rows.dataset.c.id == dataset.id)).first() is None:
        raise NotFound(f"data set `{dataset.name}` was deleted meanwhile", field="name")
    if (known := connection.execute(same_version(dataset.id, row["manifest"], row["parent"], row["rejected_key"])).first()) is not None:
        # It may have been made in another way, in which nothing lacks.
        return _version_of(known, dataset.name).model_copy(update={"unfilled": _unfilled(json.loads(row["recipe"]), json.loads(row["counts"]))})
    last = connection.execute(select(table.id, table.number).where(table.dataset_id == dataset.id).order_by(table.number.desc())).first()
    if latest != (None if last is None else last.id):
        # The other one may have pinned rows that this one takes into train.
        raise Conflict(f"another version of `{dataset.name}` was added meanwhile: ask again")
    stored = row | {"project": project, "dataset_id": dataset.id, "number": 1 if last is None else last.number + 1}
    connection.execute(insert(rows.dataset_version), stored)
    items = _items(project, row["id"], built)
    while some := list(islice(items, _ITEMS_AT_ONCE)):
        connection.execute(insert(rows.dataset_item), some)
    return _version_of(connection.execute(select(rows.dataset_version).where(table.id == row["id"])).one(), dataset.name)


def _append_named(connection: Connection, project: str, name: str, built: Built) -> DatasetVersion:
    table = rows.dataset.c
    there = connection.execute(select(table.id).where(table.project == project, table.name == name)).first() is not None
    dataset = _load(connection, _named(connection, project, name)) if there else _create(connection, project, name)
    return _append(connection, project, dataset, dataset.versions[-1].id if dataset.versions else None, built)


def same_version(dataset_id: str, manifest: str, parent: str | None, rejected_key: str | None = None) -> Select[Any]:
    """The version of a data set with this content, this parent and these rejected rows; both may be none."""
    table = rows.dataset_version.c
    same = (table.parent.is_not_distinct_from(parent), table.rejected_key.is_not_distinct_from(rejected_key))
    return select(rows.dataset_version).where(table.dataset_id == dataset_id, table.manifest == manifest, *same)


def _items(project: str, version_id: str, built: Built) -> Iterator[dict[str, Any]]:
    for position, (item_hash, split, source_span, label_source) in enumerate(built.items):
        yield {
            "project": project,
            "version_id": version_id,
            "item_hash": item_hash,
            "position": position,
            "split": split,
            "source_span": source_span,
            "label_source": label_source,
        }


def _named(connection: Connection, project: str, name: str) -> DatabaseRow[Any]:
    query = select(rows.dataset).where(rows.dataset.c.project == project, rows.dataset.c.name == name)
    return one_row(connection, query, f"data set `{name}`", field="name")


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
    counts, recipe = json.loads(row.counts), json.loads(row.recipe)
    return DatasetVersion(
        id=row.id,
        dataset=dataset,
        number=row.number,
        manifest=row.manifest,
        parent=row.parent,
        kind=row.kind or "chat",
        counts=counts,
        recipe=recipe,
        unfilled=_unfilled(recipe, counts),
        created_us=row.created_us,
    )


def _unfilled(recipe: dict[str, Any], counts: dict[str, int]) -> list[Split]:
    # Of an import the shares are part of how it was made, of a split all of it.
    return unfilled(recipe.get("split", recipe), counts)
