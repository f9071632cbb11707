"""Work for a client who may hang up."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Message

from bloomery.api.exchange import unless_gone


def play(story: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await story()

    asyncio.run(run())


async def stays() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def hangs_up() -> Message:
    await asyncio.sleep(0)
    return {"type": "http.disconnect"}


def test_work_ends_with_its_result_while_the_client_is_there() -> None:
    async def story() -> None:
        assert await unless_gone(stays, asyncio.sleep(0, "done")) == "done"

    play(story)


def test_work_ends_when_the_client_hangs_up_and_before_anyone_goes_on() -> None:
    ended = []

    async def work() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("work")
        return "done"

    async def story() -> None:
        assert await unless_gone(hangs_up, work()) is None
        assert ended == ["work"]
        # Nothing of that is left in the task that waited.
        await asyncio.sleep(0)

    play(story)


def test_work_ends_where_nobody_would_hear_the_client_hang_up() -> None:
    ended = []

    async def breaks() -> Message:
        raise OSError("no socket")

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async def story() -> None:
        with pytest.raises(OSError, match="no socket"):
            await unless_gone(breaks, work())
        assert ended == ["work"]

    play(story)


def test_errors_and_deadlines_of_the_work_are_its_own() -> None:
    async def late() -> None:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    async def story() -> None:
        with pytest.raises(TimeoutError):
            await unless_gone(stays, late())

    play(story)


def test_whoever_waits_can_be_cancelled_himself() -> None:
    async def story() -> None:
        waiting = asyncio.create_task(unless_gone(stays, asyncio.Event().wait()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    play(story)
