"""What rows hold of the chain of a run stays there, or gets a blob, and a chain that no row holds anything of goes."""

from pathlib import Path

import pytest

from bloomery.services.housekeeping import chains
from bloomery.services.housekeeping.chains import RunChains
from bloomery.store.blobs import Blobs
from bloomery.sync.chain.manifest import FOLDER as VERSIONS
from bloomery.sync.chain.publisher import Publisher
from bloomery.sync.chain.retention import RetainConfig, sweep
from bloomery.sync.run_chain import RunChain, chain_folder
from bloomery.types.operations import SnapshotResult
from tests.engine.test_chains import Loop, weights

AT_ONCE = RetainConfig(bases=1, grace_s=0.0)


def swept(blobs: Blobs) -> None:
    """By the engine, twice: what is buried first is removed then."""
    objects = blobs.objects(chain_folder("run-1"))
    with Publisher.open(objects, "run-1", holder="engine") as publisher:
        sweep(objects, publisher.lease, config=AT_ONCE)
        sweep(objects, publisher.lease, config=AT_ONCE)


def published(loop: Loop, count: int) -> list[SnapshotResult]:
    # Versions of which each is a base.
    return [loop.publish(3e-2) for _ in range(count)]


def test_a_version_that_a_row_holds_outlives_sweeps_and_others_do_not(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    found = published(loop, 4)
    RunChains(loop.blobs).claim([found[1].version])
    swept(loop.blobs)
    assert [loop.life().load(weights(each)).version for each in found[1:]] == [each.version for each in found[1:]]
    assert found[0].key not in {blob.key for blob in loop.blobs.list("snapshots")}
    assert len(loop.blobs.objects(chain_folder("run-1")).list(VERSIONS)) == 3


def test_one_that_many_newer_ones_have_left_behind_gets_a_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "CLAIMED", 2)
    loop = Loop(tmp_path)
    found = published(loop, 4)
    RunChains(loop.blobs).claim([found[0].version, found[3].version])
    assert [loop.blobs.exists(each.key) for each in found] == [True, False, False, False]
    swept(loop.blobs)
    assert len(loop.blobs.objects(chain_folder("run-1")).list(VERSIONS)) == 1
    assert loop.life().load(weights(found[0])).version == found[0].version


def test_a_chain_goes_when_no_row_holds_anything_of_it_and_whoever_trains_on_begins_another(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    found = published(loop, 2)
    keeper = RunChains(loop.blobs)
    keeper.remove([found[1].version], before_us=1 << 62)
    keeper.remove([], before_us=0)
    chain = RunChain(loop.blobs.objects(chain_folder("run-1")), "run-1")
    assert len(chain.sequences()) == 2
    keeper.remove([], before_us=1 << 62)
    assert RunChain(loop.blobs.objects(chain_folder("run-1")), "run-1").sequences() == {}
    again = loop.publish(3e-2)
    assert loop.life().load(weights(again)).version == again.version
