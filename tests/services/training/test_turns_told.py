"""What an engine is told beside the operations: whose a run is, and which operations it had not begun when they failed."""

from pathlib import Path

from bloomery.types.operations import Failed, Rejected, Result
from bloomery.types.protocol import Execute
from tests.services.fake_engine import FakeEngine, HeldRun
from tests.services.runs_stage import LORA, ME, STRANGER, open_api, operation, play


class WithoutMemory:
    """Has an engine fail operation 3, as one does that found no memory for it."""

    def __init__(self, engine: FakeEngine) -> None:
        self._perform = engine._perform
        engine._perform = self.perform

    def perform(self, message: Execute, run: HeldRun) -> Result:
        if message.seq == 3 and not message.replay:
            return Failed(message="no memory came free", category="server", unbegun="f" * 32)
        return self._perform(message, run)


def test_an_operation_that_was_not_begun_is_replayed_as_one_that_was_not(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        WithoutMemory(engine)
        async with open_api(tmp_path) as api:
            run = await api.new_run()
            await api.train(run.id, 1, 3)
            await engine.crash()
            await engine.start()
            await api.runs.submit(ME, run.id, 4, operation(4))
            await api.results(run.id, 4)
            again = [message.operation for message in engine.executed if message.replay and message.seq == 3]
            assert again == [Rejected(message="no memory came free", category="server", effect="spoil", unbegun="f" * 32)]

    play(tmp_path, story)


def test_an_engine_is_told_whose_a_run_is(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with open_api(tmp_path) as api:
            mine = await api.new_run()
            theirs = await api.runs.create(STRANGER, base_model="tiny", lora=LORA, metadata={})
            await api.train(mine.id, 1, 2)
            await api.runs.submit(STRANGER, theirs.id, 1, operation(1))
            assert await api.runs.result(STRANGER, theirs.id, 1, 120.0) is not None
            assert {opened.spec.run_id: opened.project for opened in engine.opened} == {mine.id: "default", theirs.id: "other"}

    play(tmp_path, story)
