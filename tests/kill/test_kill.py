"""kill -9 of the api, of the engine and of both, at every durable boundary of either and at random moments: the runs end with the same bits.

The runs are trained through the tinker SDK, over a hundred operations in all. The references come from servers that nobody disturbed, with as many
threads, in processes of their own.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest

from bloomery.client import Client
from tests.kill.harness import TOO_EARLY, WORK_S, FullDisk, RandomStrikes, Stops, assert_struck, finish, in_flight, start_workload
from tests.kill.workload import OPERATIONS, POISON
from tests.live import LiveServer, running_server

TENANTS: Final = 4
API, ENGINE = "api", "engine"
POINTS: Final = [
    {ENGINE: "engine.operation.started", API: "journal.operation.written"},
    {ENGINE: "engine.operation.done", API: "journal.operation.synced"},
    {ENGINE: "engine.result.sent", API: "journal.result.written"},
    {ENGINE: "engine.snapshot.written", API: "journal.result.synced"},
    {ENGINE: "snapshot.weights.written", API: "store.row.committed"},
    {ENGINE: "blob.written", API: "checkpoint.row.committed"},
    {ENGINE: "engine.checkpoint.written", API: "segment.dropped"},
]
"""Where an engine and an api stand while somebody dies."""
STRIKES: Final[list[tuple[str, list[str]]]] = [
    (ENGINE, [ENGINE]),
    (API, [ENGINE]),
    (API, [API]),
    (ENGINE, [API]),
    (ENGINE, [API, ENGINE]),
    (API, [API, ENGINE]),
]
"""Who stands at its point, and who dies then: it, the other one, or both. Every pair of points has every other one of these."""
THREADS: Final = [1, 1, 2, 2, 1, 2, 1]
"""Of the engine, for each pair of points: a promise of equal bits is one for as many threads."""
WINDOWS: Final = [range(5, 20), range(35, 50), range(65, 85)]
"""Results after which a random kill comes, at the earliest: the tenants go on until it has come."""
OFTEN: Final = {"BLOOMERY_CHECKPOINT_SECONDS": "0.02"}
"""Checkpoints: so replay starts from one, and segments are dropped while the workload runs."""

pytestmark = pytest.mark.timeout(2 * WORK_S)
"""Of a reference and of what is held against it."""

Reports = list[dict[str, Any]]
ReferenceOf = Callable[[int], Reports]


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> ReferenceOf:
    """What comes out on a server with so many threads that nobody disturbs."""

    @cache
    def reports(threads: int) -> Reports:
        with server_with(threads, tmp_path_factory.mktemp("reference") / "data") as undisturbed:
            outcome = finish(start_workload(undisturbed, TENANTS))
        assert len([line for line in outcome.diary if "done" in line]) == TENANTS * OPERATIONS == 120
        # Else nobody would be told from anybody else, or from a run that learned nothing.
        assert len({digest for report in outcome.reports for digest in report["digests"].values()}) == 2 * TENANTS
        return outcome.reports

    return reports


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
@pytest.mark.parametrize(("number", "threads"), [*enumerate(THREADS)], ids=["-".join(points.values()) for points in POINTS])
def test_tenants_end_with_the_same_bits_whoever_dies_while_a_process_is_at_a_point(
    number: int, threads: int, tmp_path: Path, reference_of: ReferenceOf
) -> None:
    reference, points, strikes = reference_of(threads), POINTS[number], STRIKES[number % 2 :: 2]
    with Stops(tmp_path / "data", points, strikes) as stops, server_with(threads, tmp_path / "data", stops.environment) as server:
        outcome = finish(start_workload(server, TENANTS, until=stops.all_struck), stops.look)
    assert len(stops.moments) == len(strikes), f"nobody died any more: {strikes[len(stops.moments)]}"
    for moment, (stood, died) in zip(stops.moments, strikes, strict=True):
        assert_struck(outcome.diary, moment, f"the death of {died} at {points[stood]}")
    assert differences(outcome.reports, reference) == []


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "threads"), [(0, 1), (1, 2)])
def test_tenants_end_with_the_same_bits_after_kills_at_random_moments(seed: int, threads: int, tmp_path: Path, reference_of: ReferenceOf) -> None:
    reference, chance = reference_of(threads), random.Random(seed)
    victims = chance.sample([[API], [ENGINE], [API, ENGINE]], 3)
    with server_with(threads, tmp_path / "data") as server:
        strikes = RandomStrikes(server.data_dir, chance, victims, WINDOWS)
        print(f"seed {seed}: {strikes}")
        outcome = finish(start_workload(server, TENANTS, until=strikes.all_struck), strikes.look)
    assert len(strikes.moments) == len(victims)
    for moment, who in zip(strikes.moments, victims, strict=True):
        assert_struck(outcome.diary, moment, f"the death of {who}")
    assert differences(outcome.reports, reference) == []


@pytest.mark.slow
def test_an_operation_that_kills_every_engine_fails_and_the_other_tenants_end_with_the_same_bits(tmp_path: Path, reference_of: ReferenceOf) -> None:
    reference = reference_of(1)
    with server_with(1, tmp_path / "data", {"BLOOMERY_FAILPOINTS": f"engine.operation.{POISON}:"}) as server:
        reports = finish(start_workload(server, TENANTS, poisoned=1)).reports
    failure = reports[1]["failure"]
    assert failure is not None
    assert failure.startswith("server: ")
    assert f"the engine died twice in operation {POISON}" in failure
    assert differences([report | {"failure": None} for report in reports], reference) == []


@pytest.mark.slow
def test_tenants_end_with_the_same_bits_after_a_while_in_which_nothing_could_be_written(tmp_path: Path, reference_of: ReferenceOf) -> None:
    reference = reference_of(1)
    with server_with(1, tmp_path / "data") as server:
        disk = FullDisk(server, results=40)
        outcome = finish(start_workload(server, TENANTS, until=disk.over), disk.look)
    assert disk.told is not None
    assert (disk.told.status_code, disk.told.json()["code"]) == (503, "unavailable")
    assert f"operation {TOO_EARLY} cannot be journaled: [Errno 27] File too large" in disk.told.json()["error"]
    assert disk.lifted_at is not None
    assert_struck(outcome.diary, disk.lifted_at, "room")
    assert differences(outcome.reports, reference) == []


def test_what_is_done_or_not_yet_submitted_is_not_in_flight() -> None:
    times = {("submitted", 0, 1): 1.0, ("submitted", 1, 1): 2.0, ("done", 0, 1): 3.0, ("submitted", 0, 2): 4.0}
    diary = [{what: seq, "tenant": tenant, "at": at} for (what, tenant, seq), at in times.items()]
    assert [in_flight(diary, moment) for moment in (0.5, 1.5, 2.5, 3.5)] == [set(), {(0, 1)}, {(0, 1), (1, 1)}, {(1, 1)}]
    assert_struck(diary, 2.5, "it")
    with pytest.raises(AssertionError, match="operations of 1 tenants were in flight"):
        assert_struck(diary, 3.5, "it")


def differences(reports: Reports, reference: Reports) -> list[tuple[int, str, Any, Any]]:
    """What came out otherwise than undisturbed: the tenant, the part of its report, and both."""
    pairs = enumerate(zip(reports, reference, strict=True))
    return [(tenant, key, report[key], wanted[key]) for tenant, (report, wanted) in pairs for key in wanted if report[key] != wanted[key]]


@contextmanager
def server_with(threads: int, data_dir: Path, environment: Mapping[str, str] = MappingProxyType({})) -> Iterator[LiveServer]:
    """A server that makes checkpoints often, whose engine computes with so many threads."""
    with running_server(data_dir, "--threads", str(threads), env={**OFTEN, **environment}) as server:
        (engine,) = (pid for name, pid in server.pids().items() if name.startswith(ENGINE))
        assert f"OMP_NUM_THREADS={threads}" in Path(f"/proc/{engine}/environ").read_text().split("\0")
        yield server
