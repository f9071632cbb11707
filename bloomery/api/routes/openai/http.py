"""Bodies in, answers out; work stops when the client hangs up."""

import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bloomery.api.errors import openai_envelope
from bloomery.api.exchange import note_broken, read_bytes, unless_gone
from bloomery.api.routes import VERSION_HEADER
from bloomery.api.routes.openai.requests import MAX_BODY_BYTES
from bloomery.api.routes.openai.serving import Serving
from bloomery.services.target import Target
from bloomery.types.errors import BloomeryError, InvalidInput

CLIENT_GONE: Final = 499
"""Nobody reads it; it is for logs."""
_JSON: Final = "application/json"

log = logging.getLogger(__name__)

T = TypeVar("T")


async def read_body(request: Request) -> dict[str, Any]:
    """The object in the body."""
    kind = request.headers.get("content-type", _JSON).partition(";")[0].strip().lower()
    if kind != _JSON:
        raise InvalidInput(f"the body is said to be `{kind}`: send JSON, with the header `content-type: {_JSON}`", field="content-type")
    try:
        content = msgspec.json.decode(await read_bytes(request, MAX_BODY_BYTES))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is not JSON: {error}", field="body") from None
    if not isinstance(content, dict):
        raise InvalidInput("the body is a JSON object", field="body")
    return content


class Framing(NamedTuple):
    """How a contract writes a stream: its events, the event that says why it broke off, and what only a complete one ends with."""

    event: Callable[[dict[str, Any]], bytes]
    broken: Callable[[BloomeryError], dict[str, Any]]
    end: bytes


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


COMPLETIONS: Final = Framing(_data, openai_envelope, b"data: [DONE]\n\n")


async def respond(request: Request, serving: Serving) -> Response:
    """Answer in one piece or as a stream, as the request asks."""
    headers = version_headers(serving.job.target)
    if serving.job.asked.stream:
        return await respond_stream(request, serving.chunks(), headers, COMPLETIONS)
    return await respond_whole(request, serving.whole(), headers)


async def respond_whole(request: Request, work: Coroutine[Any, Any, dict[str, Any]], headers: dict[str, str]) -> Response:
    """The answer in one piece, unless nobody waits for it any more."""
    body = await unless_gone(request.receive, work)
    return Response(status_code=CLIENT_GONE) if body is None else Response(msgspec.json.encode(body), 200, headers, "application/json")


async def respond_stream(request: Request, chunks: AsyncGenerator[dict[str, Any], None], headers: dict[str, str], framing: Framing) -> Response:
    """The answer as a stream; until its first chunk an error still has a status of its own."""
    first = await unless_gone(request.receive, _first(chunks))
    return Response(status_code=CLIENT_GONE) if first is None else EventStream(first, chunks, headers, framing)


def version_headers(target: Target) -> dict[str, str]:
    """Which weights answered, and through which revision of which deployment."""
    headers = {VERSION_HEADER: target.weights.version}
    if target.deployment is not None:
        headers |= {"x-bloomery-deployment": target.deployment, "x-bloomery-revision": str(target.revision)}
    return headers


class EventStream(Response):
    """Server-sent events; an error in the middle is the last event, and only a complete answer has the end of its framing."""

    media_type = "text/event-stream"

    def __init__(self, first: dict[str, Any], chunks: AsyncGenerator[dict[str, Any], None], headers: dict[str, str], framing: Framing) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self._first, self._chunks, self._framing = first, chunks, framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until nobody listens."""
        await unless_gone(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> bool:
        async with aclosing(self._chunks):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_events(scope, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    async def _send_events(self, scope: Scope, send: Send) -> None:
        try:
            await _send(send, self._framing.event(self._first))
            async for chunk in self._chunks:
                await _send(send, self._framing.event(chunk))
        except Exception as error:
            note_broken(scope)
            await _send(send, self._framing.event(self._framing.broken(_told(error))))
            return
        if self._framing.end:
            await _send(send, self._framing.end)


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def _told(error: Exception) -> BloomeryError:
    ours = error if isinstance(error, BloomeryError) else BloomeryError(f"internal error ({type(error).__name__}); the api's log says more")
    if ours.category == "server":
        log.error("a stream broke off: %s", ours.message, exc_info=error)
    return ours


async def _first(chunks: AsyncGenerator[T, None]) -> T:
    return await anext(chunks)
