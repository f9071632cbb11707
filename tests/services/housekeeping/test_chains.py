"""What rows hold of the chain of a run stays there, or gets a blob, and a chain that no row holds anything of goes."""

import asyncio
import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from obstore.store import MemoryStore
from sqlalchemy import delete, update

from bloomery.engine import chains as engine_chains
from bloomery.services.housekeeping import chains
from bloomery.services.housekeeping.chains import RunChains
from bloomery.store import rows
from bloomery.store.blobs import Blobs
from bloomery.sync.chain.manifest import FOLDER as VERSIONS
from bloomery.sync.chain.manifest import sequence_of
from bloomery.sync.chain.objects import FOLDER as OBJECTS
from bloomery.sync.chain.publisher import Publisher
from bloomery.sync.chain.readers import FOLDER as READERS
from bloomery.sync.chain.retention import RetainConfig, sweep
from bloomery.sync.manifest import Manifest
from bloomery.sync.publish import manifest_key
from bloomery.sync.run_chain import RunChain, chain_folder
from bloomery.types.errors import Unavailable
from bloomery.types.operations import SnapshotResult
from tests.engine.test_chains import PASSING, Loop, weights
from tests.live import wait_until
from tests.services.stage import BASE, ME, Stage, add_snapshot, play
from tests.train.builders import SAVE, learn, run, step, supervised, train

AT_ONCE = replace(engine_chains._RETAIN, bases=1, grace_s=0.0)
LATER, EARLIER = 1 << 62, 0


def swept(blobs: Blobs, config: RetainConfig = AT_ONCE, *, run_id: str = "run-1", times: int = 2) -> None:
    """By the engine, twice: what is buried first is removed then."""
    objects = blobs.objects(chain_folder(run_id))
    with Publisher.open(objects, run_id, holder="engine") as publisher:
        for _ in range(times):
            sweep(objects, publisher.lease, trusted=(), config=config)


def published(loop: Loop, count: int) -> list[SnapshotResult]:
    # Versions of which each is a base.
    return [loop.publish(3e-2) for _ in range(count)]


def test_a_version_that_a_row_holds_outlives_sweeps_and_others_do_not(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    found = published(loop, 4)
    RunChains(loop.blobs, trusted=()).claim([found[1].version], EARLIER)
    swept(loop.blobs)
    assert [loop.life().load(weights(each)).version for each in found[1:]] == [each.version for each in found[1:]]
    assert found[0].key not in {blob.key for blob in loop.blobs.list("snapshots")}
    assert len(loop.blobs.objects(chain_folder("run-1")).list(VERSIONS)) == 3


def test_a_store_that_did_not_answer_costs_no_version_its_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path)
    found, claims = published(loop, 3), RunChains(loop.blobs, trusted=())

    def silent(key: str) -> bytes:
        raise Unavailable("the store does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(loop.blobs, "get", silent)
        with pytest.raises(Unavailable, match="does not answer"):
            claims.claim([found[0].version], EARLIER)
    claims.claim([found[0].version], EARLIER)
    swept(loop.blobs)
    assert loop.life().load(weights(found[0])).version == found[0].version


def test_a_claim_outlives_a_server_that_is_away_for_days_and_goes_with_what_it_is_for(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    found = published(loop, 3)
    RunChains(loop.blobs, trusted=()).claim([found[0].version], EARLIER)
    (claim,) = loop.blobs.objects(chain_folder("run-1")).list(READERS)
    os.utime(tmp_path / chain_folder("run-1") / claim.key, (1e9, 1e9))
    swept(loop.blobs)
    assert loop.life().load(weights(found[0])).version == found[0].version
    named = loop.publish(3e-2, save=SAVE)
    RunChains(loop.blobs, trusted=()).claim([named.version], EARLIER)
    swept(loop.blobs)
    assert len(loop.blobs.objects(chain_folder("run-1")).list(VERSIONS)) == 1


def test_one_that_many_newer_ones_have_left_behind_gets_a_blob_if_it_is_held_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "CLAIMED", 2)
    loop, keeper = Loop(tmp_path), RunChains(Blobs(tmp_path), trusted=())
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
    keeper, chain = RunChains(blobs, trusted=()), RunChain.among(loop.blobs.objects, "run-1", trusted=())
    first = chain._read()[0].manifest.steps[0].object
    harm(blobs, tmp_path / chain_folder("run-1") / first.key)
    for _ in range(2):
        keeper.claim([found[0].version, found[2].version], LATER)
    swept(loop.blobs)
    assert len(loop.blobs.objects(chain_folder("run-1")).list(VERSIONS)) == kept
    assert loop.life().load(weights(found[2])).version == found[2].version


def removed(loop: Loop, held: list[SnapshotResult], before_us: int = LATER, *, meanwhile: Callable[[], list[SnapshotResult]] = list) -> bool:
    """Whether the chain was, of which these were held, and what was published `meanwhile`, behind the first look."""
    keeper = RunChains(loop.blobs, trusted=())
    for run_id in keeper.spare([each.version for each in held], before_us):
        now_held = [*held, *meanwhile()]
        fence = keeper.fence(run_id)
        assert fence is not None
        keeper.remove(run_id, fence, [each.version for each in now_held], before_us)
    return loop.blobs.objects(chain_folder("run-1")).list(OBJECTS) == []


def written_us(loop: Loop) -> int:
    return max(blob.modified_us for blob in loop.blobs.list(chain_folder("run-1"))) + 1


@pytest.mark.parametrize("weights_changed", [False, True])
def test_a_chain_goes_when_no_row_holds_anything_of_it_and_whoever_trains_on_begins_another(weights_changed: bool, tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    reader = loop.life()
    for each in published(loop, 2):
        reader.load(weights(each))
    assert not removed(loop, [], EARLIER)
    assert removed(loop, [])
    assert removed(loop, []), "there is nothing more to remove"
    again = loop.publish(3e-2, steps=int(weights_changed))
    after = loop.publish()
    assert [each.travelled and each.travelled.whole for each in (again, after)] == [True, False]
    for shelf in (reader, loop.life()):
        assert [shelf.load(weights(each)).version for each in (again, after)] == [again.version, after.version]


def test_the_chain_of_a_run_that_is_over_goes_when_what_is_held_of_it_takes_less_room_as_blobs(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    first, *others = [loop.publish(1e-5, steps=min(place, 1)) for place in range(4)]
    named = loop.publish(1e-5, save=SAVE)
    assert not removed(loop, [first, *others, named]), "four models are more than one and what changed"
    assert not any(loop.blobs.exists(each.key) for each in (first, *others))
    assert removed(loop, [others[1], named])
    assert [loop.life().load(weights(each)).version for each in (others[1], named)] == [others[1].version, named.version]


def test_a_chain_that_is_used_while_it_is_looked_at_stays(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    found = published(loop, 2)
    assert not removed(loop, [], written_us(loop), meanwhile=lambda: [loop.publish() and found[0]][:0])
    assert not removed(loop, [], meanwhile=lambda: [found[1]]), "its row was on its way"
    # The same weights again: they are found in the chain, and nothing is written.
    assert not removed(loop, [], written_us(loop), meanwhile=lambda: [loop.publish(steps=0)][:0])
    assert removed(loop, [], written_us(loop))


def test_who_publishes_while_a_chain_is_removed_waits_and_begins_another(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    published(loop, 2)
    keeper = RunChains(loop.blobs, trusted=())
    fence = keeper.fence("run-1")
    assert fence is not None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(loop.publish, 3e-2, steps=0)
        wait_until(lambda: loop.shelf._chains._writers == {})
        keeper.remove("run-1", fence, [], LATER)
        again = waiting.result(60)
    assert loop.life().load(weights(again)).version == again.version


@pytest.mark.parametrize(("already_buried", "before_it_is_removed"), [(True, AT_ONCE), (False, replace(AT_ONCE, grace_s=3600.0))])
def test_an_old_state_that_is_published_again_is_there_for_as_long_as_a_new_one(
    already_buried: bool, before_it_is_removed: RetainConfig, tmp_path: Path
) -> None:
    """Which is a grace at least, in which rows that name it are claimed."""
    loop = Loop(tmp_path)
    first = published(loop, 4)[0]
    manifest = Manifest.from_json(loop.blobs.get(manifest_key(first.version)))
    whole = loop.shelf._chains.whole(manifest)
    if already_buried:
        swept(loop.blobs, times=1)
    loop.shelf._chains.publish(manifest, whole)
    swept(loop.blobs, before_it_is_removed)
    assert loop.life().load(weights(first)).version == first.version


def test_who_collects_at_once_removes_chains_once_and_keeps_what_rows_hold(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        directory = stage.blobs.blobs.directory
        assert directory is not None
        loop = Loop(directory)
        held, _ = published(loop, 2)
        await add_snapshot(stage.database, held.version, BASE, "run-1")
        await stage.database.write(lambda connection: connection.execute(update(rows.checkpoint).values(key=held.key)))
        older = -60_000_000
        await asyncio.gather(stage.garbage.collect(ME, grace_us=older), stage.garbage.collect(ME, grace_us=older))
        assert loop.blobs.objects(chain_folder("run-1")).list(OBJECTS) == []
        assert loop.life().load(weights(held)).version == held.version

    play(tmp_path, story)


def test_what_one_project_holds_or_lets_go_claims_and_removes_nothing_of_the_chain_of_another(tmp_path: Path) -> None:
    """Though both trained the same weights, and blobs are named by what they contain."""

    async def story(stage: Stage) -> None:
        directory = stage.blobs.blobs.directory
        assert directory is not None
        loop = Loop(directory)
        other = run(loop.base, loop.shelf, rank=0, run_id="run-2")
        mine = published(loop, 4)
        theirs = [result for result in train(other, [learn(supervised([20, 40])), step(3e-2), PASSING] * 4) if isinstance(result, SnapshotResult)]
        assert [each.key for each in theirs] == [each.key for each in mine]
        assert {each.version for each in theirs}.isdisjoint(each.version for each in mine)

        async def hold(version: SnapshotResult, run_id: str, project: str) -> None:
            await add_snapshot(stage.database, version.version, BASE, run_id, project=project)
            row = update(rows.checkpoint).where(rows.checkpoint.c.version == version.version)
            await stage.database.write(lambda connection: connection.execute(row.values(key=version.key)))

        async def let_go(version: SnapshotResult) -> None:
            gone = delete(rows.checkpoint).where(rows.checkpoint.c.version == version.version)
            await stage.database.write(lambda connection: connection.execute(gone))

        await hold(mine[1], "run-1", "default")
        await hold(theirs[2], "run-2", "other")
        await stage.garbage.claim()
        for run_id, oldest in (("run-1", 1), ("run-2", 2)):
            swept(loop.blobs, run_id=run_id)
            chain = loop.blobs.objects(chain_folder(run_id))
            assert [sequence_of(stored.key) for stored in chain.list(VERSIONS)] == list(range(oldest, 4))
        # Both chains go, and one blob stays for both, until neither holds it.
        await let_go(mine[1])
        await hold(mine[2], "run-1", "default")
        await stage.garbage.collect(ME, grace_us=-60_000_000)
        assert [loop.blobs.objects(chain_folder(run_id)).list(OBJECTS) for run_id in ("run-1", "run-2")] == [[], []]
        assert [loop.life().load(weights(each)).version for each in (mine[2], theirs[2])] == [mine[2].version, theirs[2].version]
        await let_go(mine[2])
        await stage.garbage.collect(ME, grace_us=-60_000_000)
        assert loop.life().load(weights(theirs[2])).version == theirs[2].version
        assert not loop.blobs.exists(manifest_key(mine[2].version))
        await let_go(theirs[2])
        await stage.garbage.collect(ME, grace_us=-60_000_000)
        assert list(loop.blobs.list("snapshots")) == []

    play(tmp_path, story)


def test_chains_lie_in_a_bucket_of_blobs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = MemoryStore()
    monkeypatch.setattr("tests.engine.test_chains.Blobs", lambda _: Blobs(bucket))
    loop = Loop(tmp_path)
    first, *_, last = published(loop, 4)
    RunChains(loop.blobs, trusted=()).claim([first.version, last.version], EARLIER)
    swept(loop.blobs)
    assert loop.life().load(weights(first)).version == first.version
    assert removed(loop, [last])
    assert loop.blobs.exists(last.key)
    again = loop.publish()
    assert [loop.life().load(weights(each)).version for each in (last, again)] == [last.version, again.version]
    assert list(tmp_path.iterdir()) == []
