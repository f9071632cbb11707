"""How far ahead of the trainer groups may be begun, and who waited for whom."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_LOOK_S: Final = 1.0
"""How often makers at the door look whether whoever trains is still there."""


class Admission:
    """Lets groups begin while fewer than `capacity` of them are outstanding: running, waiting to be trained, or trained right now.

    The thread that makes it is the trainer's. Evaluation and `on_step` may take it any time, so what ends the wait for room at the latest is its end.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity, self._clock = capacity, clock
        self._trainer = threading.current_thread()
        self._outstanding = 0
        self._open = True
        self._changed = threading.Condition()
        self._idle_s = 0.0
        self._waiting_since: dict[int, float] = {}
        self._making = 0
        self._busy_s = self._busy_since = 0.0

    @property
    def outstanding(self) -> int:
        """Groups that were let in and have not left."""
        return self._outstanding

    def enter(self) -> bool:
        """Wait until another group may begin; False where none will."""
        me = threading.get_ident()
        with self._changed:
            self._waiting_since[me] = self._clock()
            while not self._changed.wait_for(self._decided, _LOOK_S):
                pass
            self._idle_s += self._clock() - self._waiting_since.pop(me)
            self._outstanding += self._open
            return self._open

    def _decided(self) -> bool:
        self._open = self._open and self._trainer.is_alive()
        return self._outstanding < self._capacity or not self._open

    def leave(self, groups: int) -> None:
        """So many were trained, or teach nothing."""
        with self._changed:
            self._outstanding -= groups
            self._changed.notify_all()

    def close(self) -> None:
        """Let no more in."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def take_idle_s(self) -> float:
        """Seconds that makers have waited here since this was asked last, all of them together."""
        with self._changed:
            now = self._clock()
            waited = self._idle_s + sum(now - since for since in self._waiting_since.values())
            self._waiting_since = dict.fromkeys(self._waiting_since, now)
            self._idle_s = 0.0
            return waited

    @contextmanager
    def making(self) -> Iterator[None]:
        """While a group is in the making."""
        with self._changed:
            if not self._making:
                self._busy_since = self._clock()
            self._making += 1
        try:
            yield
        finally:
            with self._changed:
                self._making -= 1
                self._busy_s += 0.0 if self._making else self._clock() - self._busy_since

    def take_busy_s(self) -> float:
        """Seconds in which at least one group was in the making since this was asked last."""
        with self._changed:
            now = self._clock()
            busy = self._busy_s + (now - self._busy_since if self._making else 0.0)
            self._busy_s, self._busy_since = 0.0, now
            return busy
