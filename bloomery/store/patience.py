"""Waiting for what cannot be interrupted: a call to a file system whose server is away does not come back, and nothing ends it.

So it is made on a thread of its own, which is left alone when nothing happens for too long. What it was doing may still be done later, as with any
request whose answer was lost.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final, TypeVar

from bloomery.types.errors import Unavailable

_T = TypeVar("_T")
_MOST_LEFT: Final = 64
"""Calls of one kind that may hang before no more are made."""


class _Mine(threading.local):
    """Of a thread: when the call that it makes last went on; None on threads that make none."""

    beat: "list[float] | None" = None


_mine: Final = _Mine()


class Patience:
    """For calls to one thing, each of which has to go on within `idle_s`."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._free = threading.BoundedSemaphore(_MOST_LEFT)

    def within(self, call: Callable[[], _T], what: str) -> _T:
        """What it gives. Unavailable, which names `what`, when it neither ended nor `went_on` for too long."""
        if _mine.beat is not None:
            # Part of a call that somebody waits for.
            went_on()
            return call()
        if not self._free.acquire(timeout=self._idle_s):
            raise Unavailable(f"{what}: {_MOST_LEFT} calls before it were not answered: whoever serves it is away, look after that first")
        answer, beat = Future[_T](), [time.monotonic()]

        def make() -> None:
            _mine.beat = beat
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)
            finally:
                self._free.release()

        threading.Thread(target=make, name="patience", daemon=True).start()
        while (left_s := beat[0] + self._idle_s - time.monotonic()) > 0:
            wait([answer], timeout=left_s)
            if answer.done():
                return answer.result()
        raise Unavailable(f"{what}: nothing happened for {self._idle_s:g} s: whoever serves it is away or overloaded, look after that and try again")


def went_on() -> None:
    """Say within a call that it does not hang: the time that it has begins anew."""
    if _mine.beat is not None:
        _mine.beat[0] = time.monotonic()
