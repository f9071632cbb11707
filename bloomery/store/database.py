"""The database: many readers, one writer.

`write` hands a function to the writer thread, which runs all that wait in one transaction, each behind its own savepoint: they share one
fsync and fail alone. `read` runs a function on a pooled read-only connection. Functions get a SQLAlchemy connection and never keep it.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import OperationalError

from bloomery.obs.failpoints import failpoint
from bloomery.store.migrations import migrate
from bloomery.types.errors import Unavailable

T = TypeVar("T")

WAITING_WRITES: Final = 1024
"""Callers beyond these wait in line for a place in the queue."""
GROUP: Final = 256
READERS: Final = 4
BUSY_MS: Final = 10_000


class Database:
    """One SQLite file in WAL mode, at the newest schema; close it by leaving the `with`."""

    def __init__(self, path: Path) -> None:
        self._stack = ExitStack()
        self._writer = self._open(path, "BEGIN IMMEDIATE")
        self._reader = self._open(path, "BEGIN", "PRAGMA query_only = ON")
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._places = asyncio.Semaphore(WAITING_WRITES)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="db-read")
        self._thread = threading.Thread(target=self._write_groups, name="db-write", daemon=True)
        self._closed = False

    def __enter__(self) -> Self:
        with self._writer.begin() as connection:
            migrate(connection)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._readers.shutdown()
        self._stack.close()

    async def write(self, change: Callable[[Connection], T]) -> T:
        """Commit a change; durable when this returns. An exception in `change` undoes it and comes out here."""
        async with self._places:
            if self._closed:
                raise Unavailable("the database is closed: the server is stopping")
            future: Future[T] = Future()
            self._queue.put(_Write(change, future))
            try:
                return await asyncio.wrap_future(future)
            except OperationalError as error:
                # SQLite undoes the whole group when the disk is full, and what is reported then may be about a savepoint that is gone.
                raise Unavailable(f"the database cannot be written ({error.orig}): is the disk full?") from error

    async def read(self, look: Callable[[Connection], T]) -> T:
        """Run a query against a consistent snapshot."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._look, look)

    def _look(self, look: Callable[[Connection], T]) -> T:
        with self._reader.begin() as connection:
            return look(connection)

    def _write_groups(self) -> None:
        while (first := self._queue.get()) is not None:
            group = [first]
            while len(group) < GROUP and not self._queue.empty():
                follower = self._queue.get()
                if follower is None:
                    self._queue.put(None)
                    break
                group.append(follower)
            self._commit([write for write in group if write.future.set_running_or_notify_cancel()])

    def _commit(self, group: list["_Write"]) -> None:
        """One transaction; whatever goes wrong belongs to whoever waits for the write, never to this thread."""
        outcomes: list[tuple[_Write, Any, Exception | None]] = []
        try:
            with self._writer.begin() as connection:
                outcomes = [_apply(connection, write) for write in group]
            failpoint("store.row.committed")
        except Exception as error:
            outcomes = [(write, None, error) for write in group]
        for write, value, problem in outcomes:
            if problem is not None:
                write.future.set_exception(problem)
            else:
                write.future.set_result(value)

    def _open(self, path: Path, begin: str, *pragmas: str) -> Engine:
        engine = create_engine(f"sqlite:///{path}", pool_size=READERS, connect_args={"timeout": BUSY_MS / 1000, "check_same_thread": False})
        self._stack.callback(engine.dispose)

        @event.listens_for(engine, "connect")
        def connected(connection: Any, _: Any) -> None:
            # The driver's own BEGIN comes too late for savepoints and for reads; ours is below.
            connection.isolation_level = None
            # FULL: a commit survives a power cut, like the journal.
            for pragma in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", *pragmas):
                connection.execute(pragma).close()

        @event.listens_for(engine, "begin")
        def began(connection: Connection) -> None:
            connection.exec_driver_sql(begin)

        return engine


class _Write(NamedTuple):
    change: Callable[[Connection], Any]
    future: "Future[Any]"


def _apply(connection: Connection, write: _Write) -> tuple[_Write, Any, Exception | None]:
    try:
        with connection.begin_nested():
            return write, write.change(connection), None
    except Exception as error:
        return write, None, error
