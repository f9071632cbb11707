"""Tasks that go on beside everything else until they are stopped; an error that ends one is logged with the task's name.

Without that nobody hears of it: whoever stops a task waits for its end and not for its result.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


def start(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Have it go on from here."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_tell)
    return task


async def stop(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel them, and wait until all have ended; None stands for one that was never started."""
    started = [task for task in tasks if task is not None]
    for task in started:
        task.cancel()
    if started:
        await asyncio.wait(started)


@asynccontextmanager
async def running(work: Coroutine[Any, Any, T], name: str) -> AsyncIterator[asyncio.Task[T]]:
    """Have it go on while this is entered."""
    task = start(work, name)
    try:
        yield task
    finally:
        await stop(task)


def _tell(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the task `%s` ended by an error", task.get_name(), exc_info=error)
