import asyncio
import logging

import pytest

from bloomery.obs import background


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """By what starts tasks; threads of other tests may have something to say, too."""
    return [record for record in caplog.records if record.name == background.__name__]


async def _fails() -> None:
    raise RuntimeError("nobody foresaw this")


async def test_an_error_that_ends_a_task_is_logged_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    task = background.start(_fails(), "housekeeping")
    await asyncio.wait({task})
    [record] = told(caplog)
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "the task `housekeeping` ended by an error")
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "nobody foresaw this"


async def test_the_end_of_a_task_that_is_stopped_or_done_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    done = background.start(asyncio.sleep(0), "done")
    await done
    await background.stop(background.start(asyncio.Event().wait(), "stopped"), done, None)
    await background.stop()
    assert not told(caplog)


async def test_stop_waits_until_every_task_has_ended() -> None:
    begun, ended = asyncio.Event(), list[str]()

    async def ends_late(name: str) -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            for _ in range(3):
                await asyncio.sleep(0)
            ended.append(name)

    tasks = [background.start(ends_late(name), name) for name in ("one", "two")]
    await begun.wait()
    await background.stop(*tasks)
    assert sorted(ended) == ["one", "two"]
    assert all(task.cancelled() for task in tasks)


async def test_what_fails_while_it_is_stopped_is_logged_before_stop_returns(caplog: pytest.LogCaptureFixture) -> None:
    async def cannot_stop() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("the disk is full")

    async with background.running(cannot_stop(), "writer"):
        await asyncio.sleep(0)
    assert [record.getMessage() for record in told(caplog)] == ["the task `writer` ended by an error"]


async def test_a_task_goes_on_while_it_is_entered_and_has_ended_when_that_is_left_by_an_error() -> None:
    tasks = []

    async def leave_by_an_error() -> None:
        async with background.running(asyncio.Event().wait(), "beside") as task:
            tasks.append(task)
            assert not task.done()
            raise OSError("left")

    with pytest.raises(OSError, match="left"):
        await leave_by_an_error()
    assert tasks[0].cancelled()
