"""kill -9 of the api or the engine, at every durable boundary and at random times: the run ends with the same bits.

The reference comes from a server that nobody disturbed, in processes of its own.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kill.harness import finish, start_workload
from tests.live import LiveServer, running_server

API_POINTS = [
    "journal.operation.written@7",
    "journal.operation.synced@8",
    "journal.result.written@4",
    "journal.result.synced@6",
    "store.row.committed@6",
    "checkpoint.row.committed",
    "segment.dropped",
]
ENGINE_POINTS = [
    "engine.operation.started@9",
    "engine.operation.done@10",
    "engine.checkpoint.written",
    "engine.snapshot.written",
    "snapshot.weights.written",
    "blob.written",
    "engine.result.sent@5",
]
QUICK = ["journal.operation.synced@9", "journal.result.written@5", "engine.operation.done@12", "engine.operation.started@9"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with running_server(tmp_path_factory.mktemp("reference") / "data") as undisturbed:
        return finish(start_workload(undisturbed))[-1]


def test_a_run_ends_with_the_same_bits_after_several_deaths(tmp_path: Path, reference: dict[str, Any]) -> None:
    assert killed_at(QUICK, tmp_path) == reference


@pytest.mark.slow
@pytest.mark.parametrize("point", [*API_POINTS, *ENGINE_POINTS])
def test_a_run_ends_with_the_same_bits_after_a_death_at(point: str, tmp_path: Path, reference: dict[str, Any]) -> None:
    assert killed_at([point], tmp_path) == reference


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_run_ends_with_the_same_bits_after_kills_at_random_times(seed: int, tmp_path: Path, reference: dict[str, Any]) -> None:
    clock = random.Random(seed)
    with running_server(tmp_path / "data", env={"BLOOMERY_CHECKPOINT_SECONDS": "0.1"}) as victim:
        workload = start_workload(victim)
        read_until(workload, '"accepted"')
        killed = 0
        for _ in range(3):
            time.sleep(clock.uniform(0.1, 1.5))
            if workload.poll() is None:
                killed += kill(victim, clock.choice(["api", "engine"]))
        report = finish(workload)[-1]
    assert killed, "the workload was over before anything could be killed"
    assert report == reference


def killed_at(points: list[str], tmp_path: Path) -> dict[str, Any]:
    """The outcome of the workload on a server that dies once at each point, with operations in flight every time."""
    markers = [tmp_path / f"marker-{number}" for number in range(len(points))]
    armed = ",".join(f"{point}:{marker}" for point, marker in zip(points, markers, strict=True))
    # Checkpoints come often, so that replay starts from one and segments are dropped while the workload runs.
    environment = {"BLOOMERY_FAILPOINTS": armed, "BLOOMERY_CHECKPOINT_SECONDS": "0.1"}
    with running_server(tmp_path / "data", env=environment) as victim:
        diary = finish(start_workload(victim))
    for point, marker in zip(points, markers, strict=True):
        assert marker.exists(), f"nobody died at {point}"
        assert in_flight(diary, marker.stat().st_mtime), f"nothing was in flight at {point}"
    return diary[-1]


def in_flight(diary: list[dict[str, Any]], moment: float) -> bool:
    """Whether operations had been accepted whose results nobody had seen, or were still being submitted."""
    accepted = max((line["accepted"] for line in diary if "accepted" in line and line["at"] <= moment), default=0)
    done = max((line["done"] for line in diary if "done" in line and line["at"] <= moment), default=0)
    last = max(line["accepted"] for line in diary if "accepted" in line)
    return done < accepted or accepted < last


def kill(victim: LiveServer, name: str) -> int:
    """SIGKILL the processes of that name; how many there were (none between two lives)."""
    pids = [pid for process, pid in victim.pids().items() if process.startswith(name)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def read_until(workload: "subprocess.Popen[str]", text: str) -> str:
    assert workload.stdout is not None
    for line in workload.stdout:
        if text in line:
            return line
    raise AssertionError("the workload ended early")
