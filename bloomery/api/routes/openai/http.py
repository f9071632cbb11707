"""Bodies in, answers out; work stops when the client hangs up."""

import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bloomery.api.errors import openai_envelope
from bloomery.api.exchange import note_broken, read_bytes, unless_gone
from bloomery.api.routes import CLIENT_GONE, VERSION_HEADER
from bloomery.api.routes.openai.requests import MAX_BODY_BYTES
from bloomery.api.routes.openai.serving import Serving
from bloomery.services.threads import off_loop
from bloomery.services.weights.target import Target
from bloomery.types.errors import BloomeryError, InvalidInput

_JSON: Final = "application/json"

log = logging.getLogger(__name__)

T = TypeVar("T")


class Read(NamedTuple, Generic[T]):
    """A body, and what it asks for."""

    body: dict[str, Any]
    asked: T


async def read_request(request: Request, parse: Callable[[dict[str, Any]], T]) -> Read[T]:
    """The object in the body and what `parse` makes of it: of a large one off the event loop, for both take long."""
    kind = request.headers.get("content-type", _JSON).partition(";")[0].strip().lower()
    if kind != _JSON:
        raise InvalidInput(f"the body is said to be `{kind}`: send JSON, with the header `content-type: {_JSON}`", field="content-type")
    content = await read_bytes(request, MAX_BODY_BYTES)
    return await off_loop(len(content), _read, content, parse)


def _read(payload: bytes, parse: Callable[[dict[str, Any]], T]) -> Read[T]:
    try:
        content = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is not JSON: {error}", field="body") from None
    if not isinstance(content, dict):
        raise InvalidInput("the body is a JSON object", field="body")
    return Read(content, parse(content))


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
    headers = version_headers(serving.prepared.target)
    if serving.prepared.asked.stream:
        return EventStream(serving.chunks(), headers, COMPLETIONS)
    return await respond_whole(request, serving.whole(), headers)


async def respond_whole(request: Request, work: Coroutine[Any, Any, dict[str, Any]], headers: dict[str, str]) -> Response:
    """The answer in one piece, unless nobody waits for it any more."""
    body = await unless_gone(request.receive, work)
    return Response(status_code=CLIENT_GONE) if body is None else Response(msgspec.json.encode(body), 200, headers, "application/json")


def version_headers(target: Target) -> dict[str, str]:
    """Which weights answered, and through which revision of which deployment."""
    headers = {VERSION_HEADER: target.weights.version}
    if target.deployment is not None:
        headers |= {"x-bloomery-deployment": target.deployment, "x-bloomery-revision": str(target.revision)}
    return headers


class EventStream(Response):
    """Server-sent events, written together where they come together. Until the first of them an error still has a status of its own; in the middle
    it is the last event, and only a complete answer has the end of its framing."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[list[dict[str, Any]], None], headers: dict[str, str], framing: Framing) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self._chunks, self._framing = chunks, framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until nobody listens."""
        await unless_gone(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._chunks):
            first = await anext(self._chunks)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            end = await self._send_events(first, scope, send)
            await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _send_events(self, first: list[dict[str, Any]], scope: Scope, send: Send) -> bytes:
        """All but what the stream ends with."""
        try:
            await self._send(first, send)
            async for chunks in self._chunks:
                await self._send(chunks, send)
        except Exception as error:
            note_broken(scope)
            return self._framing.event(self._framing.broken(_told(error)))
        return self._framing.end

    async def _send(self, chunks: list[dict[str, Any]], send: Send) -> None:
        await send({"type": "http.response.body", "body": b"".join(map(self._framing.event, chunks)), "more_body": True})


def _told(error: Exception) -> BloomeryError:
    ours = error if isinstance(error, BloomeryError) else BloomeryError(f"internal error ({type(error).__name__}); the api's log says more")
    if ours.category == "server":
        log.error("a stream broke off: %s", ours.message, exc_info=error)
    return ours
