"""The running server seen from outside: who holds the data directory, how its processes are, what they said, and the request to stop."""

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from bloomery.config import stopping
from bloomery.config.data_dir import DataDir
from bloomery.types.errors import NotFound, Unavailable
from bloomery.up import health
from bloomery.up.children import REPLICA, ROLLOUTS, State
from bloomery.up.hints import command
from bloomery.up.lock import Holder, holder

_STOP_DEADLINE_S: Final = stopping.API_S + stopping.ENGINE_S + 10
_POLL_S: Final = 0.1
_TAIL_BYTES: Final = 256 << 10
_ELSEWHERE: Final = "name the directory of yours with --data-dir"


class Process(NamedTuple):
    """One child of the supervisor; `pid` is None between two lives, `since_us` is when its state began.

    `died` says how its last life ended, None of one in its first; `next_start_us` is when the next begins, None while it lives.
    """

    name: str
    pid: int | None
    restarts: int
    state: str
    since_us: int
    died: str | None = None
    next_start_us: int | None = None

    @property
    def ready(self) -> bool:
        """Whether it does its work."""
        return self.state == State.READY

    @property
    def is_replica(self) -> bool:
        """Whether it only samples."""
        return self.name.startswith((REPLICA, ROLLOUTS))


class Server(NamedTuple):
    """A running server; `answers` says whether its api does."""

    holder: Holder
    processes: tuple[Process, ...]
    answers: bool

    @property
    def ready(self) -> bool:
        """Whether all of it works."""
        return self.answers and all(process.ready for process in self.processes)


def running(data: DataDir) -> Holder:
    """The holder, or NotFound."""
    found = holder(data)
    if found is None:
        raise NotFound(f"no server is running on {data.root}: start one with `{command('up', data)}`, or {_ELSEWHERE}")
    return found


def status(data: DataDir) -> Server:
    """How the server is, or NotFound."""
    found = running(data)
    seen, known = health.ask(found.host, found.port), processes(data)
    if seen.answers and not seen.waiting_for:
        # The supervisor looks less often than the state changes.
        known = tuple(
            process._replace(state=State.READY) if process.pid and (not process.is_replica or process.name in seen.replicas) else process
            for process in known
        )
    return Server(found, known, seen.answers)


def processes(data: DataDir) -> tuple[Process, ...]:
    """The supervisor's children; none before it started them."""
    if not data.processes.exists():
        return ()
    return tuple(Process(**row) for row in json.loads(data.processes.read_text())["children"])


def stop(data: DataDir) -> Holder:
    """Ask the server to stop and wait until it and its children are gone."""
    found = running(data)
    with suppress(ProcessLookupError):  # it was killed just now, and its children are about to follow
        os.kill(found.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_DEADLINE_S
    while holder(data) is not None:
        if time.monotonic() > deadline:
            raise Unavailable(f"process {found.pid} is still stopping after {_STOP_DEADLINE_S:.0f} s: `kill -9 {found.pid}` is safe, nothing is lost")
        time.sleep(_POLL_S)
    return found


def log_files(data: DataDir, process: str | None) -> list[Path]:
    """The logs of all processes, or of one (`engine` means every engine)."""
    files = sorted(data.logs.glob("*.log"))
    if not files:
        raise NotFound(f"no logs in {data.logs}, so no server has run there: {_ELSEWHERE}")
    chosen = [file for file in files if process in (None, file.stem, file.stem.partition("-")[0])]
    if not chosen:
        raise NotFound(f"no log of `{process}` in {data.logs} (there are: {', '.join(file.stem for file in files)})")
    return chosen


class Tail(NamedTuple):
    """The last lines of a log, and where in the file they end."""

    lines: list[str]
    end: int


def tail(file: Path, lines: int) -> Tail:
    """The last whole lines of a log."""
    with file.open("rb") as log:
        start = max(0, file.stat().st_size - _TAIL_BYTES)
        log.seek(start)
        data = log.read()
    end = start + data.rfind(b"\n") + 1
    text = data[: end - start].decode(errors="replace")
    return Tail(text.splitlines()[-lines:] if lines else [], end)


def follow(ends: Mapping[Path, int]) -> Iterator[tuple[Path, str]]:
    """Lines behind those ends as they are written, for ever; a log that shrank was rotated and is read from its start."""
    offsets = dict(ends)
    rests = dict.fromkeys(ends, "")
    while True:
        for file in ends:
            if file.stat().st_size < offsets[file]:
                offsets[file] = 0
            with file.open("rb") as log:
                log.seek(offsets[file])
                data = log.read()
            offsets[file] += len(data)
            *whole, rests[file] = (rests[file] + data.decode(errors="replace")).split("\n")
            yield from ((file, line) for line in whole)
        time.sleep(_POLL_S * 3)
