"""Files of OpenAI's contract: their bytes are blobs by their content, a row says whose they are and what for.

A file of training rows is read whole before it is there, so that whoever trains on it need not fear its rows. The data set that is made of it
(`Datasets.of_files`) holds them by itself: a file may be deleted while jobs train on its rows. Files of batches may be had by whoever asks models.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from sqlalchemy import ColumnElement, Connection, Row, delete, insert, or_, select

from bloomery.disk.mapped import mapped_file
from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import Repeatable, answer_before, once
from bloomery.services.data.datasets import Datasets
from bloomery.services.data.reading import refusal
from bloomery.services.one_row import one_row
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs, Blobs
from bloomery.store.database import Database
from bloomery.types.datasets import RowKind, UploadRows, Validation
from bloomery.types.errors import InvalidInput, Unavailable, naming, shown
from bloomery.types.files import OF_BATCHES, File, FilePage, NewFile
from bloomery.types.ids import expiry_us, new_id, now_us
from bloomery.types.keys import Scope

PIECE_BYTES: Final = 1 << 20
"""Of a file that is read are in memory together."""


@dataclass(frozen=True, slots=True)
class Content:
    """A file and its bytes, which are read when they are asked for."""

    file: File
    key: str
    blobs: Blobs

    def pieces(self) -> Iterator[bytes]:
        """All of it, in order."""
        size = self.file.size_bytes
        return (self.blobs.part(self.key, start, min(start + PIECE_BYTES, size)) for start in range(0, size, PIECE_BYTES))

    def copy(self, file: BinaryIO) -> None:
        """All of it, into a file that is at its beginning then."""
        for piece in self.pieces():
            file.write(piece)
        file.seek(0)


class Files:
    """Keeps them."""

    def __init__(self, database: Database, blobs: AsyncBlobs, datasets: Datasets) -> None:
        self._database, self._blobs, self._datasets = database, blobs, datasets

    async def create(
        self,
        p: Principal,
        given: NewFile,
        content: BinaryIO,
        digest: bytes,
        *,
        request: Repeatable | None = None,
        also: Callable[[Connection, File], object] = lambda *_: None,
    ) -> File:
        """A file with this content, of which `digest` is a hash; refused where any row is none, with the numbers of those.

        A `request` that comes again changes nothing and is answered what it was. `also` happens with it or not at all.
        """
        p.require("train", "infer")
        if given.purpose not in OF_BATCHES:
            p.require("train")
        if (known := await answer_before(self._database, p, request, File)) is not None:
            return known
        kind = await self._kind_of(p, content) if given.purpose == "fine-tune" else None
        _require_content(content)
        key, now, data = f"files/{digest.hex()}", now_us(), mapped_file(content)
        await self.put(key, data)
        file = File(
            id=new_id("file"),
            filename=given.filename,
            purpose=given.purpose,
            kind=kind,
            size_bytes=len(data),
            created_us=now,
            expires_us=expiry_us(given.life_s, now),
        )

        def add(connection: Connection) -> File:
            also(connection, file)
            return add_file(connection, p.project, file, key)

        return await self._database.write(once(p, request, File, add))

    async def list(
        self, p: Principal, *, purpose: str | None = None, after: str | None = None, limit: int = 10_000, oldest_first: bool = False
    ) -> FilePage:
        """Files, newest first unless it is said otherwise, behind the one that is called `after`."""
        p.require("read", "train", "infer")

        def look(connection: Connection) -> list[Row[Any]]:
            table = rows.file.c
            query = select(rows.file).where(_there(p, "read", "train")).order_by(table.id if oldest_first else table.id.desc()).limit(limit + 1)
            if purpose is not None:
                query = query.where(table.purpose == purpose)
            if after is not None:
                _one(connection, p, after, "read", "train", field="after")
                query = query.where(table.id > after if oldest_first else table.id < after)
            return list(connection.execute(query))

        found = await self._database.read(look)
        return FilePage(data=[_file(row) for row in found[:limit]], has_more=len(found) > limit)

    async def get(self, p: Principal, file: str, *, field: str = "file") -> File:
        """One file; `field` is what called it so."""
        p.require("read", "train", "infer")
        return await self._database.read(lambda connection: _file(_one(connection, p, file, "read", "train", field=field)))

    async def content(self, p: Principal, file: str, *, field: str = "file") -> Content:
        """The same with its bytes."""
        p.require("read", "train", "infer")
        row = await self._database.read(lambda connection: _one(connection, p, file, "read", "train", field=field))
        return Content(_file(row), row.key, self._blobs.blobs)

    async def delete(self, p: Principal, file: str) -> File:
        """Forget a file; what was made of it stays."""
        p.require("train", "infer")

        def forget(connection: Connection) -> File:
            row = _one(connection, p, file, "train", field="file")
            connection.execute(delete(rows.file).where(rows.file.c.id == row.id))
            return _file(row)

        return await self._database.write(forget)

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Write the bytes of a file, before there is a row of it."""
        try:
            await self._blobs.put(key, data)
        except OSError as error:
            raise Unavailable(f"the file cannot be kept ({error.strerror}): is the server's disk full? Free space there and send it again") from error

    async def _kind_of(self, p: Principal, content: BinaryIO) -> RowKind | None:
        """The kind of its rows, all of which are some."""
        read = await self._read(p, content, UploadRows(format="jsonl"))
        if set(read.reasons) == {"no_answer"} and not read.accepted:
            # Questions without answers and without fields for graders look like conversations, and are prompts.
            read = await self._read(p, content, UploadRows(format="jsonl", kind="prompt"))
        if read.rejected:
            raise refusal(read.problems, read.rejected, field="file")
        return read.kind

    async def _read(self, p: Principal, content: BinaryIO, how: UploadRows) -> Validation:
        content.seek(0)
        with naming("file", InvalidInput):
            return await self._datasets.validate(p, how, content)


def add_file(connection: Connection, project: str, file: File, key: str) -> File:
    """A file whose bytes are there."""
    connection.execute(insert(rows.file).values(project=project, key=key, **file.model_dump()))
    return file


def _require_content(content: BinaryIO) -> None:
    """All that a file needs whose lines are looked at when something is made of them: a batch, or a run of an eval."""
    content.seek(0)
    if not content.read(1):
        raise InvalidInput("the file is empty: give a request or a row on each line", field="file")


def _there(p: Principal, *scopes: Scope) -> ColumnElement[bool]:
    """Files that a key may have: all where it has one of the scopes, else those of batches."""
    table = rows.file.c
    there = (table.project == p.project) & or_(table.expires_us.is_(None), table.expires_us > now_us())
    return there & table.purpose.in_(OF_BATCHES) if p.scopes.isdisjoint(scopes) else there


def _one(connection: Connection, p: Principal, file: str, *scopes: Scope, field: str) -> Row[Any]:
    return one_row(connection, select(rows.file).where(_there(p, *scopes), rows.file.c.id == file), f"file `{shown(file)}`", field=field)


def _file(row: Row[Any]) -> File:
    return File(**{name: getattr(row, name) for name in File.model_fields})
