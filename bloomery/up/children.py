"""One process that must be running: how it is started, and when it is started again."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from bloomery.obs.lifetime import end_with
from bloomery.obs.logs import LOG_FILE_BYTES
from bloomery.types.ids import now_us
from bloomery.up.cores import Placement

log = logging.getLogger(__name__)

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 10.0
SETTLED_S: Final = 30.0
"""A child that was ready for so long lives: whatever ends it then has nothing to do with how its lives before ended."""
MAX_UNREADY_DEATHS: Final = 5
"""A child that dies this often before it listens, or is ready where it listens nowhere, will not get better by itself."""

REPLICA: Final = "replica-"
"""Names of replicas that serve begin with it."""
ROLLOUTS: Final = "rollouts-"
"""Names of replicas for rollouts do."""

RUNNER: Final = "jobs"
"""The name of the runner of jobs."""

_LONGEST_WORDS: Final = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What to run; `socket` is removed before each start, for a dead process leaves it behind."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    socket: Path | None = None
    inherit: tuple[int, ...] = ()
    """File descriptors that stay open in the child."""


class State(StrEnum):
    """How a child is, as `bloomery status` says it."""

    STARTING = "starting"
    """Its first life, and not ready yet."""
    READY = "ready"
    RESTARTING = "restarting"
    """It died, and is not ready again."""
    NOT_READY = "not ready"
    """It lives and was ready; whoever asks it gets no answer, or the api that would know does not answer."""


class Child:
    """A program with its process and its history."""

    def __init__(self, program: Program, *, settled_s: float = SETTLED_S) -> None:
        self.program, self._settled_s = program, settled_s
        self.restarts = 0
        self.short_lives = 0
        """In a row, counted as they end; one in which it settled ends the row."""
        self.stillbirths = 0
        """Those in a row before it even listened. What kills one that listens came from outside, and an engine's ledger ends that."""
        self.state = State.STARTING
        self.since_us = now_us()
        """When `state` began."""
        self.died: str | None = None
        """How its last life ended, once one did."""
        self.delay_s = 0.0
        """From there to its next life, as it was decided then."""
        self._begun = False
        self._ready_at_s: float | None = None
        """When this life was ready first."""
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at_s = 0.0
        self._placement = Placement()

    @property
    def name(self) -> str:
        """The program's."""
        return self.program.name

    @property
    def pid(self) -> int | None:
        """Of the running process; None between two lives."""
        return self._process.pid if self._process else None

    @property
    def ready(self) -> bool:
        """Whether it does its work."""
        return self.state is State.READY

    def note_ready(self, ready: bool) -> None:
        """What a look at a living child showed."""
        if ready and not self.ready:
            self.stillbirths = 0
            self._ready_at_s = self._ready_at_s or time.monotonic()
            self._to(State.READY)
            self.put(self._placement)
        elif self.ready and not ready:
            self._to(State.NOT_READY)

    @property
    def hopeless(self) -> bool:
        """Whether starting it once more is pointless."""
        return self.stillbirths >= MAX_UNREADY_DEATHS

    def start(self) -> None:
        """Begin a life."""
        program, self._begun, self._ready_at_s = self.program, True, None
        if program.socket:
            program.socket.unlink(missing_ok=True)
        with program.log.open("ab") as said:
            self._process = subprocess.Popen(
                program.argv,
                env=dict(program.env),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=program.inherit,
                # Ctrl-C in a terminal reaches its whole process group, and these stop in an order.
                process_group=0,
                preexec_fn=_before_the_program(end_with(os.getpid(), signal.SIGKILL), self._placement.cores),
            )

    def put(self, placement: Placement) -> None:
        """Run there from now on, in this life and in those after it; it yields once it is ready, so that a restart under load is short."""
        self._placement = placement
        if self._process is None or sys.platform != "linux":
            return
        # Threads that end meanwhile, or the whole process, need no place.
        with suppress(FileNotFoundError):
            for task in Path(f"/proc/{self._process.pid}/task").iterdir():
                with suppress(ProcessLookupError):
                    _put(int(task.name), placement.cores, placement.niceness if self.ready else 0)

    @property
    def begun(self) -> bool:
        """Whether it was ever started."""
        return self._begun

    def reap(self) -> int | None:
        """The exit status when the process has died since the last look; decides when the next one starts."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        listened = self.program.socket is not None and self.program.socket.exists()
        if not self.ready:
            self.stillbirths = 0 if listened else self.stillbirths + 1
        self.died = describe_exit(status) + (f": {words}" if (words := self.last_words(status)) else "")
        now_s = time.monotonic()
        if self._ready_at_s is not None and now_s - self._ready_at_s >= self._settled_s:
            self.short_lives = 0
        self.delay_s = restart_delay_s(self.short_lives)
        self._start_at_s = now_s + self.delay_s
        self.short_lives += 1
        self._process = None
        self._to(State.RESTARTING)
        return status

    @property
    def starts_in_s(self) -> float | None:
        """Until its next life begins; None while it lives, and before its first."""
        return max(0.0, self._start_at_s - time.monotonic()) if self._begun and self._process is None else None

    def last_words(self, status: int) -> str:
        """Those of a process that ended so, as far as it had any."""
        return "" if status == -signal.SIGKILL else self.log_tail(1)[:_LONGEST_WORDS]

    def start_when_due(self) -> bool:
        """Begin the next life if there is none and its time has come."""
        if self._process is not None or time.monotonic() < self._start_at_s:
            return False
        try:
            self.start()
        except OSError as error:
            # No memory or no process may be had just now.
            log.warning("%s cannot be started, and is tried again in %.0f s: %s", self.name, LONGEST_DELAY_S, error)
            self.died = f"cannot be started: {error}"
            self._start_at_s = time.monotonic() + LONGEST_DELAY_S
            return False
        self.restarts += 1
        return True

    def _to(self, state: State) -> None:
        if state is not self.state:
            self.state, self.since_us = state, now_us()

    def signal(self, number: int) -> None:
        """Tell the process, if there is one."""
        if self._process is not None:
            self._process.send_signal(number)

    def rotate_log(self) -> None:
        """Move a long log aside; the process holds the file open for appending, so it is emptied in place."""
        full = self.program.log
        if full.exists() and full.stat().st_size > LOG_FILE_BYTES:
            aside = full.with_name(full.name + ".1")
            try:
                aside.write_bytes(full.read_bytes())
            except OSError:
                # Half a copy helps nobody, and its room may be what others lack.
                aside.unlink(missing_ok=True)
                raise
            os.truncate(full, 0)

    def log_tail(self, lines: int = 15) -> str:
        """The end of what it said."""
        text = self.program.log.read_text(errors="replace") if self.program.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


def restart_delay_s(short_lives: int) -> float:
    """At once after a life that was no short one, twice as long after each that was."""
    # Past a thousand in a row the power is no float.
    return min(FIRST_DELAY_S * 2.0 ** min(short_lives, 100), LONGEST_DELAY_S)


def describe_exit(status: int) -> str:
    """An exit status in words."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def _before_the_program(arrange: Callable[[], None] | None, cores: frozenset[int] | None) -> Callable[[], None] | None:
    if arrange is None:
        return None

    def prepare() -> None:
        arrange()
        _put(0, cores)

    return prepare


def _put(thread: int, cores: frozenset[int] | None, niceness: int = 0) -> None:
    """Place one thread; 0 is the calling one, and threads that it starts follow it."""
    if cores is not None:
        os.sched_setaffinity(thread, cores)
    # Never back: that takes rights which a user's process lacks.
    if niceness > os.getpriority(os.PRIO_PROCESS, thread):
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
