"""Requests that may be repeated: with the header `Idempotency-Key`, a request under OpenAI's contract that creates an answer gives one answer.

What changes something under `/api/v1`, and a file that is uploaded, is repeated by its own means (`repeats`).

The answers that were given lie here, in memory, for a day and up to a number of bytes; who has most of them loses his oldest first. A repetition that
arrives while the first request is still served waits for it. A stream is kept as it was sent, and is repeated in one go. What failed, or broke off
because its client hung up, is forgotten: its repetition is served anew.
"""

import asyncio
import hashlib
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bloomery.api import errors
from bloomery.api.exchange import broke_off, read_bytes, unless_gone, watch_stream
from bloomery.api.headers import answer_headers
from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import BELONGS, HEADER, KEPT_S
from bloomery.types.errors import BloomeryError, Conflict, InvalidInput, Unavailable

REPLAYED: Final = "idempotent-replayed"
MAX_KEY: Final = 255
KEPT_BYTES: Final = 64 << 20
LARGEST_ANSWER: Final = KEPT_BYTES // 16
"""One that is larger is not kept: many others would have to go for it."""
WAITING_BYTES: Final = 32 << 20
"""Of the bodies of all repetitions that wait; one that finds no room waits without its body, and cannot take the place of the first."""
WAIT_S: Final = 600.0
_ENTRY_BYTES: Final = 1024
"""What an answer takes beside its body."""
_NONE: Final = re.compile(r"(?!)")
"""No path."""
_OURS: Final = b"x-bloomery-"
"""Headers that begin like this change what is answered or recorded."""


class _Name(NamedTuple):
    """A key as its caller chose it, which counts within one API key of one project."""

    project: str
    key_id: str
    chosen: str


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


@dataclass(eq=False)
class _Sent:
    """The body of a request, until it is passed on or nobody has room for it."""

    body: bytes | None

    def received(self, receive: Receive) -> Receive:
        """The body, and then whatever comes."""

        async def receive_again() -> Message:
            if self.body is None:
                return await receive()
            body, self.body = self.body, None
            return {"type": "http.request", "body": body, "more_body": False}

        return receive_again


class Idempotent:
    """Answers repetitions from what was answered before; at most `most_bytes` of a body are read; `standing`: headers that say how a key stands.

    Paths that are `but_for` this have means of their own.
    """

    def __init__(
        self,
        app: ASGIApp,
        most_bytes: int,
        standing: Callable[[Principal], dict[str, str]],
        *,
        but_for: re.Pattern[str] = _NONE,
        kept_bytes: int = KEPT_BYTES,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        self._app, self._most_bytes, self._standing = app, most_bytes, standing
        self._answers, self._but_for = _Answers(kept_bytes), but_for
        self._waiting_bytes, self._most_waiting_bytes = 0, waiting_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None
        caller = Request(scope).state.caller if key is not None else None
        if key is None or self._but_for.fullmatch(scope["path"]) or not _creates_an_answer(scope) or not isinstance(caller, Principal):
            return await self._app(scope, receive, send)
        name = _Name(caller.project, caller.key_id, key)
        try:
            check_key(key)
            sent = _Sent(body := await read_bytes(Request(scope, receive), self._most_bytes))
            asked = hash_of_request(scope, body)
            del body
            entry = await unless_gone(receive, self._wait_for_turn(name, asked, sent))
        except BloomeryError as refusal:
            answer_headers(scope).append(lambda: self._standing(caller))
            return await errors.respond(scope["path"], refusal)(scope, receive, send)
        if entry is None:
            return None
        if entry.answer is not None:
            answer_headers(scope).append(lambda: self._standing(caller))
            return await _replay(entry.answer, send)
        await self._serve(name, entry, scope, sent.received(receive), send)

    async def _wait_for_turn(self, name: _Name, asked: bytes, sent: _Sent) -> _Entry:
        """The entry with its answer, or a new one that the caller has to serve."""
        try:
            async with asyncio.timeout(WAIT_S):
                while (entry := self._answers.get(name)) is not None:
                    if entry.asked != asked:
                        raise Conflict(f"`{HEADER}` was used for another request: {BELONGS}, take a fresh one", field=HEADER)
                    if entry.answer is not None:
                        return entry
                    with self._holding(sent):
                        await entry.ended.wait()
        except TimeoutError:
            raise Unavailable(f"waited {WAIT_S:g} s for the first request with this `{HEADER}`, which is still served: send it again") from None
        if sent.body is None:
            raise Unavailable(f"the first request with this `{HEADER}` has failed, and there was no room to hold this one meanwhile: send it again")
        return self._answers.begin(name, asked)

    @contextmanager
    def _holding(self, sent: _Sent) -> Iterator[None]:
        """Who waits keeps his body as long as there is room for it."""
        size = len(sent.body or b"")
        if self._waiting_bytes + size > self._most_waiting_bytes:
            sent.body, size = None, 0
        self._waiting_bytes += size
        try:
            yield
        finally:
            self._waiting_bytes -= size

    async def _serve(self, name: _Name, entry: _Entry, scope: Scope, receive: Receive, send: Send) -> None:
        copy = _Copy(send)
        watch_stream(scope)
        try:
            await self._app(scope, receive, copy)
        finally:
            self._answers.end(name, None if broke_off(scope) else copy.answer())
            entry.ended.set()


def check_key(key: str) -> None:
    """Refuse a key that is not one."""
    if not 0 < len(key) <= MAX_KEY:
        raise InvalidInput(f"`{HEADER}` has 1 to {MAX_KEY} characters, not {len(key)}", field=HEADER)


def hash_of_request(scope: Scope, body: bytes) -> bytes:
    """Of all that a repetition must have in common with the first request."""
    ours = sorted(name + b": " + value for name, value in scope["headers"] if name.startswith(_OURS))
    return hashlib.sha256(b"\0".join([scope["path"].encode(), scope["query_string"], *ours]) + b"\0\0" + body).digest()


class _Answers:
    """What was asked and answered, by API key."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._entries: dict[tuple[str, str], OrderedDict[str, _Entry]] = {}
        self._bytes: Counter[tuple[str, str]] = Counter()

    def get(self, name: _Name) -> _Entry | None:
        """What a key was used for, unless that is too long ago."""
        entries = self._entries.get(name[:2])
        entry = None if entries is None else entries.get(name.chosen)
        if entry is not None and entry.answer is not None and time.monotonic() - entry.began_s > KEPT_S:
            self._forget(name)
            return None
        return entry

    def begin(self, name: _Name, asked: bytes) -> _Entry:
        """A key is used."""
        entry = _Entry(asked, time.monotonic())
        self._entries.setdefault(name[:2], OrderedDict())[name.chosen] = entry
        return entry

    def end(self, name: _Name, answer: _Answer | None) -> None:
        """This was answered, and None of it that is to be repeated."""
        if answer is None:
            self._forget(name)
            return
        self._entries[name[:2]][name.chosen].answer = answer
        self._bytes[name[:2]] += _weight(answer)
        self._make_room()

    def _forget(self, name: _Name) -> None:
        owner = name[:2]
        entry = self._entries[owner].pop(name.chosen)
        if entry.answer is not None:
            self._bytes[owner] -= _weight(entry.answer)
        if not self._entries[owner]:
            del self._entries[owner], self._bytes[owner]

    def _make_room(self) -> None:
        """Of the project that has most, and there of the key that has most, the oldest answers go: nobody drives out those of others."""
        while self._bytes.total() > self._kept_bytes:
            projects = Counter[str]()
            for (project, _), weight in self._bytes.items():
                projects[project] += weight
            owner = max(self._bytes, key=lambda owner: (projects[owner[0]], self._bytes[owner]))
            oldest = next(chosen for chosen, entry in self._entries[owner].items() if entry.answer is not None)
            self._forget(_Name(*owner, oldest))


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


def _weight(answer: _Answer) -> int:
    return _ENTRY_BYTES + len(answer.body)


def _creates_an_answer(scope: Scope) -> bool:
    return scope["method"] == "POST" and errors.speaks_openai(scope["path"])


async def _replay(answer: _Answer, send: Send) -> None:
    start: Message = {"type": "http.response.start", "status": 200, "headers": list(answer.headers)}
    MutableHeaders(scope=start)[REPLAYED] = "true"
    await send(start)
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
