"""The workload's process, started and read by the tests of this folder, and deaths while it has operations in flight.

It runs apart (`python -m tests.kill.workload`), so that a reference and a disturbed run have nothing in common but the operations they submit.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import httpx

from bloomery.client import Client
from tests.live import LiveServer, alive, wait_until
from tests.tinker.tenants import MODEL

WORK_S: Final = 600.0
FIRST_RESULTS: Final = 4
"""Before the first strike at a point: a run whose first operations die has nothing behind it yet."""
TOO_EARLY: Final = 1000
"""Number of an operation that no workload comes to."""
_POLL_S: Final = 0.001


class Outcome(NamedTuple):
    """Of one workload."""

    diary: list[dict[str, Any]]
    reports: list[dict[str, Any]]


def start_workload(to: LiveServer, tenants: int = 1, *, poisoned: int | None = None, until: Path | None = None) -> "subprocess.Popen[str]":
    """Submit the operations from another process, and more of them until that file is there; `finish` reads what came of them."""
    options = {"--poisoned": poisoned, "--until": until}
    given = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
    argv = [sys.executable, "-m", "tests.kill.workload", to.url, to.key, str(tenants), *given]
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


def at_work(diary: Iterable[dict[str, Any]]) -> set[int]:
    """Tenants that have operations in flight, as far as the diary is known."""
    return {tenant for tenant, _ in in_flight(diary, time.time())}


def assert_struck(diary: Iterable[dict[str, Any]], moment: float, what: str) -> None:
    """Operations of several tenants were in flight at that moment."""
    tenants = {tenant for tenant, _ in in_flight(diary, moment)}
    assert len(tenants) > 1, f"{what} came while operations of {len(tenants)} tenants were in flight"


def processes(data_dir: Path) -> dict[str, int]:
    """Ids of what runs there, the engine's under `engine`; a process that has just started may be missing."""
    try:
        children = json.loads((data_dir / "processes.json").read_text())["children"]
    except FileNotFoundError:
        return {}
    return {row["name"].removesuffix(f"-{MODEL}"): row["pid"] for row in children if row["pid"] is not None}


def all_alive(pids: Mapping[str, int], names: Iterable[str]) -> bool:
    """Whether each of them runs."""
    return all(name in pids and alive(pids[name]) for name in names)


def strike(data_dir: Path, victims: Sequence[str]) -> float:
    """SIGKILL all of these, which must be alive; when that was."""
    pids = processes(data_dir)
    assert all_alive(pids, victims), f"of {victims} somebody was dead already"
    moment = time.time()
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)
    return moment


def all_struck(data_dir: Path) -> Path:
    """The file that says that nobody is to die any more, for a workload to go on until then."""
    return data_dir.with_name("all-struck")


class Stops(threading.Thread):
    """Strikes while a process stands at its point: the failpoints of the environment raise SIGSTOP there, in every life and each time.

    Whoever stands is let go at once unless a strike is due, which kills its victims first: the one that stands, the other one, or both. Enter it
    before the server, so that it ends after it: else somebody would stand for ever.
    """

    def __init__(self, data_dir: Path, points: Mapping[str, str], plan: Sequence[tuple[str, Sequence[str]]]) -> None:
        """`points`: of each process. `plan`: who is to stand at its point, and the victims."""
        super().__init__(daemon=True)
        self.environment = {"BLOOMERY_FAILPOINTS": ",".join(f"{point}!{signal.SIGSTOP.name}" for point in points.values())}
        self._data_dir, self._who, self._plan = data_dir, tuple(points), plan
        self.all_struck = all_struck(data_dir)
        self._diary: Sequence[dict[str, Any]] = ()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.moments: list[float] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self.join()
        if self._error is not None:
            raise self._error

    def look(self, diary: list[dict[str, Any]]) -> None:
        """What happened so far."""
        self._diary = list(diary)

    def run(self) -> None:
        """Look after those that stand, whatever goes wrong."""
        while not self._over.wait(_POLL_S):
            pids = processes(self._data_dir)
            for who in self._who:
                if who in pids and _stands(pids[who]):
                    try:
                        self._meet(who, pids)
                    except BaseException as error:
                        self._error = self._error or error
                    with suppress(ProcessLookupError):
                        os.kill(pids[who], signal.SIGCONT)

    def _meet(self, who: str, pids: Mapping[str, int]) -> None:
        if len(self.moments) == len(self._plan):
            return
        at, victims = self._plan[len(self.moments)]
        if who == at and all_alive(pids, self._who) and self._recovered():
            self.moments.append(strike(self._data_dir, victims))
            if len(self.moments) == len(self._plan):
                self.all_struck.touch()

    def _recovered(self) -> bool:
        """Operations of more than two tenants are in flight, one of which may have had results that were only not told yet, and none that was at the
        strike before: no operation dies twice, which would fail it."""
        diary, last = self._diary, self.moments[-1] if self.moments else 0.0
        done = {(line["tenant"], line["done"]) for line in diary if "done" in line}
        return len(done) >= FIRST_RESULTS and diary[-1]["at"] > last and in_flight(diary, last) <= done and len(at_work(diary)) > 2


def _stands(pid: int) -> bool:
    try:
        return "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


class RandomStrikes:
    """Kills at random moments, one after the other; the next comes when all is done that was in flight at the one before.

    So no operation dies twice, which would fail it. Whoever is to die lives by then, and more than two tenants have operations in flight: all of
    those at the kill before may have had results that were only not told yet, and one tenant may come to the end of its own in the last moment.
    """

    def __init__(self, data_dir: Path, chance: random.Random, victims: Sequence[Sequence[str]], windows: Sequence[range]) -> None:
        """After how many results each comes is drawn from its window, and so is the moment after that."""
        self._data_dir = data_dir
        self.all_struck = all_struck(data_dir)
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
        recovered = diary[-1]["at"] > last and in_flight(diary, last) <= done
        if len(done) >= results and recovered and len(at_work(diary)) > 2 and all_alive(processes(self._data_dir), victims):
            time.sleep(after_s)
            self.moments.append(strike(self._data_dir, victims))
            if len(self.moments) == len(self._plan):
                self.all_struck.touch()


class FullDisk:
    """Lets the api write to no file, as on a full disk, from so many results on until the engine has computed all that it was given."""

    def __init__(self, server: LiveServer, results: int) -> None:
        self._server, self._results = server, results
        self.over = server.data_dir.with_name("room-again")
        """The file that says so, for a workload to go on until then."""
        self.told: httpx.Response | None = None
        """What an operation was answered meanwhile."""
        self.lifted_at: float | None = None

    def look(self, diary: list[dict[str, Any]]) -> None:
        """Begin and end, when it is time to."""
        if self.lifted_at is None and len([line for line in diary if "done" in line]) >= self._results:
            pid = self._server.pid("api")
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            try:
                self._meanwhile()
            finally:
                self.lifted_at = time.time()
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
                self.over.touch()

    def _meanwhile(self) -> None:
        with Client(self._server.url, self._server.key) as client:
            body = {"model_id": client.runs()[0].id, "seq_id": TOO_EARLY, "adam_params": {"learning_rate": 1e-3}}
            self.told = httpx.post(f"{self._server.url}/api/v1/optim_step", json=body, headers={"x-api-key": self._server.key})
            wait_until(lambda: client.status().engines[0].detail["queued_operations"] == 0)
