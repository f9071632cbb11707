"""One connection of a client, before and beside the requests that it brings.

The server below (uvicorn, with httptools) reads a head of any length for any time, waits for ever for the rest of a body and for who takes nothing of
his answer, works on for a client who has left where he had sent more than one request, and loses a body whose head offers another protocol.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES: Final = 64 << 10
HEAD_S: Final = 30.0
"""From the first byte of a request, or from a connection that brings none, to the end of its head."""
SILENT_S: Final = 120.0
"""In the middle of a body, and of an answer that nobody takes."""

_TOO_LARGE: Final = (
    "431 Request Header Fields Too Large",
    f"the head of a request has at most {MAX_HEAD_BYTES >> 10} KiB: send fewer or shorter headers",
)
_HEAD_LATE: Final = "408 Request Timeout", f"the head of a request is waited for {HEAD_S:g} s: send it at once"
_BODY_LATE: Final = "408 Request Timeout", f"nothing of the body came for {SILENT_S:g} s: send the request again"


class Connection(HttpToolsProtocol):
    """Bounds how long a head is, and how long a client may take to send it, to go on with a body and to take what he is sent."""

    head_s, silent_s = HEAD_S, SILENT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._served: RequestResponseCycle | None = None
        """The request that is answered now. `cycle` is the latest, which may wait behind it."""
        self._in_head = self._in_body = self._offers = False
        self._head_bytes = 0
        """Of a head that is not whole, those that came after its first part."""
        self._sending: asyncio.TimerHandle | None = None
        """When the client is to have sent more: of a body, or a whole head."""
        self._sending_body = False
        self._taking: asyncio.TimerHandle | None = None
        """When the client is to have taken more."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody is there, and to say what he wants."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever works on a request of this connection hears that its client has left."""
        self._wait_no_more()
        self.resume_writing()
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, and wait for what is still to come."""
        self._unset_keepalive_if_required()
        was_in_head = self._in_head
        try:
            self._read(data)
        except httptools.HttpParserError as error:
            too_large = isinstance(error.__context__, _HeadTooLarge)
            return self._refuse(*_TOO_LARGE) if too_large else self.send_400_response("Invalid HTTP request received.")
        self._head_bytes = self._head_bytes + len(data) if was_in_head and self._in_head else 0
        if self._head_bytes > MAX_HEAD_BYTES:
            return self._refuse(*_TOO_LARGE)
        if self._in_body:
            self._wait_for_body()
        elif self._in_head or not self._answering:
            self._wait_for_head()
        else:
            self._wait_no_more()

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head is whole."""
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            raise _HeadTooLarge
        self._in_head, self._offers = False, self.parser.should_upgrade() and self._get_upgrade() is not None
        if not self._offers:
            self._in_body = True
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A request is whole."""
        if not self._offers:
            self._in_body = False
            super().on_message_complete()

    def pause_writing(self) -> None:
        """The client takes less than he is sent."""
        super().pause_writing()
        self._taking = self.loop.call_later(self.silent_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has taken what was there."""
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None
        super().resume_writing()

    @property
    def _answering(self) -> bool:
        return self._served is not None and not self._served.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def _read(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            # To the parser this request has no body, and what follows is in the protocol that was offered. None is taken up.
            head = self._head_without_offer()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._read(head + data[offer.args[0] :])

    def _head_without_offer(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _wait_for_head(self) -> None:
        """From its beginning, however often something of it comes."""
        if self._sending is None or self._sending_body:
            self._wait(self.head_s, self._head_late, body=False)

    def _wait_for_body(self) -> None:
        """Anew with all that comes of it."""
        self._wait(self.silent_s, self._body_late, body=True)

    def _wait(self, delay_s: float, late: Callable[[], None], *, body: bool) -> None:
        self._wait_no_more()
        self._sending, self._sending_body = self.loop.call_later(delay_s, late), body

    def _wait_no_more(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _head_late(self) -> None:
        self._sending = None
        if self._answering:
            self._wait_for_head()
        elif self._in_head:
            self._refuse(*_HEAD_LATE)
        else:
            self.transport.close()

    def _body_late(self) -> None:
        if self.flow.read_paused:
            # It is not the client who is awaited.
            self._wait_for_body()
        else:
            self._refuse(*_BODY_LATE)

    def _refuse(self, status: str, why: str) -> None:
        """Say so where nothing else is being said, and hang up."""
        self._wait_no_more()
        if not (self._answering and self._served is not None and self._served.response_started):
            head = f"HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: {len(why)}\r\nconnection: close\r\n\r\n"
            self.transport.write((head + why).encode())
        self.transport.close()


class _HeadTooLarge(Exception):
    pass
