"""Whether the process at the other end of a connection lives and gets on.

The process itself says that it is alive, every two seconds from its event loop; what its executor says comes from a thread that may compute one thing
for long. So one that stands still (stopped, swapped out, its lock held by a foreign library) is told from one that has much to do.
"""

import asyncio
from typing import Final, NamedTuple

from bloomery.types.errors import Unavailable
from bloomery.types.protocol import Alive, FromEngine
from bloomery.types.serving import STEP_S

LOOK_S: Final = 1.0


class Silence(NamedTuple):
    """How long it lasts until somebody is given up, in looks: whoever looks was awake meanwhile, and would have heard."""

    process: int = 10
    """Five signs of life are missing then."""
    executor: int = round(STEP_S / LOOK_S)
    """It speaks between two steps. One that hangs cannot be told from a longer step, so after this whoever waits is answered elsewhere."""
    look_s: float = LOOK_S


SILENCE: Final = Silence()


class Silent(Unavailable):
    """The connection is open, and nothing comes."""


class Pulse:
    """Of one conversation."""

    def __init__(self, limit: Silence) -> None:
        self._limit = limit
        self._process_silent = self._executor_silent = 0

    @property
    def late(self) -> bool:
        """Whether a sign of life is missing, which need not mean anything yet."""
        return self._process_silent >= self._limit.process // 3

    def feel(self, message: FromEngine) -> None:
        """Something was heard."""
        self._process_silent = 0
        if not isinstance(message, Alive):
            self._executor_silent = 0

    async def watch(self, reader: asyncio.StreamReader) -> None:
        """Have who reads fail with `Silent` when there was silence for too long."""
        limit = self._limit
        while self._process_silent < limit.process and self._executor_silent < limit.executor:
            await asyncio.sleep(limit.look_s)
            self._process_silent += 1
            self._executor_silent += 1
        if self._process_silent >= limit.process:
            looks, told = limit.process, "its process gave no sign of life"
        else:
            looks, told = limit.executor, "its process lives, but its executor ended no step"
        reader.set_exception(Silent(f"{told} for {looks * limit.look_s:g} s"))
