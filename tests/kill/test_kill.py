"""kill -9 of the api or the engine, at every durable boundary and at random lines of the workload's diary: the run ends with the same bits.

The reference comes from a server that nobody disturbed, in processes of its own.
"""

import contextlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from bloomery.client import Client
from tests.kill.harness import finish, start_workload
from tests.kill.workload import POISON
from tests.live import LiveServer, running_server

API_POINTS = [
    "journal.operation.written@7",
    "journal.operation.synced@8",
    "journal.result.written@4",
    "journal.result.synced@6",
    "store.row.committed@20",
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


TENANTS = 4
"""With 31 operations each."""
WINDOWS = [range(1, 33), range(45, 57), range(69, 81)]
"""Lines of the diary: half of the steps are accepted in the first 32, the others are accepted and done one by one in the next 48. In between so much
is done that the engine dies in no operation twice, which would fail."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with running_server(tmp_path_factory.mktemp("reference") / "data") as undisturbed:
        return finish(start_workload(undisturbed, TENANTS)).reports


@pytest.mark.slow
def test_two_tenants_end_with_the_same_bits_after_several_deaths(tmp_path: Path) -> None:
    with running_server(tmp_path / "undisturbed") as undisturbed:
        reports = finish(start_workload(undisturbed, 2)).reports
    assert killed_at(QUICK, tmp_path, tenants=2) == reports


@pytest.mark.slow
def test_an_api_that_dies_while_it_makes_a_run_has_made_one(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    environment = {"BLOOMERY_FAILPOINTS": f"run.created:{marker}"}
    with running_server(tmp_path / "data", env=environment) as server, Client(server.url, server.key) as client:
        made = client.create_run("bloomery-tiny", rank=4, seed=1)
        assert marker.exists(), "nobody died"
        assert [run.id for run in client.runs()] == [made.id]
        assert made.optim_step(1e-3).result().metrics["step"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("point", [*API_POINTS, *ENGINE_POINTS])
def test_tenants_end_with_the_same_bits_after_a_death_at(point: str, tmp_path: Path, reference: list[dict[str, Any]]) -> None:
    assert killed_at([point], tmp_path) == reference


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "victims"), [(0, ["engine"]), (1, ["api"]), (2, ["api", "engine"]), (3, ["api", "engine"])])
def test_tenants_end_with_the_same_bits_after_kills_at_random_lines_of_their_diary(
    seed: int, victims: list[str], tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    chance = random.Random(seed)
    moments = [chance.choice(window) for window in WINDOWS]
    killed = []
    with running_server(tmp_path / "data", env={"BLOOMERY_CHECKPOINT_SECONDS": "0.1"}) as server:

        def meanwhile(written: int) -> None:
            if written in moments:
                killed.append(sum(kill(server, victim) for victim in victims))

        reports = finish(start_workload(server, TENANTS), meanwhile).reports
    assert len(killed) == len(moments)
    assert any(killed), "nothing was alive to be killed"
    assert reports == reference


@pytest.mark.slow
def test_an_operation_that_kills_every_engine_fails_and_the_other_tenants_end_with_the_same_bits(
    tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    environment = {"BLOOMERY_FAILPOINTS": f"engine.operation.{POISON}:", "BLOOMERY_CHECKPOINT_SECONDS": "0.1"}
    with running_server(tmp_path / "data", env=environment) as server:
        reports = finish(start_workload(server, TENANTS, poisoned=1)).reports
    failure = reports[1]["failure"]
    assert failure is not None
    assert failure.startswith("server: ")
    assert f"the engine died twice in operation {POISON}" in failure
    assert [report | {"failure": None} for report in reports] == reference


def killed_at(points: list[str], tmp_path: Path, *, tenants: int = TENANTS) -> list[dict[str, Any]]:
    """The outcome of the workload on a server that dies once at each point, with operations in flight every time."""
    markers = [tmp_path / f"marker-{number}" for number in range(len(points))]
    armed = ",".join(f"{point}:{marker}" for point, marker in zip(points, markers, strict=True))
    # Checkpoints come often, so that replay starts from one and segments are dropped while the workload runs.
    environment = {"BLOOMERY_FAILPOINTS": armed, "BLOOMERY_CHECKPOINT_SECONDS": "0.1"}
    with running_server(tmp_path / "data", env=environment) as victim:
        outcome = finish(start_workload(victim, tenants))
    for point, marker in zip(points, markers, strict=True):
        assert marker.exists(), f"nobody died at {point}"
        assert in_flight(outcome.diary, marker.stat().st_mtime), f"nothing was in flight at {point}"
    return outcome.reports


def in_flight(diary: list[dict[str, Any]], moment: float) -> bool:
    """Whether a tenant had operations that were accepted and whose results it had not seen, or were still being submitted."""
    return any(in_flight_of([line for line in diary if line["tenant"] == tenant], moment) for tenant in {line["tenant"] for line in diary})


def in_flight_of(diary: list[dict[str, Any]], moment: float) -> bool:
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
