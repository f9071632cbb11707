"""The base URL that agents are given: a small server on this machine, for as long as a loop runs, that speaks the OpenAI contract's chat.

A key is a session, and nothing else is let in. `POST /v1/chat/completions` answers, `POST /v1/reward` takes a reward by callback.
"""

import json
import select
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Final, Self

from bloomery.recipes.agent_sessions import Session
from bloomery.types.errors import BloomeryError, Gone, InvalidInput, NotFound, TooLarge, Unauthorized, Unavailable

MAX_BODY_BYTES: Final = 16 << 20
_IDLE_S: Final = 600.0
"""How long a connection may say nothing."""
_STATUS: Final[dict[type[BloomeryError], int]] = {Unauthorized: 401, NotFound: 404, Gone: 410, TooLarge: 413, Unavailable: 503}


class Door:
    """Open within its `with`; threads may let sessions in and out."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._sessions: dict[str, Session] = {}
        self._server = _Server((host, 0), _handler(self._sessions))
        self.base_url = f"http://{host}:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="agent-door")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def admit(self, session: Session) -> None:
        """Let in whoever has its key."""
        self._sessions[session.key] = session

    def dismiss(self, session: Session) -> None:
        """Its key opens nothing any more."""
        self._sessions.pop(session.key, None)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def _handler(known: dict[str, Session]) -> type["_Handler"]:
    class Handler(_Handler):
        sessions = known

    return Handler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    disable_nagle_algorithm = True
    sessions: ClassVar[dict[str, Session]]

    def do_POST(self) -> None:
        """Answer, or say why not: nothing that an agent sends ends the door."""
        try:
            body = self._body()
            session = self._session()
            match self.path.partition("?")[0]:
                case "/v1/chat/completions":
                    asked, answer = session.answer(body, self._is_there)
                    return self._stream(answer) if asked.stream else self._send(200, answer)
                case "/v1/reward":
                    session.report(body)
                    return self._send(200, {"rollout_id": session.rollout_id})
            raise NotFound(f"there is no {self.path} here: ask /v1/chat/completions")
        except ConnectionError:
            self.close_connection = True
        except BloomeryError as error:
            self._refuse(error)
        except Exception as error:
            # Without an answer a client would ask again.
            self._refuse(BloomeryError(f"internal error ({type(error).__name__}: {error})"))

    def _session(self) -> Session:
        key = self.headers.get("x-api-key") or self.headers.get("authorization", "").removeprefix("Bearer ")
        session = self.sessions.get(key)
        if session is None:
            raise Unauthorized("this key opens no rollout: it was never given out, or its rollout is over")
        return session

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            # What is not read would be taken for the next request.
            self.close_connection = True
            raise TooLarge(f"a body says its length, and has at most {MAX_BODY_BYTES} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise InvalidInput("the body is a JSON object")
        return body

    def _is_there(self) -> bool:
        """Whether the other side still waits; one that gave up has closed its end, and asks anew on another connection."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return not readable or self.connection.recv(1, socket.MSG_PEEK) != b""
        except OSError:
            return False

    def _refuse(self, error: BloomeryError) -> None:
        status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 400 if error.category == "user" else 500)
        kind = "invalid_request_error" if error.category == "user" else "server_error"
        self._send(status, {"error": {"message": error.message, "type": kind, "code": error.code, "param": error.field}})

    def _stream(self, answer: dict[str, Any]) -> None:
        """All of it as one chunk: an agent that reads streams reads this."""
        (choice,) = answer["choices"]
        calls = [{"index": index, **call} for index, call in enumerate(choice["message"].get("tool_calls", ()))]
        delta = choice["message"] | ({"tool_calls": calls} if calls else {})
        told = {key: value for key, value in choice.items() if key != "message"} | {"delta": delta}
        chunk = answer | {"object": "chat.completion.chunk", "choices": [told]}
        self._write(200, "text/event-stream", b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")

    def _send(self, status: int, body: dict[str, Any]) -> None:
        self._write(status, "application/json", json.dumps(body).encode())

    def _write(self, status: int, kind: str, body: bytes) -> None:
        try:
            self.send_response(status)
            # Whoever asked twice would have two answers: attempts are repeated as a whole.
            self.send_header("x-should-retry", "false")
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Agents ask thousands of times, and what fails is counted by its kind."""
