"""kill -9 of the api or the engine, at every durable boundary and at random times: the run ends with the same bits.

The reference comes from a server that nobody disturbed, in processes of its own.
"""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kill.harness import Server, finish, server, start_workload

API_POINTS = [
    "journal.operation.written",
    "journal.operation.synced",
    "journal.result.written",
    "journal.result.synced",
    "store.row.committed",
    "checkpoint.row.committed",
    "segment.dropped",
]
ENGINE_POINTS = [
    "engine.operation.started",
    "engine.operation.done",
    "engine.checkpoint.written",
    "engine.snapshot.written",
    "engine.result.sent",
]
QUICK = ["journal.operation.synced@9", "journal.result.written@5", "engine.operation.done@12", "engine.operation.started@21"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with server(tmp_path_factory.mktemp("reference") / "data") as undisturbed:
        return outcome(finish(start_workload(undisturbed)))


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
    with server(tmp_path / "data", {"BLOOMERY_CHECKPOINT_SECONDS": "0.5"}) as victim:
        workload = start_workload(victim)
        diary = read_until(workload, '"submitted"')
        for _ in range(3):
            time.sleep(clock.uniform(0.1, 1.5))
            if workload.poll() is None:
                kill(victim, clock.choice(["api", "engine"]))
        report = finish(workload)
    assert diary
    assert outcome(report) == reference


def killed_at(points: list[str], tmp_path: Path) -> dict[str, Any]:
    """The outcome of the workload on a server that dies once at each point, with operations in flight every time."""
    markers = [tmp_path / f"marker-{number}" for number in range(len(points))]
    armed = ",".join(f"{point}:{marker}" for point, marker in zip(points, markers, strict=True))
    # Checkpoints come often, so that replay starts from one and segments are dropped while the workload runs.
    environment = {"BLOOMERY_FAILPOINTS": armed, "BLOOMERY_CHECKPOINT_SECONDS": "0.5"}
    with server(tmp_path / "data", environment) as victim:
        workload = start_workload(victim)
        output, _ = workload.communicate(timeout=240)
        assert workload.returncode == 0, output
    lines = [json.loads(line) for line in output.splitlines()]
    for point, marker in zip(points, markers, strict=True):
        assert marker.exists(), f"nobody died at {point}"
        assert in_flight(lines, marker.stat().st_mtime), f"nothing was in flight at {point}"
    return outcome(lines[-1])


def in_flight(diary: list[dict[str, Any]], moment: float) -> bool:
    """Whether the workload had not seen all its results yet."""
    done = [line["at"] for line in diary if "done" in line]
    return moment < max(done)


def outcome(report: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on deaths: everything."""
    return report


def kill(victim: Server, name: str) -> None:
    pids = [pid for process, pid in victim.processes().items() if process.startswith(name)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def read_until(workload: "subprocess.Popen[str]", text: str) -> str:
    assert workload.stdout is not None
    for line in workload.stdout:
        if text in line:
            return line
    raise AssertionError("the workload ended early")
