"""Coroutines of environments from threads: one loop for all, deadlines that cancel, and loops that are left behind."""

import asyncio
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from bloomery.recipes.event_loops import EventLoops


async def which() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_threads_share_one_loop() -> None:
    with EventLoops("test") as loops, ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: loops.run(which, 10), range(8)))) == 1


def test_what_a_coroutine_raises_is_raised() -> None:
    async def raises() -> None:
        raise KeyError("gone")

    async def is_late_itself() -> None:
        raise TimeoutError("its own")

    with EventLoops("test") as loops:
        with pytest.raises(KeyError, match="gone"):
            loops.run(raises, 10)
        with pytest.raises(TimeoutError, match="its own"):
            loops.run(is_late_itself, 10)


def test_one_that_waits_past_its_deadline_is_cancelled_and_the_loop_goes_on() -> None:
    cancelled = threading.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with EventLoops("test") as loops:
        loop = loops.run(which, 10)
        with pytest.raises(TimeoutError):
            loops.run(waits, 0.1)
        assert cancelled.wait(120)
        assert loops.run(which, 10) is loop


def test_one_that_computes_past_its_deadline_is_left_behind_with_its_loop() -> None:
    release = threading.Event()

    async def holds() -> None:
        release.wait(60)

    with EventLoops("test") as loops:
        loop = loops.run(which, 10)
        with pytest.raises(TimeoutError):
            loops.run(holds, 0.1)
        assert loops.run(which, 10) is not loop
        release.set()


def test_whatever_still_waits_at_the_end_is_cancelled() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def waits() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with EventLoops("test") as loops, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(loops.run, waits, 30)
        assert begun.wait(120)
        loops.__exit__()
        assert ended.wait(120)
        with pytest.raises(CancelledError):
            waiting.result(120)
