"""Coroutines of environments, run from threads: all on one event loop, because what they open belongs to the loop that it was opened on.

One that waits past its deadline is cancelled. One that computes past it, and lets nothing else run, is left behind with its loop, and the next ones
get another.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Self

_TURNS_WITHIN_S: Final = 1.0
"""A loop that does not come round for so long is taken for stuck."""


class EventLoops:
    """A loop at a time, on a thread of its own, within its `with`; threads may run coroutines side by side."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def run(self, begin: Callable[[], Coroutine[Any, Any, Any]], timeout_s: float) -> Any:
        """What the coroutine gives; TimeoutError where it is late."""
        loop = self._running()
        future = asyncio.run_coroutine_threadsafe(_begun(begin), loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if not future.done():
                future.cancel()
                self._leave_if_stuck(loop)
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        """One that comes round: whoever begins while another finds out that it is stuck finds that out too."""
        with self._lock:
            loop = self._loop
        if loop is not None:
            self._leave_if_stuck(loop)
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_turn, args=(self._loop,), daemon=True, name=self._name).start()
            return self._loop

    def _leave_if_stuck(self, loop: asyncio.AbstractEventLoop) -> None:
        turned = threading.Event()
        # Somebody else may have left it, and it has come to its end since.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(turned.set)
        if turned.wait(_TURNS_WITHIN_S):
            return
        with self._lock:
            if self._loop is loop:
                self._loop = None
                loop.call_soon_threadsafe(loop.stop)


async def _begun(begin: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Called on the loop: an environment may make what belongs to it when it is called."""
    return await begin()


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(_cancel_all())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
