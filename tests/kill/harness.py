"""The workload's process, started and read by the tests of this folder, and deaths while it has operations in flight.

It runs apart (`python -m tests.kill.workload`), so that a reference and a disturbed run have nothing in common but the operations they submit.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.live import LiveServer
from tests.tinker.tenants import MODEL

WORK_S: Final = 240.0
_POLL_S: Final = 0.001


class Outcome(NamedTuple):
    """Of one workload."""

    diary: list[dict[str, Any]]
    reports: list[dict[str, Any]]


def start_workload(to: LiveServer, tenants: int = 1, *, poisoned: int | None = None) -> "subprocess.Popen[str]":
    """Submit the operations from another process; `finish` reads what came of them."""
    argv = [sys.executable, "-m", "tests.kill.workload", to.url, to.key, str(tenants), *([] if poisoned is None else [str(poisoned)])]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def finish(workload: "subprocess.Popen[str]", meanwhile: Callable[[list[dict[str, Any]]], None] = lambda diary: None) -> Outcome:
    """What the workload wrote down, and what came of it: of every tenant each result and the final weights hash.

    `meanwhile` is told the diary so far whenever a line was added.
    """
    late = threading.Timer(WORK_S, workload.kill)
    late.start()
    lines: list[Any] = []
    try:
        with workload:
            assert workload.stdout is not None
            for line in workload.stdout:
                lines.append(json.loads(line))
                if isinstance(lines[-1], dict):
                    meanwhile(lines)
    finally:
        late.cancel()
    assert workload.returncode == 0, lines
    *diary, reports = lines
    return Outcome(diary, reports)


def in_flight(diary: Iterable[dict[str, Any]], moment: float) -> set[tuple[int, int]]:
    """Tenants and numbers of the operations that were submitted then and had no result."""
    before: dict[str, set[tuple[int, int]]] = {"submitted": set(), "done": set()}
    for line in diary:
        for what, operations in before.items():
            if what in line and line["at"] <= moment:
                operations.add((line["tenant"], line[what]))
    return before["submitted"] - before["done"]


def assert_struck(diary: Iterable[dict[str, Any]], moment: float, what: str) -> None:
    """Operations of several tenants were in flight at that moment."""
    tenants = {tenant for tenant, _ in in_flight(diary, moment)}
    assert len(tenants) > 1, f"{what} came while operations of {len(tenants)} tenants were in flight"


def strike(server: LiveServer, victims: Sequence[str]) -> float:
    """SIGKILL all of these, which must be alive; when that was."""
    pids = server.pids()
    moment = time.time()
    for victim in victims:
        os.kill(pids[victim if victim == "api" else f"{victim}-{MODEL}"], signal.SIGKILL)
    return moment


class Companion(threading.Thread):
    """Kills another process as soon as one died at its failpoint: with `join`, whatever went wrong is raised."""

    def __init__(self, server: LiveServer, marker: Path, victim: str) -> None:
        super().__init__(daemon=True)
        self._server, self._marker, self._victim = server, marker, victim
        self._gave_up = threading.Event()
        self._error: BaseException | None = None
        self.struck_at: float | None = None

    def run(self) -> None:
        """Wait for the marker."""
        while not self._marker.exists():
            if self._gave_up.wait(_POLL_S):
                return
        try:
            self.struck_at = strike(self._server, [self._victim])
        except BaseException as error:
            self._error = error

    def end(self) -> None:
        """The workload is over."""
        self._gave_up.set()
        self.join()
        if self._error is not None:
            raise self._error


class RandomStrikes:
    """Kills at random moments, one after the other; the next comes when all is done that was in flight at the one before.

    So no operation dies twice, which would fail it.
    """

    def __init__(self, server: LiveServer, chance: random.Random, victims: Sequence[Sequence[str]], windows: Sequence[range]) -> None:
        """After how many results each comes is drawn from its window, and so is the moment after that."""
        self._server = server
        self._plan = [(chance.choice(window), chance.uniform(0, 0.02), who) for window, who in zip(windows, victims, strict=True)]
        self.moments: list[float] = []

    def __str__(self) -> str:
        return "; ".join(f"{'+'.join(who)} {after_s * 1000:.1f} ms after result {results}" for results, after_s, who in self._plan)

    def look(self, diary: list[dict[str, Any]]) -> None:
        """Strike if it is time to."""
        if len(self.moments) == len(self._plan):
            return
        results, after_s, victims = self._plan[len(self.moments)]
        done = {(line["tenant"], line["done"]) for line in diary if "done" in line}
        last = self.moments[-1] if self.moments else 0.0
        if len(done) >= results and diary[-1]["at"] > last and in_flight(diary, last) <= done:
            time.sleep(after_s)
            self.moments.append(strike(self._server, victims))
