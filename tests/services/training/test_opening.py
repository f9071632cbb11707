"""A run for which its engine has no memory: what waits for it fails at once as whose error it is, and an operation asks for the run again."""

import asyncio
from pathlib import Path

import pytest

from bloomery.services.training.active import Patience
from bloomery.types.errors import Category
from bloomery.types.fingerprint import fingerprint
from bloomery.types.operations import Failed, OptimStepResult, Rejected
from tests.services.fake_engine import FakeEngine
from tests.services.runs_stage import ME, open_api, operation, play, until


async def turns_of_the_loop() -> None:
    """As many as it takes to ask an engine several times and hear its answers."""
    for _ in range(200):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("fails", "state", "events"), [("server", "active", []), ("user", "broken", ["run.broken", "run.active"])])
def test_what_waits_fails_as_the_engine_says_and_the_next_operation_opens_the_run(
    tmp_path: Path, fails: Category, state: str, events: list[str]
) -> None:
    async def story(engine: FakeEngine) -> None:
        engine.refuse_to_open, engine.fails = "there is no memory for it", fails
        async with open_api(tmp_path, Patience(reopen_s=0.0)) as api:
            run = await api.new_run()
            await until(lambda: len(engine.opened) == 1)
            await turns_of_the_loop()
            for seq in (1, 2):
                earlier = len(engine.opened)
                await api.runs.submit(ME, run.id, seq, operation(seq))
                (told,) = await api.results(run.id, seq)
                again = fingerprint(operation(seq)) if fails == "server" else ""
                assert told == Failed(message="the engine cannot open the run: there is no memory for it", category=fails, unbegun=again)
                asked = len(engine.opened)
                # The first may be told what came of opening the run when it was made, if that is heard only now.
                assert asked > earlier or seq == 1
                await turns_of_the_loop()
                assert len(engine.opened) == asked, "nobody needs it"
            assert (await api.runs.get(ME, run.id)).state == state
            engine.refuse_to_open = None
            assert isinstance((await api.train(run.id, 3, 6))[-1], OptimStepResult)
            # Sent again, what was not begun takes its place: that is the engine's to see.
            before = [message.operation for message in engine.executed if message.seq in (1, 2)]
            assert [isinstance(one, Rejected) and one.unbegun != "" for one in before] == [fails == "server"] * 2
            assert (await api.runs.get(ME, run.id)).state == "active"
            assert await api.events() == events

    play(tmp_path, story)


def test_memory_that_is_lacking_says_nothing_against_a_checkpoint(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path, Patience(reopen_s=0.02)) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 6)
            await api.activity.stored(10)
            engine.refuse_to_open, engine.fails = "there is no memory for it", "server"
            await engine.crash()
            await engine.start()
            await api.runs.submit(ME, run.id, 7, operation(7))
            assert isinstance((await api.results(run.id, 7))[0], Failed)
            engine.refuse_to_open = None
            await api.train(run.id, 8, 10)
            assert [order.last_seq for order in engine.opened[1:]] == [4, 4]

    play(tmp_path, story)
