"""Results are bounded in bytes, and what goes is told apart from what never was."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bloomery.services.training import history
from bloomery.store.journal import Bounds, Journal
from bloomery.types.errors import Gone
from bloomery.types.operations import OptimStepResult
from bloomery.types.protocol import OperationDone
from tests.services.fake_engine import FakeEngine
from tests.services.runs_stage import ME, Api, open_api, operation, play, until

FEW = Bounds(most_bytes=4000, segment_bytes=1)
"""Each result in a segment of its own, and room for some."""
NONE = Bounds(most_bytes=0, segment_bytes=1)


async def done(api: Api, run_id: str, first: int, last: int, *, asked: bool) -> None:
    """Operations one after the other, so that each result is a segment; asked for or not."""
    for seq in range(first, last + 1):
        await api.runs.submit(ME, run_id, seq, operation(seq))
        if asked:
            await api.results(run_id, seq)
        active = api.activity.get(run_id)
        assert active is not None
        await until(lambda active=active, seq=seq: active.history.done >= seq and not active.history.unsettled)


def held(api: Api, run_id: str, last: int) -> list[int]:
    run = api.activity.get(run_id)
    assert run is not None
    return [seq for seq in range(1, last + 1) if run.history.journal.has_result(seq)]


def test_results_that_were_fetched_make_room_for_those_that_were_not(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path, bounds=FEW) as api:
            run = await api.new_run()
            await done(api, run.id, 1, 2, asked=False)
            await done(api, run.id, 3, 40, asked=True)
            active = api.activity.get(run.id)
            assert active is not None
            assert active.history.journal.result_bytes < 2 * FEW.most_bytes
            kept = held(api, run.id, 40)
            assert kept[:2] == [1, 2]
            assert 3 not in kept
            assert kept[2:] == [*range(kept[2], 41)]
            assert (await api.results(run.id, 1, 40))[1] == OptimStepResult(metrics={"grad_norm": 1.0, "step": 20.0})
            with pytest.raises(Gone, match="the result of operation 3 was dropped and cannot be had again, what the operation did stays"):
                await api.runs.result(ME, run.id, 3, 0.0)

    play(tmp_path, story)


def test_rows_that_are_late_keep_their_own_results_and_none_that_are_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path, bounds=Bounds(segment_bytes=1)) as api:
            run = await api.new_run()
            await done(api, run.id, 1, 24, asked=True)
            with monkeypatch.context() as late:
                late.setattr(history, "settle", _no_room)
                await _keep_what_is_late(api, run.id)
            active = api.activity.get(run.id)
            assert active is not None
            await active.stored()
            assert not active.history.unsettled

    play(tmp_path, story)


def _no_room(*_: object) -> None:
    raise OSError("no room for rows")


async def _keep_what_is_late(api: Api, run_id: str) -> None:
    await api.runs.submit(ME, run_id, 25, operation(25))
    active = api.activity.get(run_id)
    assert active is not None
    await until(lambda: set(active.history.unsettled) == {25})
    late_us = active.history.unsettled[25].done.done_us
    await active.history.drop_old_results(late_us + 1)
    assert held(api, run_id, 25) == [*range(1, 26)]
    await active.history.drop_old_results(late_us)
    assert 1 not in held(api, run_id, 25)
    assert 25 in held(api, run_id, 25)


def test_a_replay_finds_the_results_that_it_needs(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path, bounds=NONE) as api:
            run = await api.new_run()
            await done(api, run.id, 1, 13, asked=True)
            kept = held(api, run.id, 13)
            assert 1 not in kept
            state = engine.runs[run.id].state
            await engine.crash()
            await engine.start()
            await done(api, run.id, 14, 14, asked=True)
            assert engine.runs[run.id].step == 7
            assert (await api.runs.get(ME, run.id)).state == "active"
            assert await api.events() == []
            assert state != engine.runs[run.id].state
        async with open_api(tmp_path, bounds=NONE) as api:
            assert await api.train(run.id, 15, 16)

    play(tmp_path, story)


class Overtaken(ThreadPoolExecutor):
    """Before it reads the first result, others need its room."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(1)
        self._journal = journal

    def submit(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> "Future[Any]":
        if arguments == (1,):
            super().submit(self._journal._results.drop_only, {1})
        return super().submit(call, *arguments, **named)


def test_a_result_that_comes_again_while_the_one_it_is_compared_with_is_dropped_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path, bounds=Bounds(segment_bytes=1)) as api:
            run = await api.new_run()
            await done(api, run.id, 1, 24, asked=True)
            active = api.activity.get(run.id)
            assert active is not None
            journal = active.history.journal
            again = OperationDone(run_id=run.id, seq=1, result=(await journal.result(1)).result, seconds=0.25)
            with Overtaken(journal) as pool:
                journal._pool = pool
                engine._post(again)
                await until(lambda: not journal.has_result(1))
                await active.stored()

    play(tmp_path, story)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_runs_that_nobody_uses_are_bounded_when_housekeeping_first_looks(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path, bounds=Bounds(segment_bytes=1)) as api:
            run = await api.new_run()
            await done(api, run.id, 1, 24, asked=True)
            assert held(api, run.id, 24) == [*range(1, 25)]
        async with open_api(tmp_path, bounds=NONE) as api:
            before = len(list((tmp_path / "runs" / run.id).glob("results-*")))
            await api.activity.tidy()
            assert len(list((tmp_path / "runs" / run.id).glob("results-*"))) < before
            assert await api.train(run.id, 25, 26)

    play(tmp_path, story)
