"""What rows hold of the chain of a run stays there, or gets a blob, and a chain that no row holds anything of goes."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.engine import chains as engine_chains
from bloomery.services.housekeeping import chains
from bloomery.services.housekeeping.chains import RunChains
from bloomery.store.blobs import Blobs
from bloomery.sync.chain.manifest import FOLDER as VERSIONS
from bloomery.sync.chain.publisher import Publisher
from bloomery.sync.chain.readers import FOLDER as READERS
from bloomery.sync.chain.retention import sweep
from bloomery.sync.run_chain import RunChain, chain_folder
from bloomery.types.operations import SnapshotResult
from tests.engine.test_chains import Loop, weights
from tests.train.builders import SAVE

AT_ONCE = replace(engine_chains._RETAIN, bases=1, grace_s=0.0)
LATER, EARLIER = 1 << 62, 0


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
    RunChains(loop.blobs).claim([found[1].version], EARLIER)
    swept(loop.blobs)
    assert [loop.life().load(weights(each)).version for each in found[1:]] == [each.version for each in found[1:]]
    assert found[0].key not in {blob.key for blob in loop.blobs.list("snapshots")}
    assert len(loop.blobs.objects(chain_folder("run-1")).list(VERSIONS)) == 3


def test_a_claim_outlives_a_server_that_is_away_for_days_and_goes_with_what_it_is_for(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    found = published(loop, 3)
    RunChains(loop.blobs).claim([found[0].version], EARLIER)
    (claim,) = loop.blobs.objects(chain_folder("run-1")).list(READERS)
    os.utime(tmp_path / chain_folder("run-1") / claim.key, (1e9, 1e9))
    swept(loop.blobs)
    assert loop.life().load(weights(found[0])).version == found[0].version
    named = loop.publish(3e-2, save=SAVE)
    RunChains(loop.blobs).claim([named.version], EARLIER)
    swept(loop.blobs)
    assert len(loop.blobs.objects(chain_folder("run-1")).list(VERSIONS)) == 1


def test_one_that_many_newer_ones_have_left_behind_gets_a_blob_if_it_is_held_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "CLAIMED", 2)
    loop, keeper = Loop(tmp_path), RunChains(Blobs(tmp_path))
    found = published(loop, 4)
    held = [found[0].version, found[3].version]
    keeper.claim(held, EARLIER)
    assert not any(loop.blobs.exists(each.key) for each in found), "a loop that is faster than rows expire makes no blobs"
    keeper.claim(held, LATER)
    assert [loop.blobs.exists(each.key) for each in found] == [True, False, False, False]
    swept(loop.blobs)
    assert len(loop.blobs.objects(chain_folder("run-1")).list(VERSIONS)) == 4, "it was claimed while it had no blob"
    keeper.claim(held, LATER)
    swept(loop.blobs)
    assert len(loop.blobs.objects(chain_folder("run-1")).list(VERSIONS)) == 1
    assert loop.life().load(weights(found[0])).version == found[0].version


def full_disk(blobs: Blobs, path: Path) -> None:
    def put(key: str, data: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device", key)

    blobs.put = put  # type: ignore[method-assign]


def damaged(blobs: Blobs, path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(("harm", "kept"), [(full_disk, 4), (damaged, 2)])
def test_one_whose_blob_cannot_be_written_stays_if_it_can_be_read_and_keeps_no_other_from_staying(
    harm: Callable[[Blobs, Path], None], kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "CLAIMED", 2)
    loop, blobs = Loop(tmp_path), Blobs(tmp_path)
    found = published(loop, 4)
    keeper, chain = RunChains(blobs), RunChain(loop.blobs.objects(chain_folder("run-1")), "run-1")
    first = chain._read()[0].manifest.steps[0].object
    harm(blobs, tmp_path / chain_folder("run-1") / first.key)
    for _ in range(2):
        keeper.claim([found[0].version, found[2].version], LATER)
    swept(loop.blobs)
    assert len(loop.blobs.objects(chain_folder("run-1")).list(VERSIONS)) == kept
    assert loop.life().load(weights(found[2])).version == found[2].version


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
