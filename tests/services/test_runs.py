"""What was accepted is executed once, in order, and answered, whoever dies in between."""

import asyncio
import math
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import update

from bloomery.services.active import Patience
from bloomery.services.history import MAX_WAITING
from bloomery.services.run_rows import Repeatable
from bloomery.services.settle import RestorePoint, restore_point
from bloomery.store import rows
from bloomery.types.errors import Conflict, Corrupt, Forbidden, InvalidInput, NotFound, NotSupported
from bloomery.types.operations import (
    CheckpointResult,
    Failed,
    ForwardBackward,
    ForwardBackwardResult,
    LoadCheckpoint,
    LoraSpec,
    Operation,
    OptimStepResult,
    Result,
    SaveCheckpoint,
    SaveSnapshot,
)
from tests.services.fake_engine import CONTEXT, VOCABULARY, FakeEngine
from tests.services.runs_stage import LORA, ME, STRANGER, Api, datum, forward_backward, open_api, operation, play, step, until

LAST = 12
NEVER = RestorePoint(-1, "")
_ALSO = ["journal.operation.written@5", "journal.result.written@3", "store.row.committed@9", "segment.dropped@1"]
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


def test_operations_run_in_order_and_are_answered_again_and_again(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run(name="first")
            results = await api.train(run.id, 1, 6)
            assert [type(result) for result in results] == [ForwardBackwardResult, OptimStepResult] * 3
            assert await api.results(run.id, *range(1, 7)) == results
            assert [message.seq for message in engine.executed] == [1, 2, 3, 4, 5, 6]
            await api.activity.stored(10)
            shown = await api.runs.get(ME, run.id)
            assert (shown.step, shown.next_seq, shown.name, shown.settled_seq) == (3, 7, "first", 6)
        async with open_api(tmp_path) as api:
            assert await api.results(run.id, *range(1, 7)) == results
        assert len(engine.executed) == 6

    play(tmp_path, story)


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


def test_a_gap_is_waited_for_then_given_up_and_the_sequence_moves_on(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path, Patience(gap_s=0.2)) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 2)
            for seq in (5, 6, 8):
                await api.runs.submit(ME, run.id, seq, operation(seq))
            assert "operation 3 did not arrive" in await api.runs.waiting_for(ME, run.id)
            assert await api.runs.result(ME, run.id, 3, 0.0) is None
            three, four, five, six, seven, eight = await api.results(run.id, *range(3, 9))
            for given_up in (three, four, seven):
                assert isinstance(given_up, Failed)
                assert given_up.category == "user"
                assert "did not arrive" in given_up.message
            # What was given up spoils the next step, like any failed computation; 7 spoils 8.
            assert isinstance(five, ForwardBackwardResult)
            assert isinstance(six, Failed)
            assert isinstance(eight, Failed)
            await api.runs.submit(ME, run.id, 4, operation(4))
            assert await api.results(run.id, 4) == [four]
            assert isinstance((await api.train(run.id, 9, 10))[1], OptimStepResult)

    play(tmp_path, story)


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


def test_numbers_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            for seq in (-1, 0, MAX_WAITING + 1, 10**9):
                with pytest.raises(InvalidInput) as refused:
                    await api.runs.submit(ME, run.id, seq, step())
                assert refused.value.field == "seq_id"
            with pytest.raises(NotFound, match="no operation 1"):
                await api.runs.result(ME, run.id, 1, 0.0)
            await api.train(run.id, 1, 2)

    play(tmp_path, story)


def test_runs_belong_to_their_project_and_keys_to_their_scopes(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run(tinker_id="session-1:train:0", session_id="session-1")
            for verb in (api.runs.get(STRANGER, run.id), api.runs.submit(STRANGER, run.id, 1, step()), api.runs.result(STRANGER, run.id, 1, 0.0)):
                with pytest.raises(NotFound):
                    await verb
            assert (await api.runs.list(STRANGER)).total == 0
            with pytest.raises(Forbidden, match="train"):
                await api.runs.submit(ME._replace(scopes=frozenset({"read"})), run.id, 1, step())
            await api.runs.submit(ME, "session-1:train:0", 1, operation(1))
            assert (await api.runs.get(ME, "session-1:train:0")).tinker_id == "session-1:train:0"
            assert [found.id for found in (await api.runs.list(ME, session_id="session-1")).runs] == [run.id]

    play(tmp_path, story)


def test_creating_under_the_same_tinker_id_gives_the_same_run(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            first, second = [await api.new_run(tinker_id="s:train:0") for _ in range(2)]
            assert first.id == second.id
            assert (await api.runs.list(ME)).total == 1

    play(tmp_path, story)


def test_a_request_that_is_repeated_finds_the_run_it_made(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        once = Repeatable("once", "hash of the body")
        async with open_api(tmp_path) as api:
            run = await api.new_run(request=once)
        async with open_api(tmp_path) as api:
            assert (await api.new_run(request=once)).id == run.id
            with pytest.raises(Conflict, match=f"run `{run.id}` was created with this idempotency key and another body"):
                await api.new_run(request=once._replace(hash="of another"))
            assert (await api.runs.list(ME)).total == 1
            theirs = await api.runs.create(STRANGER, base_model="tiny", lora=LORA, metadata={}, request=once)
            assert theirs.id != run.id
            # A request's key is no name of the run.
            with pytest.raises(NotFound):
                await api.runs.get(ME, "once")
            assert (await api.runs.get(ME, run.id)).tinker_id is None

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("lora", "field"),
    [
        (LoraSpec(rank=-1, seed=0), "rank"),
        (LoraSpec(rank=10**9, seed=0), "rank"),
        (LoraSpec(rank=0, seed=0, alpha=16.0), "alpha"),
        (LoraSpec(rank=4, seed=-1), "seed"),
        (LoraSpec(rank=4, seed=0, alpha=float("nan")), "alpha"),
        (LoraSpec(rank=4, seed=0, train_attn=False, train_mlp=False, train_unembed=False), "train_attn"),
    ],
)
def test_a_run_that_cannot_be_is_not_created(tmp_path: Path, lora: LoraSpec, field: str) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            with pytest.raises((InvalidInput, NotSupported)) as refused:
                await api.runs.create(ME, base_model="tiny", lora=lora, metadata={})
            assert refused.value.field == field
            with pytest.raises(NotFound, match="`tiny`"):
                await api.runs.create(ME, base_model="giant", lora=LORA, metadata={})
            assert (await api.runs.list(ME)).total == 0

    play(tmp_path, story)


def test_a_run_of_all_parameters_is_refused_where_there_is_no_memory_for_it(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            await api.link.wait_ready()
            await api.link.wait_ready()
            with pytest.raises(
                InvalidInput, match=r"trains 1000000000002000 parameters \(rank 0\) needs 32000000000064000 bytes of memory, \d+ are free"
            ):
                await api.runs.create(ME, base_model="tiny", lora=LoraSpec(rank=0, seed=0), metadata={})
            fits = LoraSpec(rank=0, seed=0, train_attn=False)
            run = await api.runs.create(ME, base_model="tiny", lora=fits, metadata={}, tinker_id="t")
            assert run.lora == fits
            # Its memory is its own: whoever repeats the request is not asked for as much again.
            request = Repeatable("key", "hash")
            made = await api.runs.create(ME, base_model="tiny", lora=fits, metadata={}, request=request)
            again = await api.runs.create(ME, base_model="tiny", lora=LoraSpec(rank=0, seed=0), metadata={}, request=request)
            assert again.id == made.id

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (step(math.nan), "`learning_rate` is nan"),
        (ForwardBackward(loss="cross_entropy", loss_config={}, data=()), "data is empty"),
        (ForwardBackward(loss="cross_entropy", loss_config={}, data=(datum([1, VOCABULARY]),)), f"token id {VOCABULARY}"),
        (ForwardBackward(loss="guess", loss_config={}, data=(datum([1]),)), "unknown loss `guess`"),
        (ForwardBackward(loss="cross_entropy", loss_config={}, data=(datum([1] * (CONTEXT + 1)),)), f"context is {CONTEXT}"),
    ],
)
def test_an_impossible_operation_fails_in_its_place_and_the_run_goes_on(tmp_path: Path, bad: Operation, says: str) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 2)
            await api.runs.submit(ME, run.id, 3, bad)
            (failed,) = await api.results(run.id, 3)
            assert isinstance(failed, Failed)
            assert failed.category == "user"
            assert says in failed.message
            assert isinstance((await api.train(run.id, 4, 6))[2], OptimStepResult)

    play(tmp_path, story)


def test_saving_and_loading_have_verbs_of_their_own(tmp_path: Path) -> None:
    """Else a caller could name blobs."""

    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            for operation in (
                SaveCheckpoint(key="checkpoints/x"),
                LoadCheckpoint(key="checkpoints/x", optimizer=True),
                SaveSnapshot(template_hash=""),
            ):
                with pytest.raises(InvalidInput, match="by name"):
                    await api.runs.submit(ME, run.id, 1, operation)
            assert (await api.runs.get(ME, run.id)).next_seq == 1

    play(tmp_path, story)


def test_a_busy_run_is_not_unloaded(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            engine.gate.clear()
            await api.runs.submit(ME, run.id, 1, operation(1))
            with pytest.raises(Conflict, match="without a result"):
                await api.runs.unload(ME, run.id)
            engine.gate.set()
            await api.results(run.id, 1)

    play(tmp_path, story)


def test_an_engine_that_answers_differently_is_noticed(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            results = await api.train(run.id, 1, 5)
            await engine.crash()
            engine.salt = "wrong"
            await engine.start()
            await api.until_events(["run.diverged"])
            engine.numerics = "another machine"
            await engine.crash()
            await engine.start()
            await api.until_events(["run.diverged", "run.numerics_changed"])
            assert await api.results(run.id, 1, 2, 3, 4, 5) == results

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


def test_a_run_whose_base_is_not_served_any_more_keeps_its_history(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            results = await api.train(run.id, 1, 2)
            elsewhere = update(rows.run).where(rows.run.c.id == run.id).values(base_hash="gone")
            await api.database.write(lambda connection: connection.execute(elsewhere))
        async with open_api(tmp_path) as api:
            assert await api.results(run.id, 1, 2) == results
            with pytest.raises(NotFound, match="base model gone is not served: start the server with `--model DIR` of that base"):
                await api.runs.submit(ME, run.id, 3, operation(3))
            assert (await api.runs.get(ME, run.id)).next_seq == 3

    play(tmp_path, story)


def test_a_run_waits_for_its_engine_and_says_so(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        await engine.crash()
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.runs.submit(ME, run.id, 1, operation(1))
            assert await api.runs.result(ME, run.id, 1, 0.01) is None
            assert "is not connected" in await api.runs.waiting_for(ME, run.id)
            await engine.start()
            await api.results(run.id, 1)

    play(tmp_path, story)


def test_metrics_of_results_become_points_of_curves(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            first, _ = await api.train(run.id, 1, 2)
            await api.runs.submit(ME, run.id, 3, forward_backward(backward=False))
            await api.results(run.id, 3)
            await api.activity.stored(10)
            points = (await api.metrics.series(ME, run.id)).data
            assert isinstance(first, ForwardBackwardResult)
            assert [(point.seq, point.step) for point in points] == [(1, 0), (2, 1), (3, 1)]
            assert points[0].values["loss"] == pytest.approx(first.metrics["loss:sum"] / 2.0)
            assert points[0].values["seconds"] == 0.25
            assert points[1].values["grad_norm"] == 1.0
            assert "forward/loss" in points[2].values
            assert "loss" not in points[2].values

    play(tmp_path, story)


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
    program = "import asyncio, sys; from pathlib import Path; from tests.services.test_runs import child; asyncio.run(child(Path(sys.argv[1])))"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(directory), env={**os.environ, **environment}, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    return process.returncode or 0, [line.split() for line in said.decode().splitlines()]


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


def test_a_run_is_shown_as_the_results_that_were_told_left_it(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            for seq in (2, 4, 6):
                await api.train(run.id, seq - 1, seq)
                assert (await api.runs.get(ME, run.id)).step == seq // 2

    play(tmp_path, story)
