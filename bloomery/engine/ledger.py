"""What an engine is executing, written where the next engine finds it: an operation that kills its process must not do so for ever.

Whatever was in hand when a process died is suspected by the next one and executed without company; what kills again is not tried a third time.
The file holds a checksum line and JSON. It outlives a process, not a power cut, which is no operation's fault.

Where it cannot be written, the disk full say, the engine works on: until a later write succeeds nobody is accused of a death. An engine that did not
work would keep every run from training, which is more than a killer can do.
"""

import errno
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

log = logging.getLogger(__name__)

MAX_DEATHS: Final = 2
MAX_REPLAY_DEATHS: Final = 5
"""An operation whose result is known was harmless once, and giving it up costs the run: only a death that comes every time counts."""
CHECKPOINT: Final = "checkpoint"
"""What is in hand of a run while its state is made durable. Without a number: behind which operation that happens depends on the clock."""


class InHand(NamedTuple):
    """What is done with a run: `at` is the number of an operation, the key of the checkpoint that the run is opened from, or `CHECKPOINT`."""

    run_id: str
    at: int | str


class Ledger:
    """Deaths by operation. One process writes it at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        deaths, in_hand = _parse(self._read())
        self._deaths = deaths | {operation: deaths.get(operation, 0) + 1 for operation in in_hand}
        self._in_hand: tuple[InHand, ...] = ()
        self._written: tuple[InHand, ...] | None = None
        """What the file says: what has a result since is still in it, until something else is entered. None while it says nothing."""
        self._problem: OSError | None = None
        """Why it cannot be written."""
        self._write()

    def enter(self, operations: Iterable[InHand]) -> None:
        """These are executed from now on, and no others."""
        self._in_hand = tuple(operations)
        if self._in_hand != self._written:
            self._write()

    @contextmanager
    def instead(self, operation: InHand) -> Iterator[None]:
        """This is done meanwhile, and nothing else that is in hand."""
        before = self._in_hand
        self.enter([operation])
        try:
            yield
        finally:
            self.enter(before)

    def survived(self, operation: InHand) -> None:
        """It has a result: what died with it before is not its fault."""
        self._in_hand = tuple(other for other in self._in_hand if other != operation)
        if self._deaths.pop(operation, None) is not None:
            self._write()

    def suspects(self, operation: InHand) -> bool:
        """Whether a process died in it."""
        return operation in self._deaths

    def condemns(self, operation: InHand, *, replay: bool) -> bool:
        """Whether so many died in it that it must not be tried again."""
        return self._deaths.get(operation, 0) >= (MAX_REPLAY_DEATHS if replay else MAX_DEATHS)

    def close(self) -> None:
        """A clean end: nothing is in hand, and who starts the engine again has mended what killed it."""
        self._deaths = {}
        self._in_hand = ()
        self._write()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            log.error("%s cannot be read (%s): what an earlier engine died of is not known", self._path, error)
            return b""

    def _write(self) -> None:
        """Say it in the file; where that fails, the next turn tries again."""
        deaths = [[*operation, count] for operation, count in self._deaths.items()]
        body = json.dumps({"in_hand": self._in_hand, "deaths": deaths}).encode()
        try:
            self._put(b"%08x\n%s" % (zlib.crc32(body), body))
        except OSError as error:
            self._written = None
            self._forget_what_is_there()
            if self._problem is None:
                what = "an operation that kills its engine would be tried again without end until it can. Training goes on; make room on the disk"
                log.error("%s cannot be written (%s): %s", self._path, error, what)
            self._problem = error
            return
        if self._problem is not None:
            # The log may lie on the same disk: whoever reads it later is to learn of it all the same.
            log.warning("%s can be written again (before: %s); what engines died of meanwhile is not known", self._path, self._problem)
        self._problem, self._written = None, self._in_hand

    def _put(self, data: bytes) -> None:
        if self._file is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        # The length first: whoever reads after a death between the two calls sees a checksum that does not match, and suspects nobody.
        os.ftruncate(self._file, len(data))
        if os.pwrite(self._file, data, 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _forget_what_is_there(self) -> None:
        """Of an older turn it may be, which is not to be accused of what happens now. One byte keeps the file its place on a full disk."""
        with suppress(OSError):
            if self._file is not None:
                os.ftruncate(self._file, 1)


def _parse(data: bytes) -> tuple[dict[InHand, int], tuple[InHand, ...]]:
    checksum, _, body = data.partition(b"\n")
    if checksum != b"%08x" % zlib.crc32(body) or not body:
        return {}, ()
    content = json.loads(body)
    deaths = {InHand(run_id, at): count for run_id, at, count in content["deaths"]}
    return deaths, tuple(InHand(*operation) for operation in content["in_hand"])
