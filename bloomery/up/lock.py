"""One server per data directory: a lock that the supervisor takes and its children inherit, so it is free only when all of them are gone."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Final, Self

from bloomery.config.data_dir import DataDir
from bloomery.types.errors import Conflict
from bloomery.up.hints import command

# Children of a killed supervisor are gone within moments, and a new holder writes its name within moments.
_PATIENCE_S: Final = 3.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Who holds the data directory, as the lock file says."""

    pid: int
    host: str
    port: int
    started_us: int
    runtime_dir: str
    """Private directory with the sockets and configs of the children."""

    @property
    def url(self) -> str:
        """Where its api listens."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The holder written in a lock file; None while it is being written."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class Lock:
    """The lock while it is held; `previous` is the holder before, when it did not release it."""

    fd: int
    previous: Holder | None

    def announce(self, holder: Holder) -> None:
        """Write who holds it."""
        text = json.dumps(asdict(holder)).encode()
        os.pwrite(self.fd, text, 0)
        os.ftruncate(self.fd, len(text))

    def clear(self) -> None:
        """Forget the holder: a clean stop leaves nothing for the next start to tidy up."""
        os.ftruncate(self.fd, 0)


@contextmanager
def locked(data: DataDir) -> Iterator[Lock]:
    """Hold the data directory; Conflict names who holds it already."""
    fd = os.open(data.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(fd, data, fcntl.LOCK_EX)
        yield Lock(fd, Holder.parse(data.lock.read_text()))
    finally:
        os.close(fd)


def check_free(data: DataDir) -> None:
    """Say who holds the data directory, as `locked` does, without taking or making anything."""
    if not data.lock.exists():
        return
    fd = os.open(data.lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A shared lock conflicts with the supervisor's and not with another reader's.
        _take(fd, data, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def holder(data: DataDir) -> Holder | None:
    """The running supervisor of this data directory, or None."""
    if not data.lock.exists():
        return None
    fd = os.open(data.lock, os.O_RDONLY | os.O_CLOEXEC)
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while not _try_lock(fd, fcntl.LOCK_SH):
            if found := Holder.parse(data.lock.read_text()):
                return found
            _sleep_until(deadline, data)
        return None
    finally:
        os.close(fd)


def _take(fd: int, data: DataDir, mode: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not _try_lock(fd, mode):
        found = Holder.parse(data.lock.read_text())
        if found and _alive(found.pid):
            hint = f"stop it with `{command('stop', data)}`, or use another --data-dir"
            raise Conflict(f"{data.root} is in use by process {found.pid}, which serves {found.url}: {hint}")
        _sleep_until(deadline, data)


def _try_lock(fd: int, mode: int) -> bool:
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sleep_until(deadline: float, data: DataDir) -> None:
    if time.monotonic() > deadline:
        raise Conflict(f"{data.root} is in use by a server that is starting or stopping: try again in a moment")
    time.sleep(_POLL_S)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
