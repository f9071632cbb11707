"""Bodies on slow lines: while one comes in, the run that it is for gives up none of its operations.

The SDK divides a large batch into several requests and sends the first of them last, so the others wait for one that is still on its way, and perhaps
not even begun. Which run a body is for is known from its first bytes; where they do not say it, nobody waits longer than otherwise.
"""

from collections.abc import Callable, Coroutine
from typing import Any, Final

import zstandard
from fastapi import Request, Response
from starlette.types import Message

from bloomery.api.auth import caller
from bloomery.api.routes.tinker.encoding import MAX_WINDOW, ZSTD, coding_of
from bloomery.api.routes.tinker.errors import TinkerRoute
from bloomery.services.core import Services
from bloomery.types.errors import BloomeryError

_MOST_BYTES: Final = 1 << 18
"""Of a body, that are looked at: a block of zstd, before whose end nothing of it can be read, has no more."""
_PIECE: Final = 1 << 10
_MODEL_ID: Final = 0x0A
"""How a message begins whose first field is `model_id`, as messages do: writers put fields in the order of their numbers."""
_ONE_BYTE: Final = 0x80
"""Lengths from here on take more than a byte; no run has so long a name."""
_MOST_NAMED: Final = 2 + _ONE_BYTE


class ArrivingRoute(TinkerRoute):
    """A route whose run is told of what of the body comes in."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            return await handle(Request(request.scope, _Watched(request).receive))

        return answer


class Head:
    """The beginning of a body, as much of it as says which run it is for."""

    def __init__(self, coding: str) -> None:
        self.over = False
        """Whether everything is known that is to be known."""
        self.run: str | None = None
        self._frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj() if coding == ZSTD else None
        self._plain = b""
        self._looked_at = 0

    def take(self, piece: bytes) -> None:
        """Look at the next piece."""
        for at in range(0, len(piece), _PIECE):
            if self.over:
                return
            part = piece[at : at + _PIECE]
            self._looked_at += len(part)
            # No more of it than can hold a name: a small part of a frame may become thousands of times as much.
            self._plain = (self._plain + (part if self._frame is None else self._frame.decompress(part)))[:_MOST_NAMED]
            self.run = _run_named(self._plain)
            self.over = self.run is not None or len(self._plain) == _MOST_NAMED or self._looked_at >= _MOST_BYTES
        if self.over:
            # Its window may be large, and the body goes on for minutes.
            self._frame = None


class _Watched:
    """Reads a body, and tells its run of every piece that is not the last."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._head: Head | None = Head(coding_of(request))

    async def receive(self) -> Message:
        """The next piece."""
        message = await self._request.receive()
        if self._head is not None and message.get("more_body"):
            try:
                await self._tell(self._head, message.get("body", b""))
            except (BloomeryError, zstandard.ZstdError):
                # Whatever is wrong with the body, or with who sends it, the route answers.
                self._head = None
        return message

    async def _tell(self, head: Head, piece: bytes) -> None:
        head.take(piece)
        if head.run is not None:
            services: Services = self._request.app.state.services
            await services.runs.note_arriving(await caller(self._request), head.run)


def _run_named(head: bytes) -> str | None:
    if len(head) < 2 or head[0] != _MODEL_ID or not 0 < head[1] < _ONE_BYTE or len(head) < 2 + head[1]:
        return None
    return head[2 : 2 + head[1]].decode(errors="replace")
