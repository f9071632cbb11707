"""Requests that may be repeated: with the header `Idempotency-Key`, a request under OpenAI's contract that creates an answer gives one answer.

The answers that were given lie here, in memory, for a day and up to a number of bytes, the oldest going first. A repetition that arrives while the
first request is still served waits for it. A stream is kept as it was sent, and is repeated in one go. What failed, or broke off because its client
hung up, is forgotten: its repetition is served anew.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bloomery.api import errors
from bloomery.api.routes.openai.http import broke_off, read_bytes, watch_stream
from bloomery.services.principal import Principal
from bloomery.types.errors import BloomeryError, Conflict, InvalidInput

HEADER: Final = "idempotency-key"
REPLAYED: Final = "idempotent-replayed"
MAX_KEY: Final = 255
KEPT_BYTES: Final = 64 << 20
LARGEST_ANSWER: Final = KEPT_BYTES // 16
"""One that is larger is not kept: many others would have to go for it."""
KEPT_ANSWERS: Final = 10_000
KEPT_S: Final = 86_400.0


class _Answer(NamedTuple):
    """What was sent."""

    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass(eq=False)
class _Entry:
    """What was asked with a key, and the answer once it is there."""

    asked: bytes
    began_s: float
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    answer: _Answer | None = None


class Idempotent:
    """Answers repetitions from what was answered before."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None
        caller = Request(scope).state.caller if key is not None else None
        if key is None or not _creates_an_answer(scope) or not isinstance(caller, Principal):
            return await self._app(scope, receive, send)
        try:
            if not 0 < len(key) <= MAX_KEY:
                raise InvalidInput(f"`{HEADER}` has 1 to {MAX_KEY} characters, not {len(key)}", field=HEADER)
            body = await read_bytes(Request(scope, receive))
            entry = await self._wait_for_turn((caller.key_id, key), _fingerprint(scope, body))
        except BloomeryError as refusal:
            return await errors.respond(scope["path"], refusal)(scope, receive, send)
        if entry.answer is not None:
            return await _replay(entry.answer, send)
        await self._serve((caller.key_id, key), entry, scope, _with_body(body, receive), send)

    async def _wait_for_turn(self, name: tuple[str, str], asked: bytes) -> _Entry:
        """The entry with its answer, or a new one that the caller has to serve."""
        while (entry := self._current(name)) is not None:
            if entry.asked != asked:
                raise Conflict(f"`{HEADER}` was used for another request: a key belongs to one path and one body, take a fresh one", field=HEADER)
            if entry.answer is not None:
                return entry
            await entry.ended.wait()
        entry = self._entries[name] = _Entry(asked, time.monotonic())
        return entry

    async def _serve(self, name: tuple[str, str], entry: _Entry, scope: Scope, receive: Receive, send: Send) -> None:
        copy = _Copy(send)
        watch_stream(scope)
        try:
            await self._app(scope, receive, copy)
        finally:
            answer = None if broke_off(scope) else copy.answer()
            if answer is None:
                self._forget(name)
            else:
                entry.answer = answer
                self._bytes += len(answer.body)
                self._make_room()
            entry.ended.set()

    def _current(self, name: tuple[str, str]) -> _Entry | None:
        entry = self._entries.get(name)
        if entry is not None and entry.answer is not None and time.monotonic() - entry.began_s > KEPT_S:
            self._forget(name)
            return None
        return entry

    def _forget(self, name: tuple[str, str]) -> None:
        entry = self._entries.pop(name)
        if entry.answer is not None:
            self._bytes -= len(entry.answer.body)

    def _make_room(self) -> None:
        """The oldest answers go; what is still served stays."""
        while self._bytes > KEPT_BYTES or len(self._entries) > KEPT_ANSWERS:
            oldest = next((name for name, entry in self._entries.items() if entry.answer is not None), None)
            if oldest is None:
                return
            self._forget(oldest)


class _Copy:
    """Sends, and keeps what was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()
        self._length = 0
        self._complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            # Before it is sent: what is added on the way belongs to this request alone.
            self._status, self._headers = message["status"], list(message["headers"])
            await self._send(message)
        else:
            await self._send(message)
            self._length += len(message.get("body", b""))
            if self._length <= LARGEST_ANSWER:
                self._body += message.get("body", b"")
            else:
                self._body.clear()
            self._complete = not message.get("more_body", False)

    def answer(self) -> _Answer | None:
        """What was sent, where it is a whole success and not so large that others would have to go for it."""
        keeps = self._complete and self._status == 200 and self._length <= LARGEST_ANSWER
        return _Answer(self._headers, bytes(self._body)) if keeps else None


def _creates_an_answer(scope: Scope) -> bool:
    return scope["method"] == "POST" and errors.speaks_openai(scope["path"])


def _fingerprint(scope: Scope, body: bytes) -> bytes:
    return hashlib.sha256(scope["path"].encode() + b"\0" + body).digest()


async def _replay(answer: _Answer, send: Send) -> None:
    start: Message = {"type": "http.response.start", "status": 200, "headers": list(answer.headers)}
    MutableHeaders(scope=start)[REPLAYED] = "true"
    await send(start)
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})


def _with_body(body: bytes, receive: Receive) -> Receive:
    """The body that was read, and then whatever comes."""
    told = False

    async def receive_again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
