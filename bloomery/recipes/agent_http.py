"""A small server on this machine that speaks JSON, for as long as a loop runs: what the doors to rollouts have in common.

A door is a handler that answers requests of one method; whatever goes wrong is told in the words of the OpenAI contract, and ends nothing.
"""

import json
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

from bloomery.types.errors import BloomeryError, Gone, InvalidInput, NotFound, TooLarge, Unauthorized, Unavailable

MAX_BODY_BYTES: Final = 16 << 20
_LENGTH_DIGITS: Final = len(str(MAX_BODY_BYTES))
_IDLE_S: Final = 600.0
"""How long a connection may say nothing."""
_STATUS: Final[dict[type[BloomeryError], int]] = {Unauthorized: 401, NotFound: 404, Gone: 410, TooLarge: 413, Unavailable: 503}


def family_of(host: str) -> socket.AddressFamily:
    """What a host is listened at by: an IPv6 address has colons."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def address_of(host: str, port: int) -> str:
    """As URLs have it."""
    return f"[{host}]:{port}" if family_of(host) is socket.AF_INET6 else f"{host}:{port}"


class LocalServer:
    """Open within its `with`."""

    def __init__(self, host: str, port: int, handler: "type[JsonHandler]") -> None:
        self._server = _Server((host, port), handler)
        self.url = f"http://{address_of(host, self._server.server_address[1])}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name=handler.__name__)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._server.hang_up()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], handler: "type[JsonHandler]") -> None:
        self.address_family = family_of(address[0])
        super().__init__(address, handler)
        self._open: set[Any] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """A client that keeps a connection would go on talking to a server that is no more, and not to the next one at this port."""
        for request in list(self._open):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)


class JsonHandler(BaseHTTPRequestHandler):
    """Answers each POST by `answer`, and each GET by `show`."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    disable_nagle_algorithm = True

    def answer(self, path: str, body: dict[str, Any]) -> None:
        """Say it by `send` or `write`, or raise why not."""
        raise NotImplementedError

    def show(self, path: str) -> dict[str, Any]:
        """What is to be read there, or raise why nothing is."""
        raise NotFound(f"there is nothing to read at {path}")

    def do_POST(self) -> None:
        """Answer with what was asked for."""
        self._answering(lambda path: self.answer(path, self._body()))

    def do_GET(self) -> None:
        """Show what there is."""
        if "content-length" in self.headers or "transfer-encoding" in self.headers:
            # A body that is not read would be taken for the next request.
            self.close_connection = True
        self._answering(lambda path: self.send(200, self.show(path)))

    def _answering(self, answer: Callable[[str], None]) -> None:
        """Or say why not: nothing that anyone sends ends the server."""
        try:
            answer(self.path.partition("?")[0])
        except ConnectionError:
            self.close_connection = True
        except BloomeryError as error:
            self._refuse(error)
        except Exception as error:
            # Without an answer a client would ask again.
            self._refuse(BloomeryError(f"internal error ({type(error).__name__}: {error})"))

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or len(length) > _LENGTH_DIGITS or int(length) > MAX_BODY_BYTES:
            # What is not read would be taken for the next request.
            self.close_connection = True
            raise TooLarge(f"a body says its length, and has at most {MAX_BODY_BYTES} bytes")
        read = self.rfile.read(int(length))
        if len(read) < int(length):
            self.close_connection = True
            raise InvalidInput(f"the body ended after {len(read)} bytes, and said that it has {length}")
        try:
            body = json.loads(read)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise InvalidInput("the body is a JSON object")
        return body

    def is_there(self) -> bool:
        """Whether the other side still waits; one that gave up has closed its end, and asks anew on another connection."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return not readable or self.connection.recv(1, socket.MSG_PEEK) != b""
        except OSError:
            return False

    def send(self, status: int, body: dict[str, Any]) -> None:
        """A JSON object."""
        self.write(status, "application/json", json.dumps(body).encode())

    def write(self, status: int, kind: str, body: bytes) -> None:
        """Bytes of a media type."""
        try:
            self.send_response(status)
            # Whoever asked twice would have two answers: attempts are repeated as a whole.
            self.send_header("x-should-retry", "false")
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            if self.close_connection:
                self.send_header("connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except OSError:
            self.close_connection = True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no request, or has a method that nothing is asked by here, is refused in the same words as all else."""
        # Where it ends, and another one begins, nobody knows.
        self.close_connection = True
        self._tell_error(code, InvalidInput(message or HTTPStatus(code).phrase))

    def _refuse(self, error: BloomeryError) -> None:
        status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 400 if error.category == "user" else 500)
        self._tell_error(status, error)

    def _tell_error(self, status: int, error: BloomeryError) -> None:
        kind = "invalid_request_error" if error.category == "user" else "server_error"
        self.send(status, {"error": {"message": error.message, "type": kind, "code": error.code, "param": error.field}})

    def log_message(self, format: str, *args: Any) -> None:
        """Agents ask thousands of times, and what fails is counted by its kind."""
