"""What was answered of a batch: kept line by line while it is answered, and put together into its files at the end.

Lines that are there together are written together: a blob with all of them, and a row for each that says where it lies. Of a server that dies between
the two nothing is known but the rows, so a line has one answer: none whose row is there is asked again, and one without a row has none.
"""

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
from sqlalchemy import Connection, Row, delete, insert, select, update

from bloomery.disk.mapped import mapped_file, nameless_file
from bloomery.obs.failpoints import failpoint
from bloomery.services.batches.batch_rows import now, switch
from bloomery.services.batches.requests import Request, Requests
from bloomery.services.data.files import Files, add_file
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs
from bloomery.store.database import Database
from bloomery.types.batches import BatchState, NewBatch
from bloomery.types.files import File
from bloomery.types.ids import expiry_us, new_id, now_us

_NOT_ANSWERED: Final = {
    BatchState.EXPIRED: ("batch_expired", "the completion window was over before this request was answered"),
    BatchState.CANCELLED: ("batch_cancelled", "the batch was cancelled before this request was answered"),
}


class Answered(NamedTuple):
    """The answer to a request."""

    status: int
    request_id: str
    body: bytes
    """JSON."""
    retry_after_s: float | None = None
    """What was away is there again after as long; None: to ask again would change nothing."""

    @property
    def good(self) -> bool:
        """Whether it belongs into the output and not among the errors."""
        return self.status < 400

    def line(self, custom_id: str) -> bytes:
        """As the contract writes it."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": msgspec.Raw(self.body)}
        return line_of(custom_id, response, None)


class _Kept(NamedTuple):
    number: int
    good: bool
    line: bytes
    stored: "asyncio.Future[None]"


class Keeper:
    """Of the answers to one batch."""

    def __init__(self, database: Database, blobs: AsyncBlobs, batch: str, project: str) -> None:
        self._database, self._blobs, self._batch, self._project = database, blobs, batch, project
        self._waiting: list[_Kept] = []
        self._turn = asyncio.Lock()

    async def missing(self, count: int) -> list[int]:
        """Requests that have no answer yet."""
        table = rows.batch_line.c
        query = select(table.number).where(table.batch_id == self._batch)
        there = await self._database.read(lambda connection: set(connection.scalars(query)))
        return [number for number in range(count) if number not in there]

    async def keep(self, number: int, good: bool, line: bytes) -> None:
        """An answer; it is on disk when this returns, together with those that came meanwhile."""
        kept = _Kept(number, good, line, asyncio.get_running_loop().create_future())
        self._waiting.append(kept)
        async with self._turn:
            if not kept.stored.done():
                together, self._waiting = self._waiting, []
                await self._store(together)
        await kept.stored

    async def _store(self, together: Sequence[_Kept]) -> None:
        try:
            await self._write(together)
        except Exception as error:
            for kept in together:
                kept.stored.set_exception(error)
        else:
            for kept in together:
                kept.stored.set_result(None)

    async def _write(self, together: Sequence[_Kept]) -> None:
        key, places, place = f"batches/{self._batch}/{new_id('lines')}", [], 0
        for kept in together:
            places.append({"number": kept.number, "good": int(kept.good), "start": place, "stop": place + len(kept.line)})
            place += len(kept.line)
        await self._blobs.put(key, b"".join(kept.line for kept in together))
        failpoint("batch.lines.written")
        await self._database.write(lambda connection: self._add(connection, key, places))

    def _add(self, connection: Connection, key: str, places: list[dict[str, int]]) -> None:
        table = rows.batch_line.c
        numbers = [place["number"] for place in places]
        # Of a request that was asked twice, because nobody heard what became of the first answer, that is the one.
        there = set(connection.scalars(select(table.number).where(table.batch_id == self._batch, table.number.in_(numbers))))
        fresh = [place for place in places if place["number"] not in there]
        if fresh:
            connection.execute(insert(rows.batch_line), [{"batch_id": self._batch, "project": self._project, "key": key, **place} for place in fresh])
            good, counted = sum(place["good"] for place in fresh), rows.batch.c
            more = {"completed": counted.completed + good, "failed": counted.failed + len(fresh) - good}
            connection.execute(update(rows.batch).where(counted.id == self._batch).values(more))


class Finisher:
    """Makes the files of batches that nothing more is asked of."""

    def __init__(self, database: Database, files: Files, blobs: AsyncBlobs, scratch: Path) -> None:
        self._database, self._files, self._blobs, self._scratch = database, files, blobs, scratch

    async def finish(self, batch: Row[Any], requests: Requests, *, begun: bool) -> None:
        """Whatever was answered, in the order of the requests; and what was not, among the errors, unless nothing was `begun`."""
        table = rows.batch_line.c
        query = select(rows.batch_line).where(table.batch_id == batch.id).order_by(table.number)
        answered = await self._database.read(lambda connection: list(connection.execute(query)))
        end = _end(batch.state, whole=len(answered) == len(requests))
        output = await self._written(batch, "output", self._lines([row for row in answered if row.good]))
        left = sorted({*range(len(requests) if begun else 0)} - {row.number for row in answered})
        not_answered = (_not_answered(requests[number], end) for number in left)
        errors = await self._written(batch, "error", chain(self._lines([row for row in answered if not row.good]), not_answered))

        def change(connection: Connection) -> None:
            made = {name: add_file(connection, batch.project, *file).id for name, file in (("output_file", output), ("error_file", errors)) if file}
            switch(connection, now(connection, batch.id), end, **made)
            connection.execute(delete(rows.batch_line).where(table.batch_id == batch.id))

        await self._database.write(change)
        for key in {row.key for row in answered}:
            await self._blobs.delete(key)

    def _lines(self, answered: Sequence[Row[Any]]) -> Iterator[bytes]:
        return (self._blobs.blobs.part(row.key, row.start, row.stop) for row in answered)

    async def _written(self, batch: Row[Any], what: str, lines: Iterator[bytes]) -> tuple[File, str] | None:
        """A file of these lines, unless there are none."""
        with nameless_file(self._scratch) as file:
            digest = await asyncio.to_thread(_write, file, lines)
            if file.tell() == 0:
                return None
            data, created_us = mapped_file(file), now_us()
            key = f"files/{digest.hex()}"
            await self._files.put(key, data)
            asked = NewBatch.model_validate_json(batch.asked)
            made = File(
                id=new_id("file"),
                filename=f"{batch.id}_{what}.jsonl",
                purpose="batch_output",
                kind=None,
                size_bytes=len(data),
                created_us=created_us,
                expires_us=expiry_us(asked.output_life_s, created_us),
            )
            return made, key


def _end(state: str, *, whole: bool) -> BatchState:
    if state == BatchState.CANCELLING:
        return BatchState.CANCELLED
    return BatchState.COMPLETED if whole else BatchState.EXPIRED


def _write(file: BinaryIO, lines: Iterator[bytes]) -> bytes:
    """A hash of all of them."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line)
        file.write(line)
    return digest.digest()


def _not_answered(request: Request, end: BatchState) -> bytes:
    code, message = _NOT_ANSWERED[end]
    return line_of(request.custom_id, None, {"code": code, "message": message})


def line_of(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    """A line of a batch's files."""
    return msgspec.json.encode({"id": new_id("batch_req"), "custom_id": custom_id, "response": response, "error": error}) + b"\n"
