"""Results that were told and are lost with the end of their segment: computed again from the journal, to the same bits or not at all."""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sqlalchemy import Connection, update

from bloomery.services.kinds import NAMED
from bloomery.services.training.run_rows import RunRow
from bloomery.store import rows
from bloomery.store.journal import extent
from bloomery.store.segments import HEADER_BYTES
from bloomery.types.errors import Corrupt
from bloomery.types.operations import Failed, Rejected
from tests.services.fake_engine import FakeEngine
from tests.services.runs_stage import ME, Api, forward_backward, open_api, operation, play, step, until

Submit = Callable[[Api, str, int], Awaitable[None]]


async def backward(api: Api, run_id: str, seq: int) -> None:
    await api.runs.submit(ME, run_id, seq, forward_backward(9))


async def forward(api: Api, run_id: str, seq: int) -> None:
    await api.runs.submit(ME, run_id, seq, forward_backward(9, backward=False))


async def stepping(api: Api, run_id: str, seq: int) -> None:
    await api.runs.submit(ME, run_id, seq, step())


async def save(api: Api, run_id: str, seq: int) -> None:
    await api.runs.checkpoint(ME, run_id, seq, "end")


async def publish(api: Api, run_id: str, seq: int) -> None:
    await api.runs.snapshot(ME, run_id, seq, "end")


async def failing(api: Api, run_id: str, seq: int) -> None:
    await api.runs.submit(ME, run_id, seq, Rejected(message="no such thing", effect="none"))


def segment_of(directory: Path, run: RunRow) -> Path:
    (found,) = (directory / "runs" / run.id).glob("results-*")
    return found


def starts(content: bytes) -> list[int]:
    """Where its records begin."""
    found, offset = [], 0
    while offset < len(content):
        found.append(offset)
        offset += HEADER_BYTES + int.from_bytes(content[offset : offset + 4], "little")
    return found


def cut(segment: Path, *, records: int = 1, whole: bool = False) -> None:
    """The end is missing: so many records, of the first of which a part is left unless they go `whole`."""
    content = segment.read_bytes()
    start = starts(content)[-records]
    segment.write_bytes(content[: start if whole else start + HEADER_BYTES + 3])


async def trained(api: Api, submit: Submit) -> RunRow:
    """Five operations, the last of them as the test wants it, and all of it in rows."""
    run = await api.new_run()
    await api.train(run.id, 1, 4)
    await submit(api, run.id, 5)
    await api.results(run.id, 5)
    await api.activity.stored(10)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("engine_dies", [False, True])
@pytest.mark.parametrize("submit", [backward, forward, stepping, save, publish, failing])
def test_what_is_lost_is_computed_again_with_the_same_bits_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, submit: Submit, engine_dies: bool
) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await trained(api, submit)
            told = await api.results(run.id, *range(1, 6))
            shown, curves = await api.runs.get(ME, run.id), await api.run_metrics.series(ME, run.id)
            state = engine.runs[run.id].state
        cut(segment_of(tmp_path, run))
        assert extent(tmp_path / "runs" / run.id) == (5, 4)
        if engine_dies:
            await engine.crash()
            await engine.start()
        async with open_api(tmp_path) as api:
            # Nobody has to ask: what is lost is missing.
            await until(lambda: (active := api.activity.get(run.id)) is not None and active.history.done == 5)
            assert await api.results(run.id, *range(1, 6)) == told
            assert f"run {run.id}: the results of operations 5 to 5 are lost; they are computed again" in caplog.messages
            assert engine.runs[run.id].state == state
            await api.activity.stored(10)
            again = await api.runs.get(ME, run.id)
            assert again._replace(updated_us=0) == shown._replace(updated_us=0)
            assert await api.run_metrics.series(ME, run.id) == curves
            await api.train(run.id, 6, 7)
        assert caplog.text.count("are computed again") == 1

    play(tmp_path, story)


def test_a_load_that_is_lost_is_done_again(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await loaded(api)
            told = await api.results(run.id, 0)
        cut(segment_of(tmp_path, run))
        async with open_api(tmp_path) as api:
            assert await api.results(run.id, 0) == told
            await api.train(run.id, 1, 2)

    play(tmp_path, story)


@pytest.mark.parametrize("whole", [False, True])
def test_several_that_are_lost_are_computed_again(tmp_path: Path, whole: bool) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            engine.checkpoint_every = 100
            told = await api.train(run.id, 1, 6)
            await api.activity.stored(10)
            state = engine.runs[run.id].state
        cut(segment_of(tmp_path, run), records=3, whole=whole)
        await engine.crash()
        await engine.start()
        async with open_api(tmp_path) as api:
            assert await api.results(run.id, *range(1, 7)) == told
            assert engine.runs[run.id].state == state
            assert [(message.seq, message.replay) for message in engine.executed[-6:]] == [(seq, seq <= 3) for seq in range(1, 7)]

    play(tmp_path, story)


@pytest.mark.parametrize(("bit_exact", "stops"), [(True, True), (False, False)])
def test_other_numbers_than_those_in_rows_stop_the_run_where_bits_are_promised(tmp_path: Path, bit_exact: bool, stops: bool) -> None:
    async def story(engine: FakeEngine) -> None:
        engine.bit_exact = bit_exact
        async with open_api(tmp_path) as api:
            run = await trained(api, backward)
            told = await api.results(run.id, 5)
        cut(segment_of(tmp_path, run))
        await engine.crash()
        engine.salt, engine.salted_from = "wrong", 5
        await engine.start()
        async with open_api(tmp_path) as api:
            if not stops:
                assert await api.results(run.id, 5) != told
                return
            with pytest.raises(Corrupt, match=r"operation 5 of run .* gave another result than its caller was told when it was computed again"):
                await api.runs.result(ME, run.id, 5, 120.0)
            await api.until_events(["run.broken"])
        engine.salt = ""
        async with open_api(tmp_path) as api:
            assert await api.results(run.id, 5) == told
            await api.train(run.id, 6, 6)

    play(tmp_path, story)


def test_a_load_that_fails_now_stops_the_run(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await loaded(api)
        cut(segment_of(tmp_path, run))
        for blob in engine.blobs.list("checkpoints"):
            engine.blobs.delete(blob.key)
        async with open_api(tmp_path) as api:
            with pytest.raises(Corrupt, match=r"operation 0 of run .* failed \(there is no blob .*\) when it was computed again"):
                await api.runs.result(ME, run.id, 0, 120.0)

    play(tmp_path, story)


def test_what_only_a_checkpoint_tells_of_stays_for_whoever_has_a_backup(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whether the caller was told that it failed stands nowhere."""
    caplog.set_level(logging.CRITICAL)

    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 4)
            await api.activity.stored(10)
            await api.database.write(lambda connection: unsettle(connection, 3))
        cut(segment_of(tmp_path, run))
        async with open_api(tmp_path) as api:
            with pytest.raises(Corrupt, match="ends with result 3, yet operation 4 was done: bring its directory back from a backup"):
                await api.runs.submit(ME, run.id, 5, operation(5))

    play(tmp_path, story)


async def loaded(api: Api) -> RunRow:
    """A run that began with the weights of another."""
    first = await api.new_run()
    await api.train(first.id, 1, 2)
    await save(api, first.id, 3)
    assert not any(isinstance(result, Failed) for result in await api.results(first.id, 3))
    end = await api.checkpoints.named(ME, first.id, NAMED, "end")
    run = await api.new_run(begins_with_load=True)
    await api.runs.load(ME, run.id, 0, end, optimizer=True)
    await api.results(run.id, 0)
    await api.activity.stored(10)
    return run


def unsettle(connection: Connection, seq: int) -> None:
    connection.execute(update(rows.run).values(settled_seq=seq))
