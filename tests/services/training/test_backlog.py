"""What waits for an engine is bounded in bytes, of each run and of all, and nobody waits for room that cannot come."""

import asyncio
from pathlib import Path
from typing import Final

import pytest

from bloomery.services.training import backlog, history, place
from bloomery.services.training.active import Patience
from bloomery.services.training.backlog import Backlog, RunBacklog
from bloomery.types.errors import TooLarge, Unavailable
from bloomery.types.operations import Failed, Rejected
from tests.services.fake_engine import FakeEngine
from tests.services.runs_stage import ME, Api, forward_backward, open_api, pass_time, play, step, until

EACH: Final = forward_backward().input_bytes
ROOM: Final = 3


@pytest.fixture(autouse=True)
def room_for_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "MAX_WAITING_BYTES", ROOM * EACH)
    monkeypatch.setattr(history, "MAX_WAITING_BYTES", ROOM * EACH)


async def learn(api: Api, run_id: str, *seqs: int) -> None:
    for seq in seqs:
        await api.runs.submit(ME, run_id, seq, forward_backward(seq))


def held_back(engine: FakeEngine) -> list[int]:
    """What the engine got and did not begin."""
    return [message.seq for message in engine._queue]


def test_while_the_engine_is_at_work_more_bytes_wait_outside_and_come_in_as_results_come_out(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            engine.gate.clear()
            await learn(api, run.id, 1, 2, 3)
            with pytest.raises(Unavailable, match=f"operations of run `{run.id}` with .* wait for the engine, and .* go on when some have a result"):
                await learn(api, run.id, 4)
            # What is there already is no more than it was, and what has no payload takes no room.
            await learn(api, run.id, 3)
            await api.runs.submit(ME, run.id, 5, step())
            engine.gate.set()
            await api.results(run.id, 3)
            await learn(api, run.id, 4)
            assert not any(isinstance(result, Failed) for result in await api.results(run.id, *range(1, 6)))

    play(tmp_path, story)


def test_however_many_come_at_once_no_more_than_the_bound_is_taken(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            engine.gate.clear()
            await learn(api, run.id, 1)
            told = await asyncio.gather(*(learn(api, run.id, seq) for seq in range(2, 12)), return_exceptions=True)
            assert [answer for answer in told if answer is None] == [None] * (ROOM - 1)
            assert all(isinstance(answer, Unavailable) for answer in told if answer is not None)

    play(tmp_path, story)


def test_what_is_computed_next_is_taken_however_large_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "MAX_WAITING_BYTES", 1)

    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            for seq in range(1, 4):
                await learn(api, run.id, seq)
                assert not any(isinstance(result, Failed) for result in await api.results(run.id, seq))

    play(tmp_path, story)


def test_pieces_behind_one_that_comes_last_are_taken_up_to_the_bound_and_beyond_it_refused_for_good(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await learn(api, run.id, 2, 3, 4)
            with pytest.raises(TooLarge, match=f"what arrived before operation 1 of run `{run.id}` has more than .*: send less in one call"):
                await learn(api, run.id, 5)
            await learn(api, run.id, 1)
            await api.results(run.id, 1, 2, 3, 4)
            await learn(api, run.id, 5)
            await api.results(run.id, 5)

    play(tmp_path, story)


def test_no_gap_is_given_up_while_the_one_that_is_missing_was_told_to_come_again(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path, Patience(gap_s=12.0)) as api:
            run = await api.new_run()
            engine.gate.clear()
            await learn(api, run.id, 1, 2, 3)
            await api.runs.submit(ME, run.id, 5, step())
            for _ in range(6):
                with pytest.raises(Unavailable):
                    await learn(api, run.id, 4)
                pass_time(4.0)
                await asyncio.sleep(0.02)
            engine.gate.set()
            await api.results(run.id, 3)
            await learn(api, run.id, 4)
            assert not any(isinstance(result, Failed) for result in await api.results(run.id, 4, 5))

    play(tmp_path, story)


def test_what_waited_in_a_life_before_counts_and_what_is_stopped_does_not(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            engine.gate.clear()
            await learn(api, run.id, 1, 2, 3)
        async with open_api(tmp_path) as api:
            active = await api.activity.take_up(run.id)
            assert api.activity._backlog.bytes >= ROOM * EACH
            with pytest.raises(Unavailable):
                await learn(api, run.id, 4)
            active.history.fail("as if it were damaged")
            assert api.activity._backlog.bytes == 0

    play(tmp_path, story)


def test_the_more_runs_wait_the_less_of_each_and_whoever_comes_late_finds_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "MAX_WAITING_BYTES", 1000)
    monkeypatch.setattr(backlog, "MAX_WAITING_BYTES_OF_ALL", 1200)
    whole = Backlog()
    runs = [RunBacklog(whole) for _ in range(3)]
    for _ in range(100):
        for seq, run in enumerate(runs[:2]):
            if run.bytes + 10 <= run.most_bytes:
                run.add(1000 * run.bytes + seq, 10)
    assert [run.bytes for run in runs] == [400, 400, 0]
    assert runs[2].most_bytes == 400
    runs[0].forget()
    assert (whole.bytes, runs[2].most_bytes) == (400, 800)


def test_an_engine_holds_few_bytes_of_what_waits_and_gets_the_rest_as_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "IN_FLIGHT_BYTES", 2 * EACH)

    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            engine.gate.clear()
            await learn(api, run.id, 1, 2, 3)
            await until(lambda: held_back(engine) == [1, 2])
            await api.runs.submit(ME, run.id, 4, step())
            assert held_back(engine) == [1, 2]
            engine.gate.set()
            assert not any(isinstance(result, Failed) for result in await api.results(run.id, 1, 2, 3, 4))

    play(tmp_path, story)


def test_operations_that_wait_are_held_in_memory_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT_BYTES", 2 * EACH)

    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            engine.gate.clear()
            await learn(api, run.id, 1, 2, 3)
            active = await api.activity.take_up(run.id)
            assert list(active.history._recent) == [1, 2]
            engine.gate.set()
            assert [message.seq for message in engine.executed] == []
            assert not any(isinstance(result, Failed) for result in await api.results(run.id, 1, 2, 3))

    play(tmp_path, story)


def test_pieces_of_many_runs_behind_those_that_come_last_have_no_more_than_all_runs_may_and_all_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "MAX_WAITING_BYTES_OF_ALL", 2 * ROOM * EACH)

    async def send(api: Api, run_id: str) -> None:
        for seq in (2, 3, 4, 1):
            while True:
                try:
                    await learn(api, run_id, seq)
                    break
                except Unavailable:
                    await asyncio.sleep(0.002)
        assert not any(isinstance(result, Failed) for result in await api.results(run_id, 1, 2, 3, 4))

    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            runs = [await api.new_run() for _ in range(5)]
            # Every one gets a part first, so that none is whole.
            told = [await asyncio.gather(learn(api, run.id, seq), return_exceptions=True) for seq in (2, 3, 4) for run in runs]
            refused = [str(answer) for (answer,) in told if answer is not None]
            assert len(told) - len(refused) == 2 * ROOM
            assert all("wait for operation 1, and those of all runs have no room for more at present" in each for each in refused)
            assert api.activity._backlog.bytes == 2 * ROOM * EACH
            await asyncio.gather(*(send(api, run.id) for run in runs))
            assert api.activity._backlog.bytes == 0

    play(tmp_path, story)


def test_refusals_count_by_what_they_say_and_one_that_says_little_is_taken_in_any_case(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            engine.gate.clear()
            await learn(api, run.id, 1, 2)
            before = api.activity._backlog.bytes
            with pytest.raises(Unavailable, match="wait for the engine"):
                await api.runs.submit(ME, run.id, 3, Rejected(message="x" * (ROOM * EACH + backlog.SMALL_BYTES)))
            assert api.activity._backlog.bytes == before
            said = "y" * (ROOM * EACH)
            await api.runs.submit(ME, run.id, 3, Rejected(message=said))
            assert api.activity._backlog.bytes > before + len(said)
            with pytest.raises(Unavailable, match="wait for the engine"):
                await learn(api, run.id, 4)
            engine.gate.set()
            assert [isinstance(result, Failed) for result in await api.results(run.id, 1, 2, 3)] == [False, False, True]
            await api.activity.stored(10)
            assert api.activity._backlog.bytes == 0

    play(tmp_path, story)
