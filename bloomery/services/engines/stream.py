"""What an engine says of one request, in order, until its reader takes it."""

import asyncio
from collections import deque
from typing import Final

from bloomery.types.errors import Unavailable
from bloomery.types.generation import Generate, GenerateFailed, SampledToken, SampleFinished
from bloomery.types.kept import KeptTokens, ToldEvent

STREAM_EVENTS: Final = 65_536


class RequestStream:
    """Events of one request between the socket and the reader."""

    def __init__(self, request: Generate) -> None:
        self._request_id = request.request_id
        self.samples = request.num_samples
        """That have not ended."""
        self._events: deque[ToldEvent | Unavailable] = deque()
        self._reader: asyncio.Future[None] | None = None
        """Who waits for an event."""
        self.complete = False

    @property
    def holds_more(self) -> bool:
        """Whether the next event is here, and tells of a sample."""
        return bool(self._events) and isinstance(self._events[0], SampledToken | KeptTokens | SampleFinished)

    def put(self, event: ToldEvent) -> None:
        """Keep an event; a reader who is too far behind loses the request."""
        if len(self._events) < STREAM_EVENTS:
            self._keep(event)
        elif len(self._events) == STREAM_EVENTS:
            self.fail(Unavailable(f"request `{self._request_id}`: {STREAM_EVENTS} events wait to be read; read faster or ask for fewer samples"))

    def fail(self, error: Unavailable) -> None:
        """Raise this after the events that are here."""
        self._keep(error)

    async def next(self) -> ToldEvent:
        """The next event, however long the request stands in a queue: what bounds the wait is the connection's pulse."""
        if not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        event = self._events.popleft()
        if isinstance(event, Unavailable):
            raise event
        if isinstance(event, SampleFinished):
            self.samples -= 1
        # The prompt's scores come before the end of its last sample, even of one that samples nothing.
        self.complete = self.samples == 0 or isinstance(event, GenerateFailed)
        return event

    def _keep(self, event: ToldEvent | Unavailable) -> None:
        self._events.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
