"""What runs save is found by name, path and operation, once, also when the api died before it could write it down."""

import json
import os
from pathlib import Path
from threading import Event

import pytest
from sqlalchemy import Connection, delete, func, select, update

from bloomery.services.engines.models import Models
from bloomery.services.housekeeping.ephemeral import Ephemeral
from bloomery.services.housekeeping.garbage import Garbage
from bloomery.services.kinds import EXTERNAL, NAMED, SNAPSHOT
from bloomery.services.training.checkpoints import Announcement, CheckpointRow, check_name, check_ttl
from bloomery.services.training.history import Successor
from bloomery.services.training.runs import Runs
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs, Blobs
from bloomery.types.errors import InvalidInput, NotFound
from bloomery.types.generation import Weights
from bloomery.types.operations import CheckpointResult, Failed, LoadResult, LoraSpec, OptimStepResult, SnapshotResult
from tests.services.fake_engine import BASE, FakeEngine, fake_base
from tests.services.runs_stage import LORA, ME, STRANGER, Api, open_api, operation, play, step, until


def test_a_named_checkpoint_is_found_by_its_path(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run(tinker_id="session-1:train:0")
            await api.train(run.id, 1, 2)
            saved = await save(api, run.id, 3, "first", metadata={"renderer": "qwen3"})
            found = await api.checkpoints.find(ME, "tinker://session-1:train:0/weights/first")
            assert found == saved
            assert (found.path, found.step, found.metadata) == ("tinker://session-1:train:0/weights/first", 1, {"renderer": "qwen3"})
            assert found.digest == engine.runs[run.id].state == (await api.runs.get(ME, run.id)).digest
            assert Blobs(tmp_path / "blobs").size(found.key) == found.size_bytes
            assert await api.checkpoints.find(ME, f"tinker://{run.id}/weights/first") == found
            with pytest.raises(NotFound):
                await api.checkpoints.find(STRANGER, "tinker://session-1:train:0/weights/first")
            for nonsense in ("tinker://x", "tinker://a/b/c", "first"):
                with pytest.raises(InvalidInput):
                    await api.checkpoints.find(ME, nonsense)

    play(tmp_path, story)


def test_a_snapshot_has_a_version_and_with_a_name_a_path(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 2)
            await api.runs.snapshot(ME, run.id, 3, "served")
            await api.runs.snapshot(ME, run.id, 4)
            named, ephemeral = await api.results(run.id, 3, 4)
            assert isinstance(named, SnapshotResult)
            assert named == ephemeral
            assert (await api.checkpoints.named(ME, run.id, SNAPSHOT, "served")).version == named.version
            assert [row.name for row in (await api.checkpoints.list(ME, run_id=run.id)).checkpoints] == ["served"]
            with pytest.raises(NotFound):
                await api.checkpoints.named(ME, run.id, NAMED, "served")

    play(tmp_path, story)


def test_an_adapter_that_a_run_publishes_behind_another_one_is_told_of_and_a_whole_model_is_not(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            whole = LoraSpec(rank=0, seed=1, train_attn=False, train_unembed=False)
            for run in (await api.new_run(), await api.runs.create(ME, base_model="tiny", lora=whole, metadata={})):
                await api.train(run.id, 1, 2)
                await api.runs.snapshot(ME, run.id, 3)
                # Weights that did not change are no others.
                await api.runs.snapshot(ME, run.id, 4)
                await api.results(run.id, 3, 4)
                assert len(api.successors) == (run.lora.rank == 0)
                await api.train(run.id, 5, 6)
                await api.runs.snapshot(ME, run.id, 7)
                first, second = await api.results(run.id, 4, 7)
                assert isinstance(first, SnapshotResult)
                assert isinstance(second, SnapshotResult)
                if run.lora.rank:
                    assert api.successors == [Successor(ME.project, first.version, BASE, Weights(version=second.version, key=second.key))]
            assert len(api.successors) == 1

    play(tmp_path, story)


def test_an_adapter_is_told_of_while_a_slow_disk_journals_that_it_was_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, sync = Event(), os.fdatasync
    disk.set()
    monkeypatch.setattr(os, "fdatasync", lambda file: (disk.wait(), sync(file)))

    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 2)
            await api.runs.snapshot(ME, run.id, 3)
            await api.results(run.id, 3)
            await api.train(run.id, 4, 6)
            engine.gate.clear()
            await api.runs.snapshot(ME, run.id, 7)
            disk.clear()
            engine.gate.set()
            try:
                await until(lambda: len(api.successors) == 1)
                assert await api.runs.result(ME, run.id, 7, 0) is None
            finally:
                disk.set()
            (found,) = await api.results(run.id, 7)
            assert isinstance(found, SnapshotResult)
            assert api.successors[0].weights == Weights(version=found.version, key=found.key)

    play(tmp_path, story)


def test_weights_without_a_name_wait_for_no_row_and_take_none_that_was_announced_for_others(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 2)
            # As if the process had died before it journaled the operation, and its caller had wanted another one then.
            await api.checkpoints.announce(Announcement(ME.project, run.id, 3, SNAPSHOT, name="wanted-before", ttl_s=5))
            engine.gate.clear()
            await api.runs.snapshot(ME, run.id, 3)
            await api.runs.snapshot(ME, run.id, 4)
            assert await api.database.read(_seqs_with_rows) == [3]
            engine.gate.set()
            found = await api.results(run.id, 3, 4)
            saved = await api.database.read(lambda connection: connection.execute(select(rows.checkpoint).order_by(rows.checkpoint.c.seq)).all())
            assert [(row.seq, row.name, row.expires_us, row.state, row.version) for row in saved] == [
                (seq, None, None, "ready", result.version) for seq, result in zip((3, 4), found, strict=True) if isinstance(result, SnapshotResult)
            ]

    play(tmp_path, story)


def test_weights_with_a_name_get_it_whatever_was_announced_for_others(tmp_path: Path) -> None:
    async def story(_: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 2)
            for seq, kind, before in ((3, SNAPSHOT, EXTERNAL), (4, EXTERNAL, SNAPSHOT), (5, SNAPSHOT, NAMED)):
                await api.checkpoints.announce(Announcement(ME.project, run.id, seq, before, name=f"wanted-before-{seq}", ttl_s=5))
                await api.runs.snapshot(ME, run.id, seq, f"mine-{seq}", kind=kind)
            await api.results(run.id, 3, 4, 5)
            query = select(rows.checkpoint).where(rows.checkpoint.c.seq >= 3).order_by(rows.checkpoint.c.seq)
            saved = await api.database.read(lambda connection: connection.execute(query).all())
            wanted = [(3, SNAPSHOT, "mine-3"), (4, EXTERNAL, "mine-4"), (5, SNAPSHOT, "mine-5")]
            assert [(row.seq, row.kind, row.name, row.ttl_s, row.state) for row in saved] == [(*each, None, "ready") for each in wanted]

    play(tmp_path, story)


def _seqs_with_rows(connection: Connection) -> list[int]:
    return list(connection.scalars(select(rows.checkpoint.c.seq).order_by(rows.checkpoint.c.seq)))


def test_a_result_whose_row_was_not_written_is_written_at_the_next_start(tmp_path: Path) -> None:
    """As if the process had died between journal and database, and once more after it."""

    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 2)
            before = await save(api, run.id, 3, "kept", ttl_s=1000)
            await api.train(run.id, 4, 6)
            await api.activity.stored(10)
            points = await api.database.read(_points)
            back = update(rows.run).where(rows.run.c.id == run.id).values(settled_seq=2, step=1)
            unready = update(rows.checkpoint).where(rows.checkpoint.c.kind == NAMED).values(state="pending", digest=None, expires_us=None, step=0)
            forget = delete(rows.run_metric).where(rows.run_metric.c.seq > 2)
            await api.database.write(lambda connection: [connection.execute(statement) for statement in (back, unready, forget)])
        for _ in range(2):
            async with open_api(tmp_path) as api:
                await api.activity.stored(10)
                assert await api.checkpoints.named(ME, run.id, NAMED, "kept") == before
                assert await api.database.read(_points) == points
                assert (await api.runs.get(ME, run.id)).step == 3

    play(tmp_path, story)


def test_a_name_is_given_once_unless_it_may_be_overwritten(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 2)
            first = await save(api, run.id, 3, "best")
            await api.runs.checkpoint(ME, run.id, 4, "best")
            (refused,) = await api.results(run.id, 4)
            assert isinstance(refused, Failed)
            assert "`best` already" in refused.message
            assert await api.checkpoints.named(ME, run.id, NAMED, "best") == first
            second = await save(api, run.id, 5, "best", overwrite=True)
            assert await api.checkpoints.named(ME, run.id, NAMED, "best") == second
            assert (await api.checkpoints.list(ME)).total == 1
            # A refused save spoils the step after it, and only that.
            assert isinstance((await api.train(run.id, 6, 8))[2], OptimStepResult)

    play(tmp_path, story)


def test_a_save_that_was_announced_and_not_journaled_can_take_no_taken_name_later(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            first = await save(api, run.id, 1, "best")
            # As when the disk was full between the two.
            other = Announcement(ME.project, run.id, 2, NAMED, name="other", key="k")
            await api.checkpoints.announce(other)
            await api.runs.checkpoint(ME, run.id, 2, "best")
            (refused,) = await api.results(run.id, 2)
            assert isinstance(refused, Failed)
            assert "`best` already" in refused.message
            assert await api.checkpoints.named(ME, run.id, NAMED, "best") == first

    play(tmp_path, story)


def test_a_taken_name_is_told_with_the_run_as_its_caller_knows_it(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run(tinker_id="session-1:train:0")
            await save(api, run.id, 1, "best")
            await api.runs.checkpoint(ME, run.id, 2, "best")
            (refused,) = await api.results(run.id, 2)
            assert isinstance(refused, Failed)
            said = "run `session-1:train:0` has weights `best` already: choose another name, or overwrite it (`overwrite=True`)"
            assert refused.message == said

    play(tmp_path, story)


@pytest.mark.slow
def test_an_export_that_peft_could_not_load_is_refused_before_it_is_saved(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            attention = LoraSpec(rank=4, seed=1, train_mlp=False)
            both, spared = [await api.runs.create(ME, base_model="tiny", lora=lora, metadata={}) for lora in (LORA, attention)]
            runs = Runs(database=api.database, models=mixture(tmp_path, api), checkpoints=api.checkpoints, activity=api.activity)
            for run in (both, spared):
                await runs.snapshot(ME, run.id, 1, "out", kind=EXTERNAL)
            (refused,), (done,) = [await api.results(run.id, 1) for run in (both, spared)]
            assert isinstance(refused, Failed)
            assert "write a whole model of it with `bloomery export --merged`" in refused.message
            assert isinstance(done, SnapshotResult)
            await runs.snapshot(ME, both.id, 2, "out", kind=SNAPSHOT)
            assert isinstance((await api.results(both.id, 2))[0], SnapshotResult)

    play(tmp_path, story)


def mixture(directory: Path, api: Api) -> Models:
    """The base as a mixture of experts of two layers, the first of them dense."""
    config = fake_base(directory)
    file = Path(config.path) / "config.json"
    experts = {"model_type": "qwen3_moe", "mlp_only_layers": [0], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    file.write_text(json.dumps(json.loads(file.read_text()) | experts))
    return Models([config], {BASE: api.link})


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "a b", "x" * 129])
def test_a_name_that_cannot_be_in_a_path_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be a name"):
        check_name(name)


def test_a_time_to_live_is_at_least_a_second() -> None:
    check_ttl(None)
    check_ttl(1)
    for nonsense in (0, -1, 10**12):
        with pytest.raises(InvalidInput, match="ttl_seconds"):
            check_ttl(nonsense)


def test_a_bad_name_fails_the_operation_and_not_the_sequence(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.runs.checkpoint(ME, run.id, 1, "a/b")
            await api.runs.snapshot(ME, run.id, 2, "a/b")
            assert [type(result) for result in await api.results(run.id, 1, 2)] == [Failed, Failed]
            await api.train(run.id, 3, 4)

    play(tmp_path, story)


def test_what_expired_or_was_deleted_is_gone(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 2)
            short = await save(api, run.id, 3, "short", ttl_s=100)
            long = await save(api, run.id, 4, "long")
            assert short.expires_us == short.created_us + 100 * 1_000_000
            assert short.path is not None
            assert long.path is not None
            past = update(rows.checkpoint).where(rows.checkpoint.c.id == short.id).values(expires_us=1)
            await api.database.write(lambda connection: connection.execute(past))
            with pytest.raises(NotFound, match="expired"):
                await api.checkpoints.find(ME, short.path)
            await Garbage(api.database, AsyncBlobs(engine.blobs), Ephemeral(api.database, None), trusted=()).expire()
            assert (
                await api.database.read(lambda connection: connection.scalar(select(rows.checkpoint.c.id).where(rows.checkpoint.c.id == short.id)))
                is None
            )
            again = await save(api, run.id, 5, "short")
            assert again.path == short.path
            await api.checkpoints.set_ttl(ME, short.path, 50)
            assert (await api.checkpoints.find(ME, short.path)).expires_us is not None
            await api.checkpoints.set_ttl(ME, short.path, None)
            assert (await api.checkpoints.find(ME, short.path)).expires_us is None
            await api.checkpoints.delete(ME, long.path)
            with pytest.raises(NotFound):
                await api.checkpoints.find(ME, long.path)
            # The run itself does not depend on what its owner deletes.
            await engine.crash()
            await engine.start()
            await api.train(run.id, 6, 8)

    play(tmp_path, story)


def test_a_run_begins_where_another_ended(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            first = await api.new_run()
            await api.train(first.id, 1, 4)
            end = await save(api, first.id, 5, "end")
            second = await api.new_run(begins_with_load=True)
            await api.runs.load(ME, second.id, 0, end, optimizer=True)
            (loaded,) = await api.results(second.id, 0)
            assert loaded == LoadResult(digest=str(end.digest), step=2)
            await api.train(second.id, 1, 2)
            await api.activity.stored(10)
            assert (await api.runs.get(ME, second.id)).step == 3
            await api.runs.load(ME, second.id, 3, end, optimizer=True)
            (late,) = await api.results(second.id, 3)
            assert isinstance(late, Failed)
            assert "first operation" in late.message

    play(tmp_path, story)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            first = await api.new_run()
            await api.train(first.id, 1, 2)
            end = await save(api, first.id, 3, "end")
            await api.runs.snapshot(ME, first.id, 4, "served")
            await api.results(first.id, 4)
            other = await api.runs.create(ME, base_model="tiny", lora=LoraSpec(rank=8, seed=1), metadata={})
            await api.runs.load(ME, other.id, 1, end, optimizer=True)
            third = await api.new_run()
            await api.runs.load(ME, third.id, 1, await api.checkpoints.named(ME, first.id, SNAPSHOT, "served"), optimizer=True)
            for run_id, reason in ((other.id, "rank=4"), (third.id, "for sampling")):
                (refused,) = await api.results(run_id, 1)
                assert isinstance(refused, Failed)
                assert reason in refused.message

    play(tmp_path, story)


def test_an_announcement_that_did_not_come_about_leaves_no_row(tmp_path: Path) -> None:
    """The row is announced before the operation is journaled: a process may die in between, and another operation come in its place."""

    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 2)
            await save(api, run.id, 3, "end")
            moved = update(rows.checkpoint).where(rows.checkpoint.c.kind == NAMED).values(seq=4, state="pending")
            await api.database.write(lambda connection: connection.execute(moved))
            await api.runs.submit(ME, run.id, 4, step())
            await api.results(run.id, 4)
            await api.activity.stored(10)
            named = select(func.count()).select_from(rows.checkpoint).where(rows.checkpoint.c.kind == NAMED)
            assert await api.database.read(lambda connection: connection.scalar(named)) == 0
            await api.runs.submit(ME, run.id, 5, operation(5))

    play(tmp_path, story)


async def save(api: Api, run_id: str, seq: int, name: str, **options: object) -> CheckpointRow:
    """A named checkpoint, done."""
    await api.runs.checkpoint(ME, run_id, seq, name, **options)  # type: ignore[arg-type]
    (saved,) = await api.results(run_id, seq)
    assert isinstance(saved, CheckpointResult), saved
    return await api.checkpoints.named(ME, run_id, NAMED, name)


def _points(connection):  # type: ignore[no-untyped-def]
    table = rows.run_metric.c
    return connection.execute(select(table.seq, table.step, table.name, table.value, table.created_us).order_by(table.seq, table.name)).all()
