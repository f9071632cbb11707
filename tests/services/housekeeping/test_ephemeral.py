"""Weights without a name go when nobody can use them any more, and never under a client that does."""

import os
import signal
import sqlite3
import subprocess
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update

from bloomery.config.data_dir import DataDir
from bloomery.services.clients.sessions import SamplingSession, Session, Sessions
from bloomery.services.engines.models import Models
from bloomery.services.housekeeping.ephemeral import Ephemeral, Keeping
from bloomery.services.housekeeping.garbage import Garbage
from bloomery.services.kinds import SNAPSHOT
from bloomery.services.training.run_rows import RunRow
from bloomery.services.weights.versions import Version, Versions
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs, Blobs
from bloomery.sync.publish import card_key, manifest_key
from bloomery.types.errors import Gone, NotFound
from bloomery.types.generation import Weights
from bloomery.types.operations import SnapshotResult
from bloomery.types.probe import probe_key
from bloomery.up import layout
from tests.live import BLOOMERY
from tests.services.fake_engine import BASE, FakeEngine, fake_base
from tests.services.runs_stage import ME, Api, forward_backward, open_api, play, step
from tests.services.stage import deployments_of

HOUR_US = 3_600_000_000


@dataclass
class Loop:
    """A run of a session that saves weights for a new sampler after every step, and what tidies up behind it."""

    api: Api
    blobs: Blobs
    sessions: Sessions
    session: Session
    run: RunRow
    next_seq: int = 1

    async def save(self) -> SnapshotResult:
        """Step, and publish without a name."""
        await self.api.runs.submit(ME, self.run.id, self.next_seq, forward_backward(self.next_seq))
        await self.api.runs.submit(ME, self.run.id, self.next_seq + 1, step())
        self.next_seq += 2
        return await self.publish()

    async def publish(self, name: str | None = None) -> SnapshotResult:
        """Publish what the run is now; its manifest is written as an engine would."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        await self.api.runs.snapshot(ME, self.run.id, seq, name)
        (done,) = await self.api.results(self.run.id, seq)
        assert isinstance(done, SnapshotResult)
        self.blobs.put(manifest_key(done.version), b"{}")
        return done

    async def sampler(self, number: int, done: SnapshotResult) -> SamplingSession:
        """The session's sampler of these weights."""
        return await self.sessions.create_sampling(ME, self.session.id, number, version_of(done), None)

    async def tidy(self, keeping: Keeping) -> None:
        """What housekeeping does."""
        await self.garbage(keeping).expire()

    def garbage(self, keeping: Keeping) -> Garbage:
        return Garbage(self.api.database, AsyncBlobs(self.blobs), Ephemeral(self.api.database, self.sessions, keeping=keeping), trusted=())

    async def age(self, *, hours: float = 48) -> None:
        """Let everything be older; the session was heard of just now."""
        back = int(hours * HOUR_US)
        for table, column in ((rows.checkpoint, "created_us"), (rows.sampling_session, "created_us"), (rows.sampling_session, "asked_us")):
            await self.change(update(table).values({column: table.c[column] - back}))
        for blob in self.blobs.list():
            path = self.blobs._root / blob.key  # type: ignore[operator]
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - back / 1e6))

    async def change(self, statement: Any) -> None:
        await self.api.database.write(lambda connection: connection.execute(statement))

    async def rows(self) -> int:
        """Snapshots of the run that there are rows of."""
        query = select(func.count()).select_from(rows.checkpoint).where(rows.checkpoint.c.run_id == self.run.id, rows.checkpoint.c.kind == SNAPSHOT)
        return await self.api.database.read(lambda connection: connection.scalar(query) or 0)

    def there(self, saved: Sequence[SnapshotResult]) -> list[bool]:
        """Whose weights and manifest lie in the store."""
        both = [(self.blobs.exists(done.key), self.blobs.exists(manifest_key(done.version))) for done in saved]
        assert all(weights == manifest for weights, manifest in both)
        return [weights for weights, _ in both]


def version_of(done: SnapshotResult) -> Version:
    return Version(Weights(version=done.version, key=done.key), BASE, "tiny")


def looped(tmp_path: Path, story: Any, *, owned: bool = True) -> None:
    """Play a story with a loop whose run belongs to a session, or to none."""

    async def told(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            sessions = Sessions(api.database)
            session = await sessions.create(ME, tags=[], user_metadata={}, sdk_version="0")
            run = await api.new_run(session_id=session.id if owned else None)
            await story(Loop(api, engine.blobs, sessions, session, run))

    play(tmp_path, told)


# A session that lives


def test_a_sampler_stays_while_its_session_lives_however_long_nobody_asks_it(tmp_path: Path) -> None:
    async def story(loop: Loop) -> None:
        saved = await loop.save()
        sampler = await loop.sampler(0, saved)
        await loop.age(hours=1000)
        await loop.tidy(Keeping())
        assert await loop.sessions.get_sampling(ME, sampler.id) == sampler
        assert (await loop.rows(), loop.there([saved])) == (1, [True])

    looped(tmp_path, story)


def test_of_a_run_without_end_the_newest_stay_and_those_that_are_asked(tmp_path: Path) -> None:
    async def story(loop: Loop) -> None:
        saved = [await loop.save() for _ in range(5)]
        samplers = [await loop.sampler(number, done) for number, done in enumerate(saved)]
        for sampler in samplers:
            await loop.sessions.get_sampling(ME, sampler.id)
        keeping = Keeping(newest_per_run=2)
        await loop.tidy(keeping)
        assert loop.there(saved) == [True] * 5
        await loop.age(hours=2)
        await loop.sessions.get_sampling(ME, samplers[1].id)
        await loop.tidy(keeping)
        assert loop.there(saved) == [False, True, False, True, True]
        assert await loop.rows() == 3
        for number in (1, 3, 4):
            assert await loop.sessions.get_sampling(ME, samplers[number].id) == samplers[number]
        for number in (0, 2):
            with pytest.raises(Gone, match="save the run's weights again for another sampler, under a name if they shall stay"):
                await loop.sessions.get_sampling(ME, samplers[number].id)
            with pytest.raises(Gone):
                await loop.sessions.join_sampling(ME, samplers[number].id)

    looped(tmp_path, story)


def test_a_sampler_that_only_waits_for_its_sample_counts_as_asked(tmp_path: Path) -> None:
    async def story(loop: Loop) -> None:
        saved = [await loop.save() for _ in range(3)]
        sampler = await loop.sampler(0, saved[0])
        await loop.age(hours=2)
        loop.sessions.note_asked(ME.project, sampler.id)
        await loop.tidy(Keeping(newest_per_run=1))
        assert loop.there(saved) == [True, False, True]
        # It is on disk, for whoever comes after this process.
        again = Sessions(loop.api.database)
        assert (await Ephemeral(loop.api.database, again, keeping=Keeping(newest_per_run=1)).expire()).blobs == []
        assert await again.get_sampling(ME, sampler.id) == sampler

    looped(tmp_path, story)


def test_samplers_in_flight_keep_what_they_have_now(tmp_path: Path) -> None:
    async def story(loop: Loop) -> None:
        saved = [await loop.save() for _ in range(4)]
        for number, done in enumerate(saved):
            follower = await loop.sessions.follow(ME, loop.session.id, number, version_of(done), run_id=loop.run.id, saved=3 + number)
        assert follower.weights.key == saved[-1].key
        await loop.tidy(Keeping(newest_per_run=1, min_idle_us=0))
        assert loop.there(saved) == [False, False, False, True]
        # The answer to an earlier save is fetched again: whoever follows has what is newest.
        late = await loop.sessions.follow(ME, loop.session.id, 7, version_of(saved[0]), run_id=loop.run.id, saved=3)
        assert late.weights.key == saved[-1].key
        await loop.change(update(rows.session).values(finished_us=1))
        await loop.age()
        await loop.tidy(Keeping())
        assert loop.there(saved) == [False] * 4
        for number in (0, 8):
            with pytest.raises(Gone):
                await loop.sessions.follow(ME, loop.session.id, number, version_of(saved[0]), run_id=loop.run.id, saved=3)

    looped(tmp_path, story)


# A session that is over


@pytest.mark.parametrize("how", ["finished", "silent"])
def test_what_a_session_made_for_its_samplers_goes_a_day_after_its_end(how: str, tmp_path: Path) -> None:
    async def story(loop: Loop) -> None:
        saved = [await loop.save() for _ in range(2)]
        sampler = await loop.sampler(0, saved[0])
        await loop.sessions.get_sampling(ME, sampler.id)
        if how == "finished":
            await loop.sessions.finish(ME, loop.session.id, "success")
        await loop.tidy(Keeping())
        await loop.age(hours=25)
        await loop.tidy(Keeping())
        assert loop.there(saved) == [True, True]
        column = "finished_us" if how == "finished" else "heartbeat_us"
        await loop.change(update(rows.session).values({column: rows.session.c[column] - 25 * HOUR_US}))
        await loop.tidy(Keeping())
        assert (await loop.rows(), loop.there(saved)) == (0, [False, False])
        for remembered in (loop.sessions, Sessions(loop.api.database)):
            with pytest.raises(Gone):
                await remembered.get_sampling(ME, sampler.id)

    looped(tmp_path, story)


def test_a_sampler_that_is_asked_outlives_its_session(tmp_path: Path) -> None:
    """Its handle may have been given to another process."""

    async def story(loop: Loop) -> None:
        saved = [await loop.save() for _ in range(2)]
        sampler = await loop.sampler(0, saved[0])
        await loop.age()
        await loop.change(update(rows.session).values(heartbeat_us=1, finished_us=1))
        await loop.sessions.get_sampling(ME, sampler.id)
        await loop.tidy(Keeping())
        assert loop.there(saved) == [True, False]
        assert await loop.sessions.get_sampling(ME, sampler.id) == sampler

    looped(tmp_path, story)


def test_the_answer_to_a_save_whose_weights_went_says_so(tmp_path: Path) -> None:
    async def story(loop: Loop) -> None:
        saved = await loop.save()
        await loop.age()
        await loop.change(update(rows.session).values(finished_us=1))
        await loop.tidy(Keeping())
        with pytest.raises(Gone, match="save them again"):
            await loop.sampler(0, saved)

    looped(tmp_path, story)


# What else holds weights


def test_what_a_deployment_serves_or_served_stays(tmp_path: Path) -> None:
    async def story(loop: Loop) -> None:
        models = Models([fake_base(tmp_path)], {BASE: loop.api.link})
        deployments = deployments_of(loop.api.database, models, Versions(loop.api.database, models))
        saved = [await loop.save() for _ in range(3)]
        await deployments.create(ME, "router", saved[0].version, {})
        await deployments.promote(ME, "router", saved[1].version, {})
        await loop.age()
        await loop.change(update(rows.session).values(finished_us=1))
        await loop.tidy(Keeping())
        assert loop.there(saved) == [True, True, False]
        assert (await deployments.rollback(ME, "router", 1)).live.version == saved[0].version
        with pytest.raises(NotFound):
            await deployments.promote(ME, "router", saved[2].version, {})

    looped(tmp_path, story)


def test_a_name_keeps_weights_and_what_shares_them(tmp_path: Path) -> None:
    async def story(loop: Loop) -> None:
        saved = await loop.save()
        named = await loop.publish("kept")
        assert named.key == saved.key
        sampler = await loop.sampler(0, saved)
        await loop.age()
        await loop.change(update(rows.session).values(finished_us=1))
        await loop.tidy(Keeping())
        assert loop.there([saved]) == [True]
        assert await loop.sessions.get_sampling(ME, sampler.id) == sampler
        await loop.tidy(Keeping())
        await loop.age()
        await loop.api.checkpoints.delete(ME, f"tinker://{loop.run.id}/sampler_weights/kept")
        await loop.tidy(Keeping())
        assert loop.there([saved]) == [False]
        with pytest.raises(Gone):
            await loop.sessions.get_sampling(ME, sampler.id)

    looped(tmp_path, story)


def test_weights_that_two_runs_share_go_with_the_second(tmp_path: Path) -> None:
    async def story(loop: Loop) -> None:
        other = Loop(loop.api, loop.blobs, loop.sessions, loop.session, await loop.api.new_run(session_id=loop.session.id))
        saved = [await loop.publish(), await other.publish(), await other.publish()]
        mine = saved[0]
        assert {done.key for done in saved} == {mine.key}
        await loop.age()
        await loop.tidy(Keeping(newest_per_run=1))
        assert (await loop.rows(), await other.rows(), loop.there([mine])) == (1, 1, [True])
        await loop.change(update(rows.run).where(rows.run.c.id == loop.run.id).values(session_id=None))
        await loop.tidy(Keeping(sessionless_us=HOUR_US))
        assert (await loop.rows(), await other.rows(), loop.there([mine])) == (0, 1, [True])
        await loop.change(update(rows.session).values(finished_us=1))
        await loop.tidy(Keeping())
        assert (await other.rows(), loop.there([mine])) == (0, [False])

    looped(tmp_path, story)


def test_a_run_of_no_session_keeps_them_as_long_as_it_tells_their_version(tmp_path: Path) -> None:
    async def story(loop: Loop) -> None:
        saved = await loop.save()
        await loop.age(hours=6 * 24)
        await loop.tidy(Keeping())
        assert loop.there([saved]) == [True]
        await loop.age(hours=25)
        await loop.tidy(Keeping())
        assert loop.there([saved]) == [False]

    looped(tmp_path, story, owned=False)


def test_a_sampler_of_deleted_weights_stays_for_a_day_after_it_was_asked(tmp_path: Path) -> None:
    async def story(loop: Loop) -> None:
        named = await loop.publish("shown")
        sampler = await loop.sampler(0, named)
        await loop.api.checkpoints.delete(ME, f"tinker://{loop.run.id}/sampler_weights/shown")
        await loop.age(hours=23)
        await loop.tidy(Keeping())
        assert await loop.sessions.get_sampling(ME, sampler.id) == sampler
        await loop.tidy(Keeping())
        await loop.age(hours=25)
        await loop.tidy(Keeping())
        with pytest.raises(Gone):
            await loop.sessions.get_sampling(ME, sampler.id)
        assert loop.there([named]) == [False]

    looped(tmp_path, story)


# Rows first, then blobs


def test_blobs_whose_rows_went_before_a_death_are_collected(tmp_path: Path) -> None:
    async def story(loop: Loop) -> None:
        saved = [await loop.save() for _ in range(2)]
        await loop.age()
        await loop.change(update(rows.session).values(finished_us=1))
        gone = (await Ephemeral(loop.api.database, None).expire()).blobs
        of_version = (manifest_key, card_key, probe_key)
        assert sorted(gone) == sorted([done.key for done in saved] + [key(done.version) for done in saved for key in of_version])
        assert loop.there(saved) == [True, True]
        assert (await loop.garbage(Keeping()).collect(ME)).blobs >= 4
        assert loop.there(saved) == [False, False]

    looped(tmp_path, story)


@pytest.mark.slow
def test_kill_9_between_rows_and_blobs_leaves_garbage_and_nothing_else(tmp_path: Path) -> None:
    saved: list[SnapshotResult] = []

    async def story(loop: Loop) -> None:
        saved.append(await loop.save())
        await loop.sampler(0, saved[0])
        await loop.age()
        await loop.change(update(rows.session).values(finished_us=1))

    looped(tmp_path, story)
    layout.bring_up_to_date(DataDir(tmp_path))
    blobs = Blobs(tmp_path / "blobs")
    # Its first commits are those of expired traffic and of rollouts, the third lets go.
    assert collect(tmp_path, BLOOMERY_FAILPOINTS="store.row.committed@3").returncode == -signal.SIGKILL
    with closing(sqlite3.connect(tmp_path / "bloomery.db")) as database:
        assert database.execute("SELECT count(*) FROM checkpoint WHERE kind = 'snapshot'").fetchone() == (0,)
        assert database.execute("SELECT key, gone_us IS NOT NULL FROM sampling_session").fetchall() == [(None, 1)]
    assert [blobs.exists(saved[0].key), blobs.exists(manifest_key(saved[0].version))] == [True, True]
    assert collect(tmp_path).returncode == 0
    assert [blobs.exists(saved[0].key), blobs.exists(manifest_key(saved[0].version))] == [False, False]


def collect(data_dir: Path, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    """`bloomery gc` in a process of its own."""
    return subprocess.run([BLOOMERY, "gc", "--data-dir", str(data_dir)], env={**os.environ, **environment}, capture_output=True, timeout=60)


def test_a_blob_that_was_written_again_is_left_to_the_next_collection(tmp_path: Path) -> None:
    """A run that saves the same weights again writes the blob before there is a row."""

    async def story(loop: Loop) -> None:
        saved = await loop.save()
        await loop.age()
        await loop.change(update(rows.session).values(finished_us=1))
        loop.blobs.put(saved.key, loop.blobs.get(saved.key))
        await loop.tidy(Keeping())
        assert (await loop.rows(), loop.blobs.exists(saved.key), loop.blobs.exists(manifest_key(saved.version))) == (0, True, False)

    looped(tmp_path, story)


def test_many_go_in_several_transactions(tmp_path: Path) -> None:
    async def story(loop: Loop) -> None:
        saved = [await loop.save() for _ in range(5)]
        for number, done in enumerate(saved):
            await loop.sampler(number, done)
        await loop.age()
        await loop.change(update(rows.session).values(finished_us=1))
        await loop.tidy(Keeping(rows_at_once=2))
        assert (await loop.rows(), loop.there(saved)) == (0, [False] * 5)

    looped(tmp_path, story)
