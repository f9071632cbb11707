"""The server of a demo: started on a directory of its own, and gone with it however the demo ends.

The directory holds a marker that the demo and the server keep locked while either lives; a server that is kept loses its marker, and its directory
is the user's from then on.
"""

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from bloomery.config.data_dir import DataDir
from bloomery.obs.lifetime import end_with
from bloomery.types.errors import Conflict, Unavailable

READY_S: Final = 900.0
"""A large model takes long to load; `up` gives up by itself much earlier when something is wrong."""
STOP_S: Final = 120.0
_POLL_S: Final = 0.1
_PREFIX: Final = "bloomery-demo-"
_MARKER: Final = "DEMO"
_UP_LOG: Final = "up.log"


class Server(NamedTuple):
    """A server that the demo started."""

    url: str
    key: str
    data_dir: Path


@contextmanager
def serving(model: str, *, keep: bool, dtype: str = "float32", options: Sequence[str] = ()) -> Iterator[Server]:
    """A server with a data directory of its own; both are gone at the end, whether that is an error, Ctrl-C, SIGTERM or SIGHUP, unless `keep`.

    `options` are others of `bloomery up`.

    Nobody can tidy up after a `kill -9`: the server stops with the demo, and the directory is left to `remove_leftovers` of the next one.
    """
    with _signals_as_exits(), ExitStack() as stack:
        place = Path(tempfile.mkdtemp(prefix=_PREFIX))
        stack.callback(_remove, place)
        marker = _mark(place)
        stack.callback(os.close, marker)
        process = _start(("--model", model, "--dtype", dtype, *options), place, marker, keep=keep)
        stack.callback(_stop, process, DataDir(place / "data"))
        yield _when_ready(process, place)
        if keep:
            (place / _MARKER).unlink()
            stack.pop_all()


def remove_leftovers(parent: Path) -> list[Path]:
    """Remove what killed demos left in `parent`; returns the directories that are gone.

    A directory is a leftover when it is named like a demo's, belongs to this user and holds a demo's marker, when nobody locks the marker (neither
    the demo nor the `up` that it started lives) and nobody locks the data directory (no process of a server lives). All else is left alone.
    """
    return [place for place in sorted(parent.glob(f"{_PREFIX}*")) if _remove_leftover(place)]


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the demo as Ctrl-C does, by an exception; what is ignored (`nohup`) stays ignored."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _mark(place: Path) -> int:
    """The marker, locked under another name first: under its own it is never seen unlocked while the demo lives."""
    fresh = place / f"{_MARKER}.new"
    marker = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(marker, fcntl.LOCK_EX)
    fresh.rename(place / _MARKER)
    return marker


def _start(options: Sequence[str], place: Path, marker: int, *, keep: bool) -> "subprocess.Popen[bytes]":

    argv = [sys.executable, "-m", "bloomery.cli.main", "up", "--data-dir", str(place / "data"), "--port", "0", *options]
    ends = None if keep else end_with(os.getpid(), signal.SIGTERM)
    with (place / _UP_LOG).open("w") as output:
        return subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=ends, pass_fds=(marker,))


def _when_ready(process: "subprocess.Popen[bytes]", place: Path) -> Server:
    """`up` says its address when it is ready, and ends with the reason when it cannot be."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        said = (place / _UP_LOG).read_text()
        if " is ready: " in said:
            url = said.partition(" is ready: ")[2].split()[0]
            return Server(url, (place / "data" / "api_key").read_text().strip(), place / "data")
        time.sleep(_POLL_S)
    raise Unavailable(f"the server did not come up; it said:\n{(place / _UP_LOG).read_text()[-2000:]}")


def _stop(process: "subprocess.Popen[bytes]", data: DataDir) -> None:
    """As `bloomery stop` does it; at once when that takes too long or a second signal arrives, for nothing here is worth keeping."""
    process.terminate()
    try:
        process.wait(STOP_S)
    finally:
        process.kill()
        process.wait()
        _forget(data)


def _forget(data: DataDir) -> None:
    """Wait until the last process of its server is gone, and remove what that kept elsewhere; Conflict while a server lives."""
    from bloomery.up.lock import locked
    from bloomery.up.start import remove_runtime_dir

    if data.root.is_dir():
        with locked(data) as lock:
            remove_runtime_dir(lock)


def _remove_leftover(place: Path) -> bool:
    try:
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        with (place / _MARKER).open("r+b") as marker:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _forget(DataDir(place / "data"))
            _remove(place)
    except (FileNotFoundError, BlockingIOError, Conflict):
        # No demo's, or removed by another one just now; held by a demo; held by a server.
        return False
    return True


def _remove(place: Path) -> None:
    """The marker goes last, so that what is left of a removal that was killed is still known as a demo's."""
    shutil.rmtree(place / "data", ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
