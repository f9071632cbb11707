"""kill -9 of the api, of the engine and of both, at every durable boundary and at random moments: the runs end with the same bits.

The runs are trained through the tinker SDK, a hundred operations in all. The reference comes from a server that nobody disturbed, in processes of
its own.
"""

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from bloomery.client import Client
from tests.kill.harness import Companion, RandomStrikes, assert_struck, finish, in_flight, start_workload
from tests.kill.workload import OPERATIONS, POISON
from tests.live import running_server

TENANTS: Final = 4
API, ENGINE = "api", "engine"
DEATHS: Final = [
    ("journal.operation.written@7", "engine.operation.done@62", API),
    ("engine.result.sent@5", "journal.operation.synced@82", ENGINE),
    ("journal.result.written@4", "engine.snapshot.written@3", API),
    ("snapshot.weights.written@1", "journal.result.synced@70", ENGINE),
    ("store.row.committed@20", "engine.operation.started@60", API),
    ("blob.written@10", "checkpoint.row.committed@22", ENGINE),
    ("segment.dropped@1", "engine.checkpoint.written@12", API),
]
"""Where one process dies alone, early in the work; where the other dies later; and who is killed along with that. Between the two so much is done
that the engine dies in no operation twice, which would fail it."""
WINDOWS: Final = [range(5, 20), range(30, 45), range(55, 70)]
"""Results after which a random kill comes: the last leaves thirty operations, so that some are in flight."""
OFTEN: Final = {"BLOOMERY_CHECKPOINT_SECONDS": "0.02"}
"""Checkpoints: so replay starts from one, and segments are dropped while the workload runs."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with running_server(tmp_path_factory.mktemp("reference") / "data") as undisturbed:
        outcome = finish(start_workload(undisturbed, TENANTS))
    assert len([line for line in outcome.diary if "done" in line]) == TENANTS * OPERATIONS == 100
    # Else nobody would be told from anybody else, or from a run that learned nothing.
    assert len({digest for report in outcome.reports for digest in report["digests"].values()}) == 2 * TENANTS
    return outcome.reports


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
@pytest.mark.parametrize(("alone", "both", "companion"), DEATHS)
def test_tenants_end_with_the_same_bits_after_a_death_of_one_process_and_one_of_both(
    alone: str, both: str, companion: str, tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    assert differences(killed_at(alone, both, companion=companion, tmp_path=tmp_path), reference) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_tenants_end_with_the_same_bits_after_kills_at_random_moments(seed: int, tmp_path: Path, reference: list[dict[str, Any]]) -> None:
    chance = random.Random(seed)
    victims = chance.sample([[API], [ENGINE], [API, ENGINE]], 3)
    with running_server(tmp_path / "data", env=OFTEN) as server:
        strikes = RandomStrikes(server, chance, victims, WINDOWS)
        print(f"seed {seed}: {strikes}")
        outcome = finish(start_workload(server, TENANTS), strikes.look)
    assert len(strikes.moments) == len(victims)
    for moment, who in zip(strikes.moments, victims, strict=True):
        assert_struck(outcome.diary, moment, f"the death of {who}")
    assert differences(outcome.reports, reference) == []


@pytest.mark.slow
def test_an_operation_that_kills_every_engine_fails_and_the_other_tenants_end_with_the_same_bits(
    tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    environment = {"BLOOMERY_FAILPOINTS": f"engine.operation.{POISON}:", **OFTEN}
    with running_server(tmp_path / "data", env=environment) as server:
        reports = finish(start_workload(server, TENANTS, poisoned=1)).reports
    failure = reports[1]["failure"]
    assert failure is not None
    assert failure.startswith("server: ")
    assert f"the engine died twice in operation {POISON}" in failure
    assert differences([report | {"failure": None} for report in reports], reference) == []


def test_what_is_done_or_not_yet_submitted_is_not_in_flight() -> None:
    times = {("submitted", 0, 1): 1.0, ("submitted", 1, 1): 2.0, ("done", 0, 1): 3.0, ("submitted", 0, 2): 4.0}
    diary = [{what: seq, "tenant": tenant, "at": at} for (what, tenant, seq), at in times.items()]
    assert [in_flight(diary, moment) for moment in (0.5, 1.5, 2.5, 3.5)] == [set(), {(0, 1)}, {(0, 1), (1, 1)}, {(1, 1)}]
    assert_struck(diary, 2.5, "it")
    with pytest.raises(AssertionError, match="operations of 1 tenants were in flight"):
        assert_struck(diary, 3.5, "it")


def differences(reports: list[dict[str, Any]], reference: list[dict[str, Any]]) -> list[tuple[int, str, Any, Any]]:
    """What came out otherwise than undisturbed: the tenant, the part of its report, and both."""
    pairs = enumerate(zip(reports, reference, strict=True))
    return [(tenant, key, report[key], wanted[key]) for tenant, (report, wanted) in pairs for key in wanted if report[key] != wanted[key]]


def killed_at(alone: str, both: str, *, companion: str, tmp_path: Path) -> list[dict[str, Any]]:
    """The outcome of the workload on a server of which a process dies at the one point, and another and its companion at the other."""
    markers = {point: tmp_path / f"marker-{number}" for number, point in enumerate((alone, both))}
    armed = ",".join(f"{point}:{marker}" for point, marker in markers.items())
    with running_server(tmp_path / "data", env={"BLOOMERY_FAILPOINTS": armed, **OFTEN}) as server, ExitStack() as stack:
        dies_too = Companion(server, markers[both], companion)
        dies_too.start()
        stack.callback(dies_too.end)
        outcome = finish(start_workload(server, TENANTS))
    for point, marker in markers.items():
        assert marker.exists(), f"nobody died at {point}"
        assert_struck(outcome.diary, marker.stat().st_mtime, f"the death at {point}")
    assert dies_too.struck_at is not None
    assert_struck(outcome.diary, dies_too.struck_at, f"the death of the {companion}")
    return outcome.reports
