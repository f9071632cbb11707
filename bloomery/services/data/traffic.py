"""Recorded traffic: every served inference as a span, written off the request path.

`record` only puts into a bounded queue, so serving never waits for the disk and never fails for it; what finds the queue full is counted.
A task of `Traffic` takes batches, redacts them on a thread, writes bodies and then rows. `flush` waits until what is queued is written.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Self

from sqlalchemy import Connection, Row, Select, insert, select

from bloomery.config import RecordMode, stopping
from bloomery.obs import background
from bloomery.services.access.principal import Principal
from bloomery.services.data.span_filter import SpanFilter, of_spans
from bloomery.services.data.span_rows import Inference, Prepared, prepare, read_body
from bloomery.services.data.span_sums import add_spans, forget_spans, traffic_report
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs
from bloomery.store.database import Database
from bloomery.types.errors import NotFound, Unavailable
from bloomery.types.resources import Page, Span, TrafficState
from bloomery.types.traffic import SpanOrder, TrafficReport

CAPACITY: Final = 4096
"""Spans waiting to be written; at more than that, spans are dropped and counted."""
_BATCH: Final = 128
_FLUSH_S: Final = 30.0
LINGER_S: Final = 0.25
"""How long a span waits for others: a hundred rows in one transaction cost little more than one, and disturb those who are served as seldom."""

log = logging.getLogger(__name__)


_ANY: Final = SpanFilter()


class Traffic:
    """The recorder and the reader of spans; records while it is entered."""

    def __init__(
        self,
        database: Database,
        blobs: AsyncBlobs,
        mode: RecordMode,
        *,
        capacity: int = CAPACITY,
        linger_s: float = LINGER_S,
        last_flush_s: float = stopping.SPANS_S,
    ) -> None:
        self.mode = mode
        self._linger_s, self._last_flush_s = linger_s, last_flush_s
        self._database = database
        self._blobs = blobs
        self._queue: asyncio.Queue[Inference] = asyncio.Queue(capacity)
        self._task: asyncio.Task[None] | None = None
        self._progress = asyncio.Condition()
        self._hurry = asyncio.Event()
        self._taken = self._recorded = self._dropped = self._failed = 0

    async def __aenter__(self) -> Self:
        self._task = background.start(self._write_batches(), "traffic")
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.flush(self._last_flush_s)
        except Unavailable as unwritten:
            log.error("stopping: %s", unwritten.message)
        await background.stop(self._task)

    def record(self, inference: Inference) -> None:
        """Take an inference for writing; never waits and never raises. Samples of training leave half of the queue to what is served."""
        if self.mode == "off":
            return
        places = self._queue.maxsize // 2 if inference.kind == "sample" else self._queue.maxsize
        if self._queue.qsize() >= places:
            self._dropped += 1
            return
        self._queue.put_nowait(inference)
        self._taken += 1
        if self._queue.qsize() >= _BATCH:
            self._hurry.set()

    async def flush(self, timeout_s: float = _FLUSH_S) -> None:
        """Wait until everything recorded so far can be read, whatever is recorded meanwhile."""
        taken = self._taken
        self._hurry.set()
        try:
            async with asyncio.timeout(timeout_s), self._progress:
                await self._progress.wait_for(lambda: self._recorded + self._failed >= taken)
        except TimeoutError:
            behind = self._taken - self._recorded - self._failed
            raise Unavailable(f"the traffic recorder is {behind} spans behind; try again later") from None

    def state(self) -> TrafficState:
        """Counters of this process."""
        return TrafficState(mode=self.mode, queued=self._queue.qsize(), recorded=self._recorded, dropped=self._dropped, failed=self._failed)

    async def list(self, p: Principal, wanted: SpanFilter = _ANY, *, order: SpanOrder = "newest", limit: int = 50, offset: int = 0) -> Page[Span]:
        """Spans without bodies."""
        p.require("read")
        query = _ordered(p.project, wanted, order).limit(limit + 1).offset(offset)
        await self.flush()
        found = await self._database.read(lambda connection: connection.execute(query).all())
        return Page(data=[_span(row) for row in found[:limit]], offset=offset, has_more=len(found) > limit)

    async def totals(self, p: Principal, wanted: SpanFilter = _ANY) -> TrafficReport:
        """What they come to."""
        p.require("read")
        await self.flush()
        return await self._database.read(lambda connection: traffic_report(connection, p.project, wanted))

    async def get(self, p: Principal, span_id: str) -> Span:
        """One span without its body."""
        p.require("read")
        return _span(await self._row(p, span_id))

    async def body(self, p: Principal, span_id: str) -> dict[str, Any] | None:
        """The body of a span; None where none was kept."""
        p.require("read")
        row = await self._row(p, span_id)
        return None if row.body_ref is None else read_body(await self._blobs.get(row.body_ref))

    async def _row(self, p: Principal, span_id: str) -> Row[Any]:
        await self.flush()
        query = _spans(p.project, _ANY).where(rows.span.c.id == span_id)
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        if row is None:
            raise NotFound(f"no span `{span_id}` was recorded, or it expired", field="target")
        return row

    async def _write_batches(self) -> None:
        while True:
            batch = [await self._queue.get()]
            with suppress(TimeoutError):
                async with asyncio.timeout(self._linger_s):
                    await self._hurry.wait()
            while len(batch) < _BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            if self._queue.empty():
                self._hurry.clear()
            await self._settle(batch)
            async with self._progress:
                self._progress.notify_all()

    async def _settle(self, batch: Sequence[Inference]) -> None:
        # The boundary between serving and recording: a span that cannot be written costs itself and nothing else.
        try:
            await self._write(batch)
            self._recorded += len(batch)
        except Exception:
            if len(batch) > 1:
                for inference in batch:
                    await self._settle([inference])
                return
            self._failed += 1
            log.exception("span %s could not be recorded", batch[0].id)

    async def _write(self, batch: Sequence[Inference]) -> None:
        keep_body = self.mode == "full"
        prepared = await asyncio.to_thread(lambda: [prepare(inference, keep_body=keep_body) for inference in batch])
        await self._blobs.put_all({item.row["body_ref"]: item.body for item in prepared if item.body is not None})
        await self._database.write(lambda connection: _insert(connection, prepared))


def _insert(connection: Connection, prepared: list[Prepared]) -> None:
    # A sample that a client submits again, after a restart of the api say, has the id of the first: the last answer is the one it has.
    again = [item.row["id"] for item in prepared if item.row["kind"] == "sample"]
    if again:
        forget_spans(connection, rows.span.c.id.in_(again))
    connection.execute(insert(rows.span), [item.row for item in prepared])
    add_spans(connection, [item.row for item in prepared])


def _spans(project: str, wanted: SpanFilter) -> Select[Any]:
    names = (rows.deployment.c.name.label("deployment"), rows.revision.c.number.label("revision"))
    joined = rows.span.outerjoin(rows.deployment, rows.span.c.deployment_id == rows.deployment.c.id).outerjoin(
        rows.revision, rows.span.c.revision_id == rows.revision.c.id
    )
    return select(rows.span, *names).select_from(joined).where(*of_spans(project, wanted))


def _ordered(project: str, wanted: SpanFilter, order: SpanOrder) -> Select[Any]:
    span, query = rows.span.c, _spans(project, wanted)
    newest = (span.started_us.desc(), span.id.desc())
    if order == "newest":
        return query.order_by(*newest)
    column = span.cost_usd if order == "dearest" else span.duration_us
    # Of a sum there is no index, which would be in this order.
    most = column + 0 if wanted.is_narrow else column
    return query.where(most.is_not(None)).order_by(most.desc(), *newest)


def _span(row: Row[Any]) -> Span:
    fields = {name: value for name, value in row._mapping.items() if name in Span.model_fields}
    derived = {"tags": json.loads(row.tags), "redacted": bool(row.redacted), "has_body": row.body_ref is not None}
    return Span.model_validate({**fields, **derived})
