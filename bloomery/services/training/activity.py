"""The runs that are in use.

After a start of the api those with unfinished business are taken up at once, others when they are first asked for; one that nobody used for a
while leaves the engine's memory. `inbox` brings what the engines say about runs, in order.
"""

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from bloomery.obs import background
from bloomery.services.engines.connection import EngineLost, Inbox, Received
from bloomery.services.engines.link import EngineLink
from bloomery.services.kinds import ACTIVE, BROKEN
from bloomery.services.listeners import Listeners
from bloomery.services.training.active import ActiveRun, Patience
from bloomery.services.training.backlog import Backlog
from bloomery.services.training.history import Succeeded
from bloomery.services.training.run_rows import RunRow, all_runs, one_run
from bloomery.services.training.settle import set_state
from bloomery.store.blobs import AsyncBlobs
from bloomery.store.database import Database
from bloomery.store.journal import BOUNDS, Bounds, Journal, extent, result_bytes, trim
from bloomery.types.errors import BloomeryError, Corrupt, Stopped
from bloomery.types.ids import now_us
from bloomery.types.protocol import CheckpointWritten, CloseRun, OperationDone, RunClosed, RunOpened, Welcome

log = logging.getLogger(__name__)

IDLE_S: Final = 1800.0
REST_S: Final = 30.0
JOURNAL_THREADS: Final = 4


class Activity:
    """Takes runs up and retires them; works while it is entered."""

    def __init__(
        self,
        *,
        database: Database,
        blobs: AsyncBlobs,
        directory: Path,
        links: Mapping[str, EngineLink],
        inbox: Inbox,
        patience: Patience | None = None,
        bounds: Bounds = BOUNDS,
        published: Listeners | None = None,
        succeeded: Succeeded = lambda successor: None,
    ) -> None:
        """`bounds`: of the results of each run; `published` hear when weights that a run published have their row, `succeeded` of successors."""
        self._database, self._blobs, self._directory = database, blobs, directory
        self._links, self._inbox, self._patience, self._bounds = links, inbox, patience or Patience(), bounds
        self._all_bounded = False
        """Whether the runs that nobody has used since the start were looked at: without being used none grows."""
        self._published, self._succeeded = Listeners() if published is None else published, succeeded
        self._pool = ThreadPoolExecutor(JOURNAL_THREADS, thread_name_prefix="journal")
        self._backlog = Backlog()
        self._runs: dict[str, ActiveRun] = {}
        self._opening: dict[str, asyncio.Task[ActiveRun]] = {}
        self._stopped: dict[str, str] = {}
        """What is wrong with runs whose files are damaged. Those are brought back while the server is down, so nothing is read again before."""
        self._dispatcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._dispatcher = background.start(self._dispatch(), "runs")
        for row in await self._database.read(all_runs):
            await self._go_on(row)
        return self

    async def _go_on(self, row: RunRow) -> None:
        """Take up a run with unfinished business. What is wrong with its files must not keep the server from starting; whoever asks is told."""
        try:
            if await self._unfinished(row):
                await self.take_up(row.id)
        except Corrupt as error:
            if row.id not in self._stopped:
                await self._stop(row, error)
        except (BloomeryError, OSError) as error:
            log.error("run %s: it is not taken up before somebody asks for it: %s", row.id, error)

    async def __aexit__(self, *_: object) -> None:
        await background.stop(self._dispatcher)
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        await asyncio.gather(*(run.close() for run in self._runs.values()))
        self._pool.shutdown()

    def get(self, run_id: str) -> ActiveRun | None:
        """The run if it is in use."""
        return self._runs.get(run_id)

    async def take_up(self, run_id: str) -> ActiveRun:
        """The run, in use from here on; `Stopped` if it was found damaged before."""
        if (problem := self._stopped.get(run_id)) is not None:
            raise Stopped(problem)
        if (run := self._runs.get(run_id)) is not None:
            return run
        if run_id not in self._opening:
            self._opening[run_id] = asyncio.create_task(self._open(run_id))
            self._opening[run_id].add_done_callback(lambda _: self._opening.pop(run_id, None))
        return await asyncio.shield(self._opening[run_id])

    async def retire(self, run: ActiveRun) -> None:
        """Have the engine let go of a quiet run."""
        if await run.rest(REST_S):
            # No await in between: whoever asks from here on takes the run up anew.
            self._runs.pop(run.facts.key.run_id, None)
            await run.close()

    async def stored(self, timeout_s: float) -> None:
        """Wait until all that the engines said so far is journaled and in rows."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._inbox.join()
                await asyncio.gather(*(run.stored() for run in self._runs.values()))

    async def tidy(self) -> None:
        """Let idle runs leave the engines' memory, and forget results whose time is over, or that are too many."""
        old_us = now_us() - self._bounds.ttl_s * 1_000_000
        for run in [run for run in self._runs.values() if run.history.failure is None]:
            try:
                await run.history.drop_old_results(old_us)
            except Corrupt as error:
                await run.stop(error)
                continue
            except OSError as error:
                log.error("run %s: its old results stay for now: %s", run.facts.key.run_id, error)
            if run.quiet and run.used_us < now_us() - IDLE_S * 1e6:
                await self.retire(run)
        for connection in [link.connection for link in self._links.values() if link.connection is not None]:
            # Held since before this process, and nobody has asked for them.
            for run_id in connection.held.keys() - self._runs.keys():
                with suppress(EngineLost):
                    connection.post(CloseRun(run_id=run_id))

        for row in await self._database.read(all_runs):
            known = row.id in self._runs or row.id in self._opening or row.id in self._stopped
            if not known and (row.updated_us < old_us or not self._all_bounded):
                try:
                    await asyncio.get_running_loop().run_in_executor(self._pool, self._trim, row, old_us)
                except Corrupt as error:
                    await self._stop(row, error)
                except OSError as error:
                    log.error("run %s: its old results stay for now: %s", row.id, error)
        self._all_bounded = True

    def _trim(self, row: RunRow, old_us: int) -> None:
        directory, most_bytes = self._directory / row.id, self._bounds.most_bytes
        if row.updated_us < old_us or result_bytes(directory) > most_bytes:
            trim(directory, old_us, most_bytes)

    async def _unfinished(self, row: RunRow) -> bool:
        found = await asyncio.get_running_loop().run_in_executor(self._pool, extent, self._directory / row.id)
        return found.last_operation > max(found.last_result, row.first_seq - 1) or found.last_result > row.settled_seq

    async def _open(self, run_id: str) -> ActiveRun:
        row = await self._database.read(lambda connection: one_run(connection, None, run_id))
        try:
            run = await self._start(row)
        except Corrupt as error:
            await self._stop(row, error)
            raise Stopped(error.message) from error
        if row.state == BROKEN:
            # What was wrong is mended. An engine that holds the run since before has no reason to say so.
            await self._database.write(lambda connection: set_state(connection, row.facts.key, ACTIVE, None))
        # No await in between: a connection that begins from here on finds the run among those that it is told to.
        self._runs[run_id] = run
        link = self._links.get(row.base_hash)
        if link is not None and link.connection is not None:
            run.connected(link.connection)
        return run

    async def _stop(self, row: RunRow, error: Corrupt) -> None:
        """Remember what is wrong with its files, and say so once."""
        log.error("run %s: %s", row.id, error.message)
        await self._database.write(lambda connection: set_state(connection, row.facts.key, BROKEN, error.message))
        self._stopped[row.id] = error.message

    async def _start(self, row: RunRow) -> ActiveRun:
        def read() -> Journal:
            return Journal(self._directory / row.id, self._pool, first_seq=row.first_seq, bounds=self._bounds)

        journal = await asyncio.get_running_loop().run_in_executor(self._pool, read)
        run = ActiveRun(row.facts, journal, self._database, self._blobs, self._published, self._succeeded, self._backlog, self._patience)
        try:
            await run.start(settled=row.settled_seq)
        except BaseException:
            await run.close()
            raise
        return run

    async def _dispatch(self) -> None:
        while True:
            received = await self._inbox.get()
            try:
                await self._deliver(received)
            except Stopped:
                # An engine may hold since before the start what is now found damaged; `tidy` has it let go.
                continue
            except Exception:
                log.exception("a message of the engine of %s could not be delivered", received.connection.base_hash)
            finally:
                self._inbox.task_done()

    async def _deliver(self, received: Received) -> None:
        connection, message = received
        match message:
            case Welcome():
                link = self._links.get(connection.base_hash)
                # The conversation may have ended since: the next one is on its way.
                if link is not None and link.connection is connection:
                    for run in self._runs.values():
                        if run.facts.spec.base_hash == connection.base_hash:
                            run.connected(connection)
            case RunClosed(run_id=run_id) if run_id not in self._runs:
                connection.held.pop(run_id, None)
            case RunOpened(run_id=run_id) | OperationDone(run_id=run_id) | CheckpointWritten(run_id=run_id) | RunClosed(run_id=run_id):
                (await self.take_up(run_id)).received(connection, message)
