"""Files that come in parts, in any order and side by side; complete, they are one of `Files`.

What is not completed within an hour is forgotten.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from sqlalchemy import Connection, Row, delete, func, insert, select, update

from bloomery.disk.mapped import mapped_file, nameless_file
from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import Repeatable, answer_before, once
from bloomery.services.data.files import PIECE_BYTES, Files
from bloomery.services.one_row import one_row
from bloomery.store import rows
from bloomery.store.blobs import Blobs
from bloomery.store.database import Database
from bloomery.types.errors import Conflict, InvalidInput, NotFound, shown
from bloomery.types.files import MAX_PART_BYTES, File, NewFile, NewUpload, Upload, UploadPart
from bloomery.types.ids import new_id, now_us

LIFE_US: Final = 3_600_000_000
_TOLD: Final = 4
"""Names in a message."""


class _Whole(NamedTuple):
    digest: bytes
    md5: str


class Uploads:
    """Takes parts and puts them together."""

    def __init__(self, database: Database, blobs: Blobs, files: Files, scratch: Path | None) -> None:
        self._database, self._blobs, self._files, self._scratch = database, blobs, files, scratch

    async def create(self, p: Principal, given: NewUpload) -> Upload:
        """An upload without parts."""
        p.require("train")
        now = now_us()
        upload = Upload(id=new_id("upload"), given=given, state="pending", file=None, created_us=now, expires_us=now + LIFE_US)
        values: dict[str, Any] = {"id": upload.id, "project": p.project, "given": given.model_dump_json(), "state": "pending"}
        values |= {"created_us": now, "expires_us": upload.expires_us}
        await self._database.write(lambda connection: connection.execute(insert(rows.upload).values(values)))
        return upload

    async def add(self, p: Principal, upload: str, content: BinaryIO, digest: bytes, *, request: Repeatable | None = None) -> UploadPart:
        """One more part. A `request` that comes again changes nothing and is answered what it was."""
        p.require("train")
        if (known := await answer_before(self._database, p, request, UploadPart)) is not None:
            return known
        await self._database.read(lambda connection: _pending(connection, p, upload))
        data = mapped_file(content)
        if not 0 < len(data) <= MAX_PART_BYTES:
            raise InvalidInput(f"a part has 1 to {MAX_PART_BYTES} bytes, not {len(data)}", field="data")
        key = f"files/{digest.hex()}"
        await self._files.put(key, data)
        part = UploadPart(id=new_id("part"), upload=upload, size_bytes=len(data), created_us=now_us())

        def put(connection: Connection) -> UploadPart:
            row = _pending(connection, p, upload)
            there = connection.scalar(select(func.sum(rows.upload_part.c.size_bytes)).where(rows.upload_part.c.upload_id == upload)) or 0
            most = NewUpload.model_validate_json(row.given).size_bytes
            if there + part.size_bytes > most:
                problem = f"upload `{upload}` is of {most} bytes, {there} of which are there already"
                raise InvalidInput(f"{problem}: this part of {part.size_bytes} is too many", field="data")
            values = {"id": part.id, "project": p.project, "upload_id": upload, "key": key}
            connection.execute(insert(rows.upload_part).values(values | {"size_bytes": part.size_bytes, "created_us": part.created_us}))
            return part

        return await self._database.write(once(p, request, UploadPart, put))

    async def complete(self, p: Principal, upload: str, parts: Sequence[str], md5: str | None) -> Upload:
        """The file of these parts in this order, which is looked at as every file is; where it is refused the upload goes on."""
        p.require("train")

        def look(connection: Connection) -> tuple[NewUpload, dict[str, Row[Any]]]:
            row = _pending(connection, p, upload)
            found = connection.execute(select(rows.upload_part).where(rows.upload_part.c.upload_id == upload))
            return NewUpload.model_validate_json(row.given), {part.id: part for part in found}

        given, there = await self._database.read(look)
        if unknown := [part for part in parts if part not in there]:
            named = ", ".join(f"`{shown(part)}`" for part in unknown[:_TOLD])
            raise NotFound(f"upload `{upload}` has no part {named}", field="part_ids")
        if twice := [part for part, times in Counter(parts).items() if times > 1]:
            named = ", ".join(f"`{part}`" for part in twice[:_TOLD])
            raise InvalidInput(f"{named} of upload `{upload}` is named more than once: name every part once, in order", field="part_ids")
        chosen = [there[part] for part in parts]
        if (size := sum(part.size_bytes for part in chosen)) != given.size_bytes:
            problem = f"the parts have {size} bytes, and the upload was announced with {given.size_bytes}"
            raise InvalidInput(f"{problem}: name every part once, in order", field="part_ids")
        with nameless_file(self._scratch) as content:
            whole = await asyncio.to_thread(_join, self._blobs, chosen, content)
            if md5 is not None and md5.lower() != whole.md5:
                raise InvalidInput(f"the bytes have the md5 sum {whole.md5}, not the given one: a part is damaged or out of order", field="md5")
            plain = NewFile.model_validate(given.model_dump(exclude={"size_bytes"}))
            ended: list[Upload] = []
            await self._files.create(
                p, plain, content, whole.digest, also=lambda connection, file: ended.append(_end(connection, p, upload, "completed", file))
            )
        return ended[0]

    async def cancel(self, p: Principal, upload: str) -> Upload:
        """Forget its parts."""
        p.require("train")
        return await self._database.write(lambda connection: _end(connection, p, upload, "cancelled", None))


def _join(blobs: Blobs, parts: Sequence[Row[Any]], file: BinaryIO) -> _Whole:
    sha, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    for part in parts:
        for start, stop in pairwise([*range(0, part.size_bytes, PIECE_BYTES), part.size_bytes]):
            piece = blobs.part(part.key, start, stop)
            sha.update(piece)
            md5.update(piece)
            file.write(piece)
    file.flush()
    file.seek(0)
    return _Whole(sha.digest(), md5.hexdigest())


def _pending(connection: Connection, p: Principal, upload: str) -> Row[Any]:
    table = rows.upload.c
    query = select(rows.upload).where(table.project == p.project, table.id == upload, table.expires_us > now_us())
    row = one_row(connection, query, f"upload `{shown(upload)}`: one that is not completed within an hour is forgotten", field="upload")
    if row.state != "pending":
        raise Conflict(f"upload `{upload}` is {row.state}", field="upload")
    return row


def _end(connection: Connection, p: Principal, upload: str, state: str, file: File | None) -> Upload:
    row = _pending(connection, p, upload)
    changes = {"state": state, "file_id": None if file is None else file.id}
    connection.execute(update(rows.upload).where(rows.upload.c.id == row.id).values(changes))
    connection.execute(delete(rows.upload_part).where(rows.upload_part.c.upload_id == row.id))
    given = NewUpload.model_validate_json(row.given)
    return Upload.model_validate(
        {"id": row.id, "given": given, "state": state, "file": file, "created_us": row.created_us, "expires_us": row.expires_us}
    )
