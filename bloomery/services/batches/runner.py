"""Has batches answered: some at a time, each project's in turn, their requests side by side and behind whatever people wait for.

Where a batch is stands in its row, what was answered in rows of its lines: a runner that begins goes on with all that have not ended. A request that
is told to come again (a key's limits, a full queue, an engine that is away) comes again until the batch's time is over.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

from sqlalchemy import Connection, Row, select

from bloomery.obs import background
from bloomery.services.access.auth import Auth
from bloomery.services.access.principal import Principal
from bloomery.services.batches.answers import Answered, Finisher, Keeper
from bloomery.services.batches.batch_rows import OPEN, as_json, now, switch
from bloomery.services.batches.batches import Batches
from bloomery.services.batches.requests import Requests
from bloomery.services.serving.sampling import Sampling
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs
from bloomery.store.database import Database
from bloomery.types.batches import BatchProblem, BatchState, NewBatch
from bloomery.types.errors import BloomeryError, NotFound, Unauthorized
from bloomery.types.ids import now_us

BATCHES_AT_ONCE: Final = 4
"""Of the server; beyond that a project that has none at work gets one, so that nobody's waits for days behind those of others."""
LINES_AT_ONCE: Final = 32
"""Of all of these together: half of what an engine samples at a time, about."""
RETRY_S: Final = 5.0
"""After which what went wrong is tried again: a full disk, say."""

Answer = Callable[[Principal | Unauthorized, str, bytes], Awaitable[Answered]]
"""Answers whom, a path of the contract, and a body: as if he had sent it."""

log = logging.getLogger(__name__)


class BatchRunner:
    """Works at batches while it is `running`."""

    def __init__(self, database: Database, blobs: AsyncBlobs, auth: Auth, sampling: Sampling, batches: Batches, finisher: Finisher) -> None:
        self._database, self._blobs, self._auth, self._sampling = database, blobs, auth, sampling
        self._batches, self._finisher = batches, finisher
        self._places = asyncio.Semaphore(LINES_AT_ONCE)
        self._busy: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """Batches that are worked at: their projects."""

    @asynccontextmanager
    async def running(self, answer: Answer) -> AsyncIterator[None]:
        """Go on with all batches that have not ended, while this is entered."""
        async with background.running(self._run(answer), "batches"):
            yield

    async def _run(self, answer: Answer) -> None:
        changed = asyncio.Event()
        with self._batches.changed.calling(changed.set):
            try:
                while True:
                    changed.clear()
                    while (row := await self._next()) is not None and self._has_room_for(row.project):
                        task = background.start(self._work(row.id, answer, changed), f"batch {row.id}")
                        self._busy[row.id] = (row.project, task)
                    await changed.wait()
            finally:
                await background.stop(*(task for _, task in list(self._busy.values())))

    def _has_room_for(self, project: str) -> bool:
        return len(self._busy) < BATCHES_AT_ONCE or all(project != other for other, _ in self._busy.values())

    async def _next(self) -> Row[Any] | None:
        """The oldest of the project that fewest are worked at of."""
        table = rows.batch.c
        query = select(table.id, table.project).where(table.state.in_(OPEN), table.id.not_in(self._busy)).order_by(table.id)
        busy = Counter(project for project, _ in self._busy.values())
        while True:
            try:
                found: list[Row[Any]] = await self._database.read(lambda connection: list(connection.execute(query)))
            except BloomeryError:
                log.exception("batches could not be looked for; it is tried again in %g s", RETRY_S)
                await asyncio.sleep(RETRY_S)
            else:
                return min(found, key=lambda row: busy[row.project]) if found else None

    async def _work(self, batch: str, answer: Answer, ended: asyncio.Event) -> None:
        try:
            while not await self._tried(batch, answer):
                await asyncio.sleep(RETRY_S)
        finally:
            del self._busy[batch]
            ended.set()

    async def _tried(self, batch: str, answer: Answer) -> bool:
        """Whether it came to its end; what kept it from that is in the log."""
        try:
            await self._work_to_its_end(batch, answer)
        except Exception:
            log.exception("batch `%s` could not go on; it is tried again in %g s", batch, RETRY_S)
            return False
        return True

    async def _work_to_its_end(self, batch: str, answer: Answer) -> None:
        row = await self._database.read(lambda connection: now(connection, batch))
        asked = NewBatch.model_validate_json(row.asked)
        requests = await asyncio.to_thread(Requests.read, self._blobs.blobs, row.input_key, row.input_bytes, asked.endpoint)
        if row.state == BatchState.VALIDATING:
            row = await self._begin(row, requests)
        if row.state == BatchState.IN_PROGRESS:
            await self._answer_in_time(row, asked, requests, answer)
            row = await self._switch(row, BatchState.FINALIZING)
        if not BatchState(row.state).ended:
            # Nothing was begun of one that was cancelled before it was looked at.
            await self._finisher.finish(row, requests, begun=row.total > 0)

    async def _begin(self, row: Row[Any], requests: Requests) -> Row[Any]:
        """In progress, unless it cannot be."""
        if row.expires_us <= now_us():
            return await self._switch(row, BatchState.EXPIRED)
        if problems := requests.problems or await self._problems_of_model(row, requests):
            return await self._switch(row, BatchState.FAILED, problems=as_json(problems))
        return await self._switch(row, BatchState.IN_PROGRESS, total=len(requests), model=requests.model)

    async def _problems_of_model(self, row: Row[Any], requests: Requests) -> list[BatchProblem]:
        """Which would be those of each request."""
        assert requests.model is not None
        try:
            await self._sampling.resolve(self._auth.principal(row.key_id), requests.model)
        except NotFound as error:
            return [BatchProblem(code="model_not_found", message=error.message, param="body.model")]
        except Unauthorized as error:
            return [BatchProblem(code="invalid_api_key", message=error.message)]
        return []

    async def _switch(self, row: Row[Any], state: BatchState, **values: Any) -> Row[Any]:
        """The batch as it is then: in that state, or one that is cancelled meanwhile."""

        def change(connection: Connection) -> Row[Any]:
            found = now(connection, row.id)
            if found.state != BatchState.CANCELLING:
                switch(connection, found, state, **values)
            return now(connection, row.id)

        return await self._database.write(change)

    async def _answer_in_time(self, row: Row[Any], asked: NewBatch, requests: Requests, answer: Answer) -> None:
        """All that is missing, until it is there, the batch is cancelled, or its time is over; what is in hand then is dropped."""
        answering = asyncio.create_task(self._answer_missing(row, asked, requests, answer))
        cancelled = asyncio.create_task(self._until_cancelled(row.id))
        left_s = (row.expires_us - now_us()) / 1e6
        try:
            done, _ = await asyncio.wait({answering, cancelled}, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await background.stop(answering, cancelled)

    async def _answer_missing(self, row: Row[Any], asked: NewBatch, requests: Requests, answer: Answer) -> None:
        keeper = Keeper(self._database, self._blobs, row.id, row.project)
        missing = iter(await keeper.missing(len(requests)))

        async def work(numbers: Iterator[int]) -> None:
            for number in numbers:
                request = await asyncio.to_thread(requests.__getitem__, number)
                answered = await self._answered(row.key_id, asked.endpoint, request.body, answer)
                await keeper.keep(number, answered.good, answered.line(request.custom_id))

        async with asyncio.TaskGroup() as group:
            for _ in range(LINES_AT_ONCE):
                group.create_task(work(missing))

    async def _answered(self, key_id: str, path: str, body: bytes, answer: Answer) -> Answered:
        while True:
            async with self._places:
                answered = await answer(self._caller(key_id), path, body)
            if answered.retry_after_s is None:
                return answered
            await asyncio.sleep(answered.retry_after_s)

    def _caller(self, key_id: str) -> Principal | Unauthorized:
        """Whoever has the key, in no hurry; its refusal where it is good no longer."""
        try:
            return self._auth.principal(key_id)._replace(patient=True)
        except Unauthorized as refusal:
            return refusal

    async def _until_cancelled(self, batch: str) -> None:
        changed = asyncio.Event()
        with self._batches.changed.calling(changed.set):
            while await self._database.read(lambda connection: now(connection, batch).state) == BatchState.IN_PROGRESS:
                await changed.wait()
                changed.clear()
