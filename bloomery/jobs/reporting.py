"""What a job's process tells the server, from a thread of its own: that it lives, how far it is, what it measured; and what it hears in return."""

import logging
import math
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Self

from bloomery.client import Client
from bloomery.types.errors import BloomeryError, Unauthorized, shown
from bloomery.types.jobs import Job, JobPoint, JobProgress
from bloomery.types.leases import MAX_KEY, MAX_REASON, FinishJob, NewJobEvent, ReportJob, Wanted

log = logging.getLogger(__name__)

_FLUSH_S: Final = 0.5
_HEAR_S: Final = 2.0
"""How long the process of a job that has nothing to say does not hear that it is to pause or to end."""
_PER_REPORT: Final = 1000


class Steered(Exception):
    """The job is to stand still, or to end."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__(wanted)
        self.wanted = wanted


class StandsStill(Exception):
    """The job pauses by itself; the message says why."""


class LeaseLost(Exception):
    """Another process may have the job by now: nothing more is to be done here."""


class Reporter:
    """Reports while it is entered; `check` raises what it heard."""

    def __init__(self, client: Client, job: Job, lease_s: float) -> None:
        self._working, self._every_s = client.working(job.id), min(_HEAR_S, lease_s / 6)
        self._lock, self._wake, self._ended = threading.Lock(), threading.Event(), threading.Event()
        self._sending = threading.Lock()
        """One report at a time: two would send the same points, and forget those behind them."""
        self._points: list[JobPoint] = []
        self._events: list[NewJobEvent] = []
        self._run: str | None = None
        self._progress = job.progress
        self._before_s, self._started_s, self._first_step = job.progress.seconds, time.monotonic(), job.progress.step
        self._wanted: Wanted = "run"
        self._asked: Wanted = "run"
        """What `check` raised."""
        self._lost: BloomeryError | None = None
        self._thread = threading.Thread(target=self._report_now_and_then, name="reports", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._wake.set()
        self._thread.join()
        if (self._points or self._events) and self._lost is None:
            with suppress(BloomeryError):
                self._report()

    def check(self) -> None:
        """Go on, or raise why not; for good, because what it raised ends things that the job needs to go on. Whoever thought better of it has the job
        begin again when it has ended."""
        if self._lost is not None:
            raise LeaseLost(self._lost.message)
        if self._wanted != "run":
            self._asked = self._wanted
        if self._asked != "run":
            raise Steered(self._asked)

    def began(self, run: str) -> None:
        """The job's run is there."""
        with self._lock:
            self._run = run
        self._wake.set()

    def note(self, message: str, *, level: Any = "info", key: str | None = None, **data: Any) -> None:
        """Something happened; of one `key` it is noted once, however often a process begins again. What is too long is cut."""
        event = NewJobEvent(level=level, message=shown(message, MAX_REASON), data=data, key=None if key is None else key[:MAX_KEY])
        with self._lock:
            self._events.append(event)

    def point(self, step: int, steps: int, values: Mapping[str, float], *, tokens: int = 0) -> None:
        """What was measured at a step; `check`s."""
        with self._lock:
            self._points.append(JobPoint(step=step, values=_finite(values)))
            self._progress = self._advanced(step, steps, tokens)
        self.check()

    def also(self, step: int, values: Mapping[str, float]) -> None:
        """What was measured of a step that training has left behind."""
        with self._lock:
            self._points.append(JobPoint(step=step, values=_finite(values)))

    def keep_cursor(self, text: str, run: str) -> None:
        """On the server's disk when this returns, with all that was said before: whoever goes on from there finds nothing missing."""
        self.check()
        with self._lock:
            self._run = run
        while len(self._points) > _PER_REPORT or len(self._events) > _PER_REPORT:
            self._report()
        self._report(cursor=text)

    def finish(self, said: FinishJob) -> None:
        """The last word, behind everything else."""
        self._ended.set()
        self._wake.set()
        self._thread.join()
        while self._points or self._events:
            self._report()
        self._working.finish(said)

    def _advanced(self, step: int, steps: int, tokens: int) -> JobProgress:
        here_s = time.monotonic() - self._started_s
        new = step - self._first_step
        remaining_s = here_s / new * (steps - step) if new > 0 else None
        counted = max(self._progress.tokens, tokens)
        return JobProgress(
            step=max(step, self._progress.step), steps=steps, tokens=counted, seconds=round(self._before_s + here_s, 3), remaining_s=remaining_s
        )

    def _report_now_and_then(self) -> None:
        last_s = 0.0
        while not self._ended.is_set():
            self._wake.wait(_FLUSH_S)
            self._wake.clear()
            if self._points or self._events or time.monotonic() - last_s > self._every_s:
                try:
                    self._report()
                except BloomeryError as error:
                    log.warning("the server does not take a report: %s", error.message)
                    if error.category == "user" or isinstance(error, Unauthorized):
                        self._lost = error
                        return
                last_s = time.monotonic()

    def _report(self, cursor: str | None = None) -> None:
        with self._sending:
            with self._lock:
                points, events = self._points[:_PER_REPORT], self._events[:_PER_REPORT]
                said = ReportJob(run=self._run, progress=self._progress, cursor=cursor, points=points, events=events)
            self._wanted = self._working.report(said).wanted
            with self._lock:
                del self._points[: len(points)], self._events[: len(events)]


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
