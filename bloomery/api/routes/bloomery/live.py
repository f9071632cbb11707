"""What has just changed, as server-sent events."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bloomery.api.auth import who_calls
from bloomery.api.deps import Caller, Svc
from bloomery.api.exchange import unless_gone
from bloomery.services.access.principal import Principal
from bloomery.services.clients.live import Live, Topic
from bloomery.types.errors import Forbidden, Unauthorized

HEARTBEAT_S: Final = 15.0
GATHER_S: Final = 0.05
"""What changes this shortly behind the first change is told with it."""
PAUSE_S: Final = 0.2
"""Behind each event: with the above there are four in a second."""
_STREAM: Final = "text/event-stream"
_BEGIN: Final = b"retry: 2000\n\n"
"""Milliseconds until a browser comes again."""
_HEARTBEAT: Final = b": nothing has changed\n\n"
_DOCUMENTED: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {_STREAM: {"schema": {"type": "string"}}}}}

router = APIRouter(tags=["server"])


@router.get("/live", response_class=Response, responses=_DOCUMENTED)
async def live(request: Request, services: Svc, caller: Caller) -> Response:
    """Events `changed` with the `topics` that did since the last one, until the caller leaves, its key or login ends, or the server stops."""
    caller.require("read", "train")
    return _Changes(request, services.live, caller)


class _Changes(Response):
    """Sends as events come; one who takes nothing is hung up on by the connection, and holds no more than its topics until then."""

    media_type = _STREAM

    def __init__(self, request: Request, live: Live, caller: Principal) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._request, self._live, self._caller = request, live, caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until it is over, or until nobody listens."""
        await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events()) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        with self._live.listening(self._caller) as listener:
            yield _BEGIN
            while True:
                await listener.wait(HEARTBEAT_S)
                await asyncio.sleep(GATHER_S)
                if listener.over or not await self._may_still():
                    return
                yield _event(topics) if (topics := listener.take()) else _HEARTBEAT
                await asyncio.sleep(PAUSE_S)

    async def _may_still(self) -> bool:
        """Whether what the request came with would be good for it now."""
        try:
            await who_calls(self._request)
        except (Forbidden, Unauthorized):
            return False
        return True


def _event(topics: list[Topic]) -> bytes:
    return b"event: changed\ndata: " + json.dumps({"topics": topics}).encode() + b"\n\n"
