"""What was accepted is executed once, in order, and answered, whoever dies in between."""

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import update

from bloomery.services.held import held_blobs
from bloomery.services.kinds import NAMED
from bloomery.services.training.active import Patience
from bloomery.services.training.run_rows import RunRow
from bloomery.services.training.settle import RestorePoint, restore_point
from bloomery.store import rows
from bloomery.store.journal import Journal, JournaledResult
from bloomery.types.errors import Corrupt
from bloomery.types.operations import (
    CheckpointResult,
    Failed,
    ForwardBackwardResult,
    OptimStepResult,
    Result,
)
from tests.services.fake_engine import FakeEngine
from tests.services.runs_stage import LORA, ME, Api, forward_backward, open_api, operation, play, until

LAST = 12
NEVER = RestorePoint(-1, "")
# Rows that wait for the same commit share one: on a fast machine the whole story has as few as eight.
_ALSO = ["journal.operation.written@5", "journal.result.written@3", "store.row.committed@5", "segment.dropped@1"]
POINTS = [
    "journal.operation.synced@6",
    "journal.result.synced@4",
    "checkpoint.row.committed@2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in _ALSO),
]


class Reference(NamedTuple):
    """What comes of the operations when nobody dies: results, and the weights at the end."""

    results: list[Result]
    state: str


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    directory, found = tmp_path_factory.mktemp("reference"), []

    async def story(engine: FakeEngine) -> None:
        async with open_api(directory) as api:
            run = await api.new_run()
            found.append(Reference(await api.train(run.id, 1, LAST), await _final_state(api, run.id)))

    play(directory, story)
    return found[0]


def test_an_engine_that_dies_changes_nothing(tmp_path: Path, reference: Reference) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            results = await api.train(run.id, 1, 5)
            engine.gate.clear()
            for seq in range(6, LAST + 1):
                await api.runs.submit(ME, run.id, seq, operation(seq))
            await engine.crash()
            engine.gate.set()
            await engine.start()
            results += await api.results(run.id, *range(6, LAST + 1))
            # Operation 4 was the last before a checkpoint: 5 was computed again, and nothing before it.
            assert [(message.checkpoint is not None, message.last_seq) for message in engine.opened] == [(False, 0), (True, 4)]
            again = [message.seq for message in engine.executed if message.replay]
            assert again == [5]
            assert await api.events() == []
            assert Reference(results, await _final_state(api, run.id)) == reference

    play(tmp_path, story)


def test_an_api_that_dies_finds_engine_and_futures_again(tmp_path: Path, reference: Reference) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 3)
            engine.gate.clear()
            for seq in range(4, LAST + 1):
                await api.runs.submit(ME, run.id, seq, operation(seq))
        engine.gate.set()
        async with open_api(tmp_path) as api:
            results = await api.results(run.id, *range(1, LAST + 1))
            assert [message.seq for message in engine.executed] == list(range(1, LAST + 1))
            assert len(engine.opened) == 1
            assert Reference(results, await _final_state(api, run.id)) == reference

    play(tmp_path, story)


def test_results_that_were_not_acknowledged_are_sent_again(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 2)
            engine.gate.clear()
            await api.runs.submit(ME, run.id, 3, operation(3))
            await until(lambda: bool(engine._queue))
        # Nobody is connected when it is done.
        engine.gate.set()
        await until(lambda: not engine._queue or len(engine.executed) == 3)
        async with open_api(tmp_path) as api:
            assert isinstance((await api.results(run.id, 3))[0], ForwardBackwardResult)
            await until(lambda: not engine.runs[run.id].unacknowledged)

    play(tmp_path, story)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_order_of_arrival_and_no_death_changes_the_history(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, reference: Reference
) -> None:
    directory = tmp_path_factory.mktemp("history")
    arrivals = data.draw(st.permutations([*range(1, LAST + 1), *data.draw(st.lists(st.integers(1, LAST), max_size=4))]))
    deaths = data.draw(st.dictionaries(st.integers(0, len(arrivals) - 1), st.sampled_from(["api", "engine", "connection", "both"]), max_size=3))

    async def story(engine: FakeEngine) -> None:
        run_id, start = None, 0
        for stop in [*sorted(deaths), len(arrivals)]:
            async with open_api(directory) as api:
                run_id = run_id or (await api.new_run()).id
                for seq in arrivals[start:stop]:
                    await api.runs.submit(ME, run_id, seq, operation(seq))
                if stop == len(arrivals):
                    results = await api.results(run_id, *range(1, LAST + 1))
                    assert Reference(results, await _final_state(api, run_id)) == reference
                    assert await api.events() == []
                elif deaths[stop] == "connection":
                    engine.hang_up()
                elif deaths[stop] == "engine":
                    await engine.crash()
                    await engine.start()
            start = stop
            if deaths.get(stop) == "both":
                await engine.crash()
                await engine.start()

    play(directory, story)


def test_a_gap_given_up_is_given_up_in_a_replay_too(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path, Patience(gap_s=0.05)) as api:
            run = await api.new_run()
            await api.runs.submit(ME, run.id, 2, forward_backward(2))
            before = await api.results(run.id, 1, 2)
            await engine.crash()
            await engine.start()
            await api.train(run.id, 3, 4)
            assert await api.results(run.id, 1, 2) == before
            assert await api.events() == []

    play(tmp_path, story)


def test_a_run_whose_replay_breaks_the_promise_of_equal_bits_is_stopped(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            results = await api.train(run.id, 1, 5)
            await engine.crash()
            engine.salt = "wrong"
            engine.gate.clear()
            await engine.start()
            await api.runs.submit(ME, run.id, 6, operation(6))
            engine.gate.set()
            with pytest.raises(Corrupt, match=r"operation 5 of run .* gave another result than its caller was told when it was computed again"):
                await api.runs.result(ME, run.id, 6, 120.0)
            await api.until_events(["run.diverged", "run.broken"])
            await until(lambda: run.id not in engine.runs)
            assert await api.results(run.id, 1, 2, 3, 4, 5) == results
            with pytest.raises(Corrupt):
                await api.runs.submit(ME, run.id, 7, operation(7))
        engine.salt = ""
        async with open_api(tmp_path) as api:
            assert isinstance((await api.results(run.id, 6))[0], OptimStepResult)
            assert (await api.runs.get(ME, run.id)).state == "active"

    play(tmp_path, story)


def test_a_checkpoint_behind_results_that_are_still_compared_is_no_point_to_begin_again_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(engine: FakeEngine) -> None:
        engine.checkpoint_every = 100
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            results = await api.train(run.id, 1, 6)
            await engine.crash()
            engine.salt, engine.salted_from, engine.checkpoint_every = "wrong", 6, 3
            result = Journal.result

            async def slow(journal: Journal, seq: int) -> JournaledResult:
                """As long as the engine takes to go on, and to save what it made of it."""
                if seq == 1 and engine.runs and engine.runs[run.id].last_seq >= 1:
                    await until(lambda: engine.runs[run.id].saved_seq == 6)
                return await result(journal, seq)

            monkeypatch.setattr(Journal, "result", slow)
            await engine.start()
            await api.until_events(["run.diverged", "run.broken"])
            monkeypatch.undo()
        engine.salt = ""
        async with open_api(tmp_path) as api:
            assert await api.results(run.id, *range(1, 7)) == results
            await api.train(run.id, 7, 7)
            assert engine.opened[-1].checkpoint is None

    play(tmp_path, story)


def test_a_save_that_fails_when_it_is_repeated_stops_nothing(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        engine.checkpoint_every = 100
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            results = await api.train(run.id, 1, 2)
            await api.runs.checkpoint(ME, run.id, 3, "end")
            results += await api.results(run.id, 3)
            await engine.crash()
            engine.full = True
            await engine.start()
            await api.train(run.id, 4, 5)
            await api.until_events(["run.diverged"])
            assert await api.results(run.id, 1, 2, 3) == results
            assert (await api.runs.get(ME, run.id)).state == "active"

    play(tmp_path, story)


@pytest.mark.parametrize("bit_exact", [True, False])
def test_other_numerics_and_plain_engines_may_answer_differently_and_are_noticed(tmp_path: Path, bit_exact: bool) -> None:
    async def story(engine: FakeEngine) -> None:
        engine.bit_exact = bit_exact
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            results = await api.train(run.id, 1, 5)
            await engine.crash()
            engine.salt = "other"
            if bit_exact:
                engine.numerics = "another machine"
            await engine.start()
            await api.until_events(["run.numerics_changed" if bit_exact else "run.diverged"])
            assert await api.results(run.id, 1, 2, 3, 4, 5) == results
            await api.train(run.id, 6, 6)

    play(tmp_path, story)


def test_a_load_that_cannot_be_repeated_stops_the_run_instead_of_training_it_from_fresh_weights(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path, Patience(reopen_s=0.02)) as api:
            run, key = await _loaded(api)
            await api.train(run.id, 1, 1)
            await engine.crash()
            for name in [key, *(blob.key for blob in engine.blobs.list(f"checkpoints/{run.id}"))]:
                engine.blobs.delete(name)
            engine.numerics = "another machine"
            await engine.start()
            await api.runs.submit(ME, run.id, 2, operation(2))
            with pytest.raises(Corrupt, match=r"operation 0 of run .* failed \(.*\) when it was computed again"):
                await api.runs.result(ME, run.id, 2, 120.0)
            await until_broken(api, run.id)

    play(tmp_path, story)


def test_loaded_weights_that_were_deleted_are_held_until_no_replay_needs_them(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run, key = await _loaded(api)
            await api.checkpoints.delete(ME, f"tinker://{run.metadata['from']}/weights/end")
            await api.activity.stored(10)
            assert key in await api.database.read(held_blobs)
            await api.train(run.id, 1, 4)
            await api.activity.stored(10)
            assert key not in await api.database.read(held_blobs)
            await until(lambda: not engine.blobs.exists(key))

    play(tmp_path, story)


async def until_broken(api: Api, run_id: str) -> None:
    """Let others work until the row says so, which is written when those who waited know already."""
    async with asyncio.timeout(60):
        while (await api.runs.get(ME, run_id)).state != "broken":
            await asyncio.sleep(0.002)


async def _loaded(api: Api) -> tuple[RunRow, str]:
    """A run that began with another one's weights, and the blob of those."""
    first = await api.new_run()
    await api.train(first.id, 1, 2)
    await api.runs.checkpoint(ME, first.id, 3, "end")
    await api.results(first.id, 3)
    # So that no replay saves it again.
    await api.runs.unload(ME, first.id)
    end = await api.checkpoints.named(ME, first.id, NAMED, "end")
    run = await api.runs.create(ME, base_model="tiny", lora=LORA, metadata={"from": first.id}, begins_with_load=True)
    await api.runs.load(ME, run.id, 0, end, optimizer=True)
    await api.results(run.id, 0)
    return run, end.key


@pytest.mark.parametrize("settled", [True, False])
def test_a_run_whose_journal_is_lost_is_broken_and_does_not_begin_again(tmp_path: Path, settled: bool) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 4)
            await api.activity.stored(10)
            if not settled:
                # As if the process had died before the rows followed: the checkpoint's row alone tells of operation 4.
                await api.database.write(lambda connection: connection.execute(update(rows.run).values(settled_seq=0)))
        shutil.rmtree(tmp_path / "runs" / run.id)
        async with open_api(tmp_path) as api:
            with pytest.raises(Corrupt, match="has no results, yet operation 4 was done"):
                await api.runs.submit(ME, run.id, 5, operation(5))
            assert (await api.runs.get(ME, run.id)).state == "broken"

    play(tmp_path, story)


def test_an_operation_that_failed_fails_again_in_a_replay(tmp_path: Path) -> None:
    """Also when the engine would succeed now: the caller was told that it did not happen."""

    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path, Patience(reopen_s=0.02)) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 4)
            engine.refuse_to_open = "no memory"
            await engine.crash()
            await engine.start()
            await api.runs.submit(ME, run.id, 5, operation(5))
            (failed,) = await api.results(run.id, 5)
            assert failed == Failed(message="the engine cannot open the run: no memory", category="server")
            assert (await api.runs.get(ME, run.id)).state == "broken"
            engine.refuse_to_open = None
            six, *rest = await api.train(run.id, 6, 8)
            assert isinstance(six, Failed)
            assert isinstance(rest[1], OptimStepResult)
            assert await api.results(run.id, 5) == [failed]
            assert (await api.runs.get(ME, run.id)).state == "active"
            assert await api.events() == ["run.broken", "run.active"]

    play(tmp_path, story)


def test_an_unreadable_checkpoint_is_replaced_by_the_one_before(tmp_path: Path, reference: Reference) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path, Patience(reopen_s=0.02)) as api:
            run = await api.new_run()
            await api.train(run.id, 1, LAST - 1)
            await api.activity.stored(10)
            newest = max(engine.blobs.list(f"checkpoints/{run.id}"), key=lambda blob: int(blob.key.split("/")[-1].split("-")[0]))
            await engine.crash()
            engine.blobs.delete(newest.key)
            await engine.start()
            await api.train(run.id, LAST, LAST)
            assert engine.opened[-1].last_seq < engine.opened[-2].last_seq
            results = await api.results(run.id, *range(1, LAST + 1))
            assert Reference(results, await _final_state(api, run.id)) == reference

    play(tmp_path, story)


def test_payloads_before_the_checkpoints_are_dropped_and_results_stay(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            results = []
            for first in range(1, 41, 4):
                results += await api.train(run.id, first, first + 3)
                await api.activity.stored(10)
            kept = [int(path.stem.split("-")[1]) for path in (tmp_path / "runs" / run.id).glob("ops-*")]
            assert min(kept, default=99) > 20
            await until(lambda: len(engine.blobs.list(f"checkpoints/{run.id}")) == 2)
            assert await api.results(run.id, *range(1, 41)) == results
        async with open_api(tmp_path) as api:
            assert await api.results(run.id, *range(1, 41)) == results
            await api.train(run.id, 41, 42)

    play(tmp_path, story)


def test_a_damaged_journal_breaks_its_run_and_no_other(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            broken, healthy = await api.new_run(), await api.new_run()
            for run in (broken, healthy):
                await api.train(run.id, 1, 3)
            engine.gate.clear()
            for run in (broken, healthy):
                await api.runs.submit(ME, run.id, 4, operation(4))
        engine.gate.set()
        segment = next((tmp_path / "runs" / broken.id).glob("ops-*"))
        content = bytearray(segment.read_bytes())
        content[40] ^= 1
        segment.write_bytes(content)
        async with open_api(tmp_path) as api:
            await api.results(healthy.id, 4)
            with pytest.raises(Corrupt, match=f"{segment.name}.*offset 0"):
                await api.runs.result(ME, broken.id, 1, 1.0)
            shown = await api.runs.get(ME, broken.id)
            assert shown.state == "broken"
            assert segment.name in str(shown.error)

    play(tmp_path, story)


def test_a_run_can_leave_the_engine_and_come_back(tmp_path: Path, reference: Reference) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            results = await api.train(run.id, 1, 8)
            await api.runs.unload(ME, run.id)
            assert engine.runs == {}
            assert api.activity.get(run.id) is None
            assert await api.results(run.id, 3) == [results[2]]
            assert len(engine.opened) == 1, "looking at results does not need the engine"
            results += await api.train(run.id, 9, LAST)
            assert [message.seq for message in engine.executed if message.replay] == []
            assert Reference(results, await _final_state(api, run.id)) == reference

    play(tmp_path, story)


def test_runs_that_nobody_asked_for_since_the_start_leave_the_engine_too(tmp_path: Path, reference: Reference) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            results = await api.train(run.id, 1, 2)
            await api.activity.stored(10)
        async with open_api(tmp_path) as api:
            await api.link.wait_ready()
            assert list(engine.runs) == [run.id]
            await api.activity.tidy()
            await until(lambda: engine.runs == {})
            results += await api.train(run.id, 3, LAST)
            assert [(order.checkpoint is not None, order.last_seq) for order in engine.opened] == [(False, 0), (True, 2)]
            assert Reference(results, await _final_state(api, run.id)) == reference

    play(tmp_path, story)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_an_api_killed_at_any_durable_boundary_loses_nothing_it_acknowledged(tmp_path: Path, point: str, reference: Reference) -> None:
    async def story(engine: FakeEngine) -> None:
        marker = tmp_path / "marker"
        died, told = await _run_child(tmp_path, {"BLOOMERY_FAILPOINTS": f"{point}:{marker}"})
        assert died == -signal.SIGKILL
        assert marker.exists()
        submitted = {int(words[1]) for words in told if words[0] == "submitted"}
        seen = {int(words[1]): words[2] for words in told if words[0] == "result"}
        finished, told = await _run_child(tmp_path, {})
        assert finished == 0
        again = {int(words[1]): words[2] for words in told if words[0] == "result"}
        assert submitted <= {int(words[1]) for words in told if words[0] == "known"}
        assert seen.items() <= again.items()
        assert again == {seq: _mark(result) for seq, result in enumerate(reference.results, 1)}
        assert told[-1] == ["state", reference.state]

    play(tmp_path, story)


async def child(directory: Path) -> None:
    """An api with a client that submits, resumes and asks; prints what it was told."""
    async with open_api(directory) as api:
        run = await api.new_run(tinker_id="victim:train:0")
        for seq in range(1, run.next_seq):
            print("known", seq, flush=True)
        for seq in range(run.next_seq, LAST + 1):
            await api.runs.submit(ME, run.id, seq, operation(seq))
            print("submitted", seq, flush=True)
            if seq % 4 == 0:
                print("result", seq, _mark((await api.results(run.id, seq))[0]), flush=True)
                while (await api.database.read(lambda connection: restore_point(connection, run.id, done=LAST)) or NEVER).seq < seq:
                    await asyncio.sleep(0.01)
        for seq, result in enumerate(await api.results(run.id, *range(1, LAST + 1)), 1):
            print("result", seq, _mark(result), flush=True)
        await api.activity.stored(10)
        print("state", await _final_state(api, run.id), flush=True)


async def _run_child(directory: Path, environment: dict[str, str]) -> tuple[int, list[list[str]]]:
    program = (
        "import asyncio, sys; from pathlib import Path; from tests.services.training.test_replay import child; asyncio.run(child(Path(sys.argv[1])))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(directory), env={**os.environ, **environment}, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    # The last line of a killed process may be half a line.
    return process.returncode or 0, [line.split() for line in said.decode().splitlines(keepends=True) if line.endswith("\n")]


def _mark(result: Result) -> str:
    """A result in a word."""
    match result:
        case ForwardBackwardResult() | OptimStepResult():
            return repr(sorted(result.metrics.items())).replace(" ", "")
        case _:
            return repr(result).replace(" ", "")


async def _final_state(api: Api, run_id: str) -> str:
    """Hash of the weights after operation `LAST`."""
    await api.runs.checkpoint(ME, run_id, LAST + 1, "end")
    (saved,) = await api.results(run_id, LAST + 1)
    assert isinstance(saved, CheckpointResult)
    return saved.digest
