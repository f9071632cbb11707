"""SIGKILL at every named step of a writer, a reader and a sweep: whoever comes next goes on, and nothing that is there is torn."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bloomery.obs.failpoints import failpoint
from bloomery.sync.chain.plan import read_versions
from bloomery.sync.chain.receiver import Receiver
from bloomery.sync.chain.staging import STAGED
from bloomery.types.objects import Objects
from tests.s3 import new_access
from tests.sync.chain.models import RUN, empty, in_files, which
from tests.sync.chain.worker import opened, retain

UPTO = 5
WORK_S = 120.0
PUBLISHING = [
    "chain.lease.taking",
    "chain.lease.taken",
    "chain.object.started",
    "chain.object.put@1",
    "chain.object.put@2",
    "chain.publish.delta",
    "chain.publish.merged@4",
    "chain.publish.base@1",
    "chain.publish.base@4",
    "chain.publish.committing@1",
    "chain.publish.committing@3",
    "chain.publish.committed@1",
    "chain.publish.committed@4",
]
JOINING = ["chain.download.range", "chain.download.range@5", "chain.download.whole", "chain.join.chunk", "chain.join.chunk@4"]
FOLLOWING = [
    "chain.download.whole@2",
    "chain.stage.fetched",
    "chain.stage.chunk@3",
    "chain.stage.decoded",
    "chain.stage.armed",
    "chain.flip.chunk@1",
    "chain.flip.chunk@4",
    "chain.flip.written",
    "chain.flip.kept",
    "chain.flip.held",
    "tests.weights.half@11",
    "tests.weights.half@23",
    "chain.flip.kept@2",
    # Five steps of six chunks, and then back.
    "chain.flip.chunk@33",
    "chain.back.written",
]


SWEEPING = ["chain.sweep.buried@1", "chain.sweep.buried@4", "chain.sweep.removed@1", "chain.sweep.removed@2", "chain.sweep.removed@7"]


def some_always(points: list[str], *always: str) -> list[Any]:
    """The others take as long, and belong to the slow tests."""
    return [point if point in always else pytest.param(point, marks=pytest.mark.slow) for point in points]


def worker(*arguments: str, killed_at: str = "") -> int:
    """Run it, and have it die there; its status."""
    environment = {**os.environ, "BLOOMERY_FAILPOINTS": killed_at}
    done = subprocess.run([sys.executable, "-m", "tests.sync.chain.worker", *arguments], env=environment, timeout=WORK_S, capture_output=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
    return done.returncode


def held_by(objects: Objects, folder: Path) -> int | None:
    """The version that a reader's folder says, after whatever has to be made good; what its weights are is another question."""
    with Receiver.open(objects, in_files(folder / "weights"), RUN, folder=folder) as receiver:
        assert receiver.sequence == which(receiver.weights)
        return receiver.sequence


def assert_whole(objects: Objects, upto: int) -> None:
    """Every version is there, and each comes out as what it is."""
    assert sorted(read_versions(objects, RUN, ())) == list(range(upto + 1))
    for number in range(upto + 1):
        weights = empty()
        with tempfile.TemporaryDirectory() as folder, Receiver.open(objects, weights, RUN, folder=Path(folder)) as receiver:
            receiver.join(number)
        assert which(weights) == number


@pytest.mark.parametrize("point", some_always(PUBLISHING, "chain.publish.committed@4", "chain.publish.committing@3"))
def test_a_writer_that_is_killed_leaves_whole_versions_and_its_next_life_goes_on(tmp_path: Path, point: str) -> None:
    store = str(tmp_path / "store")
    assert worker("publish", store, str(UPTO), killed_at=point) == -signal.SIGKILL
    there = [int(found.key.removeprefix("v/")) for found in opened(store).list("v")]
    assert there == list(range(len(there)))
    if there:
        assert_whole(opened(store), there[-1])
    assert worker("publish", store, str(UPTO)) == 0
    assert_whole(opened(store), UPTO)


@pytest.mark.parametrize("point", some_always([*JOINING, *FOLLOWING], "chain.join.chunk@4", "chain.flip.chunk@4", "tests.weights.half@23"))
def test_a_reader_that_is_killed_holds_one_version_when_it_is_opened_again_and_goes_on(tmp_path: Path, point: str) -> None:
    store, folder = str(tmp_path / "store"), tmp_path / "reader"
    assert worker("publish", store, str(UPTO)) == 0
    assert worker("receive", store, str(folder), str(UPTO), killed_at=point) == -signal.SIGKILL
    held = held_by(opened(store), folder)
    assert (held is None) == (point in JOINING)
    assert worker("receive", store, str(folder), str(UPTO)) == 0
    assert held_by(opened(store), folder) == UPTO


@pytest.mark.slow
def test_a_reader_that_is_killed_while_it_makes_good_a_killed_flip_makes_it_good_the_next_time(tmp_path: Path) -> None:
    store, folder = str(tmp_path / "store"), tmp_path / "reader"
    assert worker("publish", store, str(UPTO)) == 0
    for point in ("tests.weights.half@10", "chain.recover.chunk@1", "chain.recover.chunk@2"):
        assert worker("receive", store, str(folder), str(UPTO), killed_at=point) == -signal.SIGKILL
    assert held_by(opened(store), folder) is not None


@pytest.mark.parametrize("lost", some_always(["missing", "damaged"], "missing"))
def test_chunks_of_a_killed_flip_are_made_anew_from_the_store_where_nothing_is_staged_any_more(tmp_path: Path, lost: str) -> None:
    store, folder = str(tmp_path / "store"), tmp_path / "reader"
    assert worker("publish", store, str(UPTO)) == 0
    # Within the third chunk of the second flip: seven chunks of the join, and six of each flip.
    assert worker("receive", store, str(folder), str(UPTO), killed_at="tests.weights.half@16") == -signal.SIGKILL
    assert which(in_files(folder / "weights")) is None
    if lost == "missing":
        (folder / STAGED).unlink()
    else:
        data = bytearray((folder / STAGED).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / STAGED).write_bytes(data)
    assert worker("receive", store, str(folder), str(UPTO), killed_at="chain.mend.chunk@2") == -signal.SIGKILL
    assert held_by(opened(store), folder) == 1


@pytest.mark.parametrize("point", some_always(SWEEPING, "chain.sweep.removed@7"))
def test_a_sweep_that_is_killed_leaves_all_that_is_named_and_the_next_one_finishes(tmp_path: Path, point: str) -> None:
    store = str(tmp_path / "store")
    assert worker("publish", store, "7") == 0
    assert worker("sweep", store, killed_at=point) == -signal.SIGKILL
    objects = opened(store)
    for link in read_versions(objects, RUN, ()).values():
        for step in link.manifest.steps:
            assert objects.head(step.object.key) is not None
    retain(objects)
    assert sorted(read_versions(objects, RUN, ())) == [6, 7]
    named = {ref.key for link in read_versions(objects, RUN, ()).values() for step in link.manifest.steps for ref in (step.object, step.parts) if ref}
    assert {found.key for found in objects.list("obj")} == named
    assert objects.list("gc/tombstones") == []


@pytest.mark.slow
@pytest.mark.parametrize("point", ["chain.object.put@2", "chain.publish.committing@3", "chain.publish.committed@3", "chain.lease.taken"])
def test_a_writer_to_a_bucket_that_is_killed_is_followed_by_its_next_life(s3: str, point: str) -> None:
    store = f"{s3} {new_access(s3).bucket}"
    assert worker("publish", store, str(UPTO), killed_at=point) == -signal.SIGKILL
    assert worker("publish", store, str(UPTO)) == 0
    assert_whole(opened(store), UPTO)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["chain.download.range@4", "chain.join.chunk@3", "chain.flip.chunk@4", "tests.weights.half@11"])
def test_a_reader_of_a_bucket_that_is_killed_goes_on(s3: str, tmp_path: Path, point: str) -> None:
    store = f"{s3} {new_access(s3).bucket}"
    assert worker("publish", store, str(UPTO)) == 0
    assert worker("receive", store, str(tmp_path), str(UPTO), killed_at=point) == -signal.SIGKILL
    assert worker("receive", store, str(tmp_path), str(UPTO)) == 0
    assert held_by(opened(store), tmp_path) == UPTO


@pytest.mark.slow
def test_a_sweep_that_is_killed_while_it_keeps_what_is_needed_again_removes_it_never(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    assert worker("publish", store, str(UPTO), killed_at="chain.object.put@3") == -signal.SIGKILL
    assert worker("bury", store) == 0
    assert opened(store).list("gc/tombstones")
    assert worker("publish", store, str(UPTO)) == 0
    assert worker("bury", store, killed_at="chain.sweep.kept") == -signal.SIGKILL
    assert worker("bury", store) == 0
    assert opened(store).list("gc/tombstones") == []
    assert_whole(opened(store), UPTO)


def test_every_named_step_of_the_chain_kills_somebody_here() -> None:
    source = "\n".join(path.read_text() for path in (Path(failpoint.__code__.co_filename).parents[1] / "sync" / "chain").glob("*.py"))
    named = {part.partition('"')[0] for part in source.split('failpoint("')[1:]}
    here = Path(__file__).read_text()
    assert {name for name in named if f'"{name}' not in here} == set()
