"""Foreign code under a deadline: graders and environments may raise, and may never come back.

Python cannot end a thread, so a call that hangs is left to itself on a daemon thread, and counted. More than a few of those are an error with a name:
they hold memory, and those that compute hold the interpreter. What may hang for good belongs in a process of its own, with a timeout there.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Final

from bloomery.types.errors import InvalidInput, Unavailable

MAX_HUNG: Final = 64
"""Calls past their deadline that still run."""
_REMEMBERED: Final = 1 << 16
"""Seconds of calls that nobody asks for."""


MAX_TIMEOUT_S: Final = 1e8
"""Three years. What should never end is not waited for: clocks of threads raise where they cannot count so far, and with what is no number."""


def check_times(**seconds: float) -> None:
    """Refuse times within which nothing can be done, and those that no clock counts."""
    for name, given in seconds.items():
        if not 0 < given <= MAX_TIMEOUT_S:
            raise InvalidInput(f"`{name}` is {given:g} s: it must be above 0 and at most {MAX_TIMEOUT_S:g}", field=name)


def times_of(config: Any) -> dict[str, float]:
    """All `..._timeout_s` of some settings."""
    return {each.name: getattr(config, each.name) for each in fields(config) if each.name.endswith("_timeout_s")}


class Deadlines:
    """Runs calls side by side, each for so long at most."""

    def __init__(self, max_hung: int = MAX_HUNG) -> None:
        self._max_hung = max_hung
        self._hung: list[threading.Thread] = []
        self._took: deque[float] = deque(maxlen=_REMEMBERED)
        self._lock = threading.Lock()

    def take_times_s(self) -> list[float]:
        """Seconds of each call that came to an end since this was asked last, or was left to itself."""
        with self._lock:
            took = [*self._took]
            self._took.clear()
            return took

    def all(self, calls: Sequence[Callable[[], Any]], timeout_s: float) -> list[Any]:
        """What each gave; of one that raised its exception, and of one that is late a TimeoutError."""
        outcomes: list[Any] = [None] * len(calls)
        done = [threading.Event() for _ in calls]
        ended = [0.0] * len(calls)

        def call(place: int) -> None:
            try:
                outcomes[place] = calls[place]()
            except BaseException as error:
                outcomes[place] = error
            ended[place] = time.monotonic()
            done[place].set()

        threads = [threading.Thread(target=call, args=(place,), daemon=True, name="grader") for place in range(len(calls))]
        began = time.monotonic()
        deadline = began + timeout_s
        for thread in threads:
            thread.start()
        late = [place for place, event in enumerate(done) if not event.wait(max(0.0, deadline - time.monotonic()))]
        # What comes too late is not looked at: the outcome of a call is settled at its deadline.
        settled = [TimeoutError(f"no answer within {timeout_s:g} s") if place in late else outcomes[place] for place in range(len(calls))]
        with self._lock:
            self._took += [(time.monotonic() if place in late else ended[place]) - began for place in range(len(calls))]
        self._note_hung([threads[place] for place in late])
        return settled

    def _note_hung(self, threads: Sequence[threading.Thread]) -> None:
        with self._lock:
            self._hung = [thread for thread in [*self._hung, *threads] if thread.is_alive()]
            if len(self._hung) > self._max_hung:
                raise Unavailable(f"{len(self._hung)} calls of the grader are past their deadline and still run: give it a timeout of its own")
