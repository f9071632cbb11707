"""Bodies in, answers out; work stops when the client hangs up."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bloomery.api.errors import openai_envelope
from bloomery.api.routes import VERSION_HEADER
from bloomery.api.routes.openai.requests import MAX_BODY_BYTES
from bloomery.api.routes.openai.serving import Serving
from bloomery.services.target import Target
from bloomery.types.errors import BloomeryError, InvalidInput

CLIENT_GONE: Final = 499
"""Nobody reads it; it is for logs."""

log = logging.getLogger(__name__)

T = TypeVar("T")


async def read_body(request: Request) -> dict[str, Any]:
    """The object in the body."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise InvalidInput(f"the body is over the limit of {MAX_BODY_BYTES >> 20} MiB", field="body")
    try:
        content = msgspec.json.decode(bytes(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is not JSON: {error}", field="body") from None
    if not isinstance(content, dict):
        raise InvalidInput("the body is a JSON object", field="body")
    return content


async def respond(request: Request, serving: Serving) -> Response:
    """Answer in one piece or as a stream, as the request asks."""
    headers = version_headers(serving.job.target)
    if not serving.job.asked.stream:
        body = await _unless_gone(request.receive, serving.whole())
        return Response(status_code=CLIENT_GONE) if body is None else Response(msgspec.json.encode(body), 200, headers, "application/json")
    chunks = serving.chunks()
    # Until the first chunk an error still has a status of its own.
    first = await _unless_gone(request.receive, _first(chunks))
    return Response(status_code=CLIENT_GONE) if first is None else EventStream(first, chunks, headers)


def version_headers(target: Target) -> dict[str, str]:
    """Which weights answered, and through which revision of which deployment."""
    headers = {VERSION_HEADER: target.weights.version}
    if target.deployment is not None:
        headers |= {"x-bloomery-deployment": target.deployment, "x-bloomery-revision": str(target.revision)}
    return headers


class EventStream(Response):
    """Server-sent events; an error in the middle is the last event, and only a complete answer ends with `[DONE]`."""

    media_type = "text/event-stream"

    def __init__(self, first: dict[str, Any], chunks: AsyncGenerator[dict[str, Any], None], headers: dict[str, str]) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self._first, self._chunks = first, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until nobody listens."""
        await _unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> bool:
        async with aclosing(self._chunks):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_events(send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    async def _send_events(self, send: Send) -> None:
        try:
            await _send_event(send, msgspec.json.encode(self._first))
            async for chunk in self._chunks:
                await _send_event(send, msgspec.json.encode(chunk))
        except Exception as error:
            await _send_event(send, msgspec.json.encode(_envelope(error)))
            return
        await _send_event(send, b"[DONE]")


async def _send_event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


def _envelope(error: Exception) -> dict[str, Any]:
    ours = error if isinstance(error, BloomeryError) else BloomeryError(f"internal error ({type(error).__name__}); the api's log says more")
    if ours.category == "server":
        log.error("a stream broke off: %s", ours.message, exc_info=error)
    return openai_envelope(ours)


async def _first(chunks: AsyncGenerator[T, None]) -> T:
    return await anext(chunks)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if the client hangs up first; `work` has ended either way."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        finished = working.done()
        working.cancel()
        gone.cancel()
        await asyncio.wait({working, gone})
    return await working if finished else None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
