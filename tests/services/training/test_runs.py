"""What is accepted is executed once, in order, and answered; what cannot be is refused."""

import asyncio
import math
from pathlib import Path

import pytest
from sqlalchemy import update

from bloomery.services.access.repeats import Repeatable
from bloomery.services.training.active import Patience
from bloomery.services.training.backlog import MAX_WAITING
from bloomery.store import rows
from bloomery.types import protocol
from bloomery.types.errors import Conflict, Forbidden, InvalidInput, NotFound, NotSupported
from bloomery.types.operations import (
    Failed,
    ForwardBackward,
    ForwardBackwardResult,
    LoadCheckpoint,
    LoraSpec,
    Operation,
    OptimStepResult,
    SaveCheckpoint,
    SaveSnapshot,
    SnapshotResult,
)
from tests.services.fake_engine import CONTEXT, VOCABULARY, FakeEngine
from tests.services.runs_stage import LORA, ME, STRANGER, Api, datum, forward_backward, open_api, operation, pass_time, play, step, until


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


def test_a_gap_is_waited_for_then_given_up_and_the_sequence_moves_on(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path, Patience(gap_s=12.0)) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 2)
            for seq in (5, 6, 8):
                await api.runs.submit(ME, run.id, seq, operation(seq))
            assert "operation 3 did not arrive" in await api.runs.waiting_for(ME, run.id)
            assert await api.runs.result(ME, run.id, 3, 0.0) is None
            pass_time(12.0)
            three, four, five, six = await api.results(run.id, *range(3, 7))
            pass_time(12.0)
            seven, eight = await api.results(run.id, 7, 8)
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


def test_numbers_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            for seq in (-1, 0, MAX_WAITING + 1, 10**9):
                with pytest.raises(InvalidInput) as refused:
                    await api.runs.submit(ME, run.id, seq, step())
                assert refused.value.field == "seq"
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


def test_another_request_under_the_same_number_is_refused_and_the_same_one_changes_nothing(tmp_path: Path) -> None:
    async def submit(api: Api, run_id: str, seq: int, request: bytes) -> None:
        await api.runs.submit(ME, run_id, seq, operation(seq), request=request)

    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run(tinker_id="s:train:0", asked=b"rank 4")
            engine.gate.clear()
            await submit(api, run.id, 1, b"one")
            await asyncio.gather(submit(api, run.id, 1, b"one"), submit(api, run.id, 1, b""))
            with pytest.raises(Conflict, match="operation 1 was submitted before with another body") as refused:
                await submit(api, run.id, 1, b"two")
            assert refused.value.field == "seq"
            first, second = await asyncio.gather(submit(api, run.id, 2, b"one"), submit(api, run.id, 2, b"two"), return_exceptions=True)
            assert first is None
            assert isinstance(second, Conflict)
        async with open_api(tmp_path) as api:
            engine.gate.set()
            with pytest.raises(Conflict):
                await submit(api, run.id, 1, b"two")
            await api.results(run.id, 1, 2)
            for seq in range(3, 13):
                await submit(api, run.id, seq, b"one")
                await api.results(run.id, seq)
                await api.activity.stored(10)
            active = api.activity.get(run.id)
            assert active is not None
            # In checkpoints, so that the record of the operation itself goes.
            await until(lambda: not active.history.journal.has_operation(1))
            await submit(api, run.id, 1, b"one")
            with pytest.raises(Conflict):
                await submit(api, run.id, 1, b"two")
            assert (await api.new_run(tinker_id="s:train:0", asked=b"rank 4")).id == run.id
            with pytest.raises(Conflict) as taken:
                await api.new_run(tinker_id="s:train:0", asked=b"rank 64")
            assert taken.value.field == "model_seq_id"

    play(tmp_path, story)


def test_an_operation_that_fits_no_frame_fails_in_its_place_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 2)
            monkeypatch.setattr(protocol, "MAX_FRAME_BYTES", 4000)
            many = ForwardBackward(loss="cross_entropy", loss_config={}, data=(datum([1] * CONTEXT),) * 8)
            await api.runs.submit(ME, run.id, 3, many)
            failed, step, *_ = [*(await api.results(run.id, 3)), *(await api.train(run.id, 4, 6))]
            assert isinstance(failed, Failed)
            assert (failed.category, "at most 4000 bytes" in failed.message) == ("user", True)
            assert isinstance(step, Failed)
            assert [type(result) for result in await api.results(run.id, 5, 6)] == [ForwardBackwardResult, OptimStepResult]

    play(tmp_path, story)


def test_a_request_that_is_repeated_finds_the_run_it_made(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        once = Repeatable("once", "hash of the body")
        async with open_api(tmp_path) as api:
            run = await api.new_run(request=once)
        async with open_api(tmp_path) as api:
            assert (await api.new_run(request=once)).id == run.id
            with pytest.raises(Conflict, match=f"run `{run.id}` was created with this idempotency key and another body"):
                await api.new_run(request=Repeatable("once", "hash of another"))
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
                InvalidInput, match=r"trains 1000000000002000 parameters \(rank 0\) needs 34000000000068000 bytes of memory, this machine has \d+:"
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
            points = (await api.run_metrics.series(ME, run.id)).data
            assert isinstance(first, ForwardBackwardResult)
            assert [(point.seq, point.step) for point in points] == [(1, 0), (2, 1), (3, 1)]
            assert points[0].values["loss"] == pytest.approx(first.metrics["loss:sum"] / 2.0)
            assert points[0].values["seconds"] == 0.25
            assert points[1].values["grad_norm"] == 1.0
            assert "forward/loss" in points[2].values
            assert "loss" not in points[2].values
            await api.runs.snapshot(ME, run.id, 4)
            (published,) = await api.results(run.id, 4)
            (point,) = (await api.run_metrics.series(ME, run.id, after=3)).data
            assert isinstance(published, SnapshotResult)
            assert (point.seq, point.step, point.values) == (4, 1, published.sync() | {"sync/seconds": 0.25})

    play(tmp_path, story)


def test_a_run_is_shown_as_the_results_that_were_told_left_it(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            for seq in (2, 4, 6):
                await api.train(run.id, seq - 1, seq)
                assert (await api.runs.get(ME, run.id)).step == seq // 2

    play(tmp_path, story)
