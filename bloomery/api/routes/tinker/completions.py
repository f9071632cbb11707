"""Which samples have ended, told to each client of a sampler in the order in which they did, from a cursor on.

A client of a sampler is one object of the SDK: the first is clone 0, and others number themselves and their samples apart. What it has been told
it acknowledges by the cursor of its next question. Cursors go on from the clock, so those of an earlier life of the api lie before all of this one's.
"""

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Final, NamedTuple

from bloomery.api.routes.tinker.names import SampleFuture
from bloomery.types.errors import Gone
from bloomery.types.ids import now_us

MAX_UNTOLD: Final = 1 << 16
"""Ends that nobody asked about yet, of all clients; beyond that the oldest are forgotten."""


class Completion(NamedTuple):
    """A sample that ended; `size` of its answer in bytes, None where there is none."""

    request_id: str
    size: int | None
    cursor: int


class Ended(NamedTuple):
    """What ended since the cursor of the question, and the cursor for the next one."""

    completions: list[Completion]
    cursor: int


_Client = tuple[str, int]


class Completions:
    """Ends of samples by client, until they are known to it."""

    def __init__(self, *, max_untold: int = MAX_UNTOLD) -> None:
        self._max_untold = max_untold
        self._cursor = now_us()
        self._running: Counter[_Client] = Counter()
        self._untold: dict[_Client, dict[str, Completion]] = {}
        self._order: dict[str, _Client] = {}
        """Whose each untold end is, oldest first."""
        self._bells: dict[_Client, asyncio.Event] = {}

    def begin(self, future: SampleFuture) -> None:
        """A sample is in the making."""
        self._running[_client(future)] += 1

    def end(self, future: SampleFuture, size: int | None) -> None:
        """It has ended, with an answer of so many bytes."""
        client = self._leave(future)
        self._cursor += 1
        self._untold.setdefault(client, {})[future.request_id] = Completion(future.request_id, size, self._cursor)
        self._order[future.request_id] = client
        if len(self._order) > self._max_untold:
            self._forget(next(iter(self._order)))
        if (bell := self._bells.pop(client, None)) is not None:
            bell.set()

    def replaced(self, future: SampleFuture) -> None:
        """It has ended, but was begun anew before: nothing is told of it, for its name is the other's."""
        self._leave(future)

    def known(self, future: SampleFuture) -> None:
        """Whoever has the answer knows of the end."""
        if future.request_id in self._order:
            self._forget(future.request_id)

    async def ended(self, sampling_session_id: str, clone: int, after: int, timeout_s: float) -> Ended:
        """What ended since `after`; waits up to `timeout_s` for something, and is Gone where there is nothing that could end."""
        client = (sampling_session_id, clone)
        for completion in [*self._untold.get(client, {}).values()]:
            if completion.cursor <= after:
                self._forget(completion.request_id)
        if client not in self._untold and timeout_s > 0:
            if client not in self._running:
                raise Gone(f"no sample of `{sampling_session_id}` is in the making here; submit again what is waited for")
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._bells.setdefault(client, asyncio.Event()).wait()
        found = [*self._untold.get(client, {}).values()]
        return Ended(found, max((completion.cursor for completion in found), default=after))

    def _leave(self, future: SampleFuture) -> _Client:
        client = _client(future)
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        return client

    def _forget(self, request_id: str) -> None:
        client = self._order.pop(request_id)
        del self._untold[client][request_id]
        if not self._untold[client]:
            del self._untold[client]


def _client(future: SampleFuture) -> _Client:
    return future.sampling_session_id, future.clone
