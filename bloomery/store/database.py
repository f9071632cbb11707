"""The database: many readers, one writer.

`write` hands a function to the writer thread, which runs all that wait in one transaction, each of several behind its own savepoint: they
share one fsync and fail alone. `read` runs a function on a pooled read-only connection. Functions get a SQLAlchemy connection and never keep it.

Who watches hears behind each commit which tables it changed.

Nobody waits longer than `PATIENCE_S` for his turn. Who has it waits `BUSY_MS` for other processes, and then as long as the work takes: of a change
that was begun nobody can say that it was not made.
"""

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

from sqlalchemy import Connection, Engine, TableClause, create_engine, event
from sqlalchemy.exc import DatabaseError
from sqlalchemy.sql.dml import UpdateBase

from bloomery.obs.failpoints import failpoint
from bloomery.store.migrations import migrate
from bloomery.types.errors import BloomeryError, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

WAITING_WRITES: Final = 1024
"""Callers beyond these wait in line for a place in the queue."""
GROUP: Final = 256
READERS: Final = 4
BUSY_MS: Final = 10_000
PATIENCE_S: Final = 60.0
_MEANINGS: Final[Mapping[int, tuple[type[BloomeryError], str]]] = {
    sqlite3.SQLITE_FULL: (Unavailable, "cannot be written ({}): is the disk full?"),
    sqlite3.SQLITE_IOERR: (Unavailable, "cannot be read or written ({}): is the disk full, or does it fail?"),
    sqlite3.SQLITE_BUSY: (Unavailable, "is held by another process ({}): only the server may have it open, end whoever else has"),
    sqlite3.SQLITE_LOCKED: (Unavailable, "is held by another process ({}): only the server may have it open, end whoever else has"),
    sqlite3.SQLITE_READONLY: (Unavailable, "may not be written ({}): give the server's user the right to"),
    sqlite3.SQLITE_CANTOPEN: (Unavailable, "cannot be opened ({}): give the server's user the right to, and room for more open files"),
    sqlite3.SQLITE_CORRUPT: (BloomeryError, "is damaged ({}): stop the server and restore a backup"),
    sqlite3.SQLITE_NOTADB: (BloomeryError, "is damaged ({}): stop the server and restore a backup"),
}
"""What a primary result code of SQLite says of the file; all others are errors of ours.

Damage is not `Corrupt`, which stops the run that meets it for good.
"""
_PRIMARY: Final = 0xFF


class Database:
    """One SQLite file in WAL mode, at the newest schema; close it by leaving the `with`."""

    def __init__(self, path: Path, *, patience_s: float = PATIENCE_S) -> None:
        self._file, self._patience_s = path.name, patience_s
        self._stack = ExitStack()
        self._touched: set[str] = set()
        """Tables that the transaction of now changes."""
        self._watcher: Callable[[frozenset[str]], None] | None = None
        self._writer = self._open(path, "BEGIN IMMEDIATE")
        event.listen(self._writer, "before_execute", self._note_table)
        self._reader = self._open(path, "BEGIN", "PRAGMA query_only = ON")
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._places = asyncio.Semaphore(WAITING_WRITES)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="db-read")
        self._thread = threading.Thread(target=self._write_groups, name="db-write", daemon=True)
        self._closed = False
        self._at_hand: _Begun | None = None

    def __enter__(self) -> Self:
        with _told(self._file), self._writer.begin() as connection:
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
        until_s = asyncio.get_running_loop().time() + self._patience_s
        try:
            async with asyncio.timeout_at(until_s):
                await self._places.acquire()
        except TimeoutError:
            raise self._late("takes no more changes") from None
        try:
            if self._closed:
                raise Unavailable("the database is closed: the server is stopping")
            future: Future[T] = Future()
            self._queue.put(_Write(change, future))
            return await self._outcome(future, until_s, "did not begin this change")
        finally:
            self._places.release()

    async def read(self, look: Callable[[Connection], T]) -> T:
        """Run a query against a consistent snapshot."""
        until_s = asyncio.get_running_loop().time() + self._patience_s
        return await self._outcome(self._readers.submit(self._look, look), until_s, f"did not begin this query, as {READERS} others take long")

    @contextmanager
    def watched(self, watcher: Callable[[frozenset[str]], None]) -> Iterator[None]:
        """Until left, have the writer's thread call this behind each commit with the names of the tables that it changed. There is one at a time.

        Of a change that failed beside others that did not, tables may be named, too.
        """
        self._watcher = watcher
        try:
            yield
        finally:
            self._watcher = None

    async def _outcome(self, future: "Future[T]", until_s: float, problem: str) -> T:
        """What comes of it, if it is begun until then."""
        withdrawn = False

        def withdraw() -> None:
            nonlocal withdrawn
            withdrawn = future.cancel()

        late = asyncio.get_running_loop().call_at(until_s, withdraw)
        try:
            with _told(self._file):
                return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if withdrawn and task is not None and not task.cancelling():
                raise self._late(problem) from None
            raise
        finally:
            late.cancel()

    def _late(self, problem: str) -> Unavailable:
        begun = self._at_hand
        writer = "" if begun is None else f"; its writer has been at `{begun.what}` for {time.monotonic() - begun.at_s:.0f} s"
        return Unavailable(f"the database `{self._file}` {problem} within {self._patience_s:g} s{writer}: is its disk slow?")

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
        self._touched.clear()
        try:
            with self._writer.begin() as connection:
                for write in group:
                    self._at_hand = _Begun(write.change.__qualname__.partition(".<locals>")[0], time.monotonic())
                    # Who is alone needs no savepoint: what undoes it is the transaction.
                    outcomes.append(_apply(connection, write) if len(group) > 1 else (write, write.change(connection), None))
            failpoint("store.row.committed")
        except Exception as error:
            outcomes = [(write, None, error) for write in group]
            self._touched.clear()
        self._at_hand = None
        if self._touched and (watcher := self._watcher) is not None:
            try:
                watcher(frozenset(self._touched))
            except Exception:
                # Whoever waits for a write is answered, whatever becomes of those who watch.
                log.exception("who watches cannot be told what was written")
        for write, value, problem in outcomes:
            if problem is not None:
                write.future.set_exception(problem)
            else:
                write.future.set_result(value)

    def _note_table(self, _connection: Connection, statement: Any, *_: Any) -> None:
        if isinstance(statement, UpdateBase) and isinstance(statement.table, TableClause):
            self._touched.add(statement.table.name)

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


class _Begun(NamedTuple):
    """What the writer is at, and since when."""

    what: str
    at_s: float


def _apply(connection: Connection, write: _Write) -> tuple[_Write, Any, Exception | None]:
    try:
        with connection.begin_nested():
            return write, write.change(connection), None
    except Exception as error:
        if not connection.connection.dbapi_connection.in_transaction:  # type: ignore[union-attr]
            # SQLite undoes the whole group when the disk is full; what came behind would be stored, and its caller told that it was not.
            raise
        return write, None, error


@contextmanager
def _told(file: str) -> Iterator[None]:
    """What is wrong with the file, rather than with what was asked of it, is told as what it is."""
    try:
        yield
    except DatabaseError as error:
        meant = next((found for found in map(_meaning, _and_before(error)) if found is not None), None)
        if meant is None:
            raise
        kind, problem = meant
        raise kind(f"the database `{file}` {problem}") from error


def _and_before(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came of: of a full disk the last one says that a savepoint is gone."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _meaning(error: BaseException) -> tuple[type[BloomeryError], str] | None:
    code = getattr(error, "sqlite_errorcode", None)
    found = None if code is None else _MEANINGS.get(code & _PRIMARY)
    return None if found is None else (found[0], found[1].format(error))
