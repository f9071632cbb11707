"""A small server that speaks OpenAI's contract, on a real socket: what models elsewhere are for tests."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

KEY: Final = "sk-secret-of-outside"
Says = Callable[[dict[str, Any]], Any]
"""What is said to a chat completion: a text, or what is JSON; a number of a hundred or more is a status to refuse with."""


class Outside:
    """`url` is what an endpoint's `base_url` is; `asked` are the bodies of chat completions, and `busiest` is how many were in hand at once."""

    def __init__(self, url: str, says: Says) -> None:
        self.url, self.says = url, says
        self.asked: list[dict[str, Any]] = []
        self.busiest = self._busy = 0
        self._lock = threading.Lock()

    def answer(self, path: str, key: str | None, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and body."""
        if key != f"Bearer {KEY}":
            return 401, {"error": {"message": f"wrong key {(key or '').removeprefix('Bearer ')}"}}
        if path == "/v1/embeddings":
            data = [{"index": place, "embedding": [float(len(text)), 1.0]} for place, text in enumerate(body["input"])]
            return 200, {"data": data, "usage": {"prompt_tokens": 3 * len(data)}}
        with self._lock:
            self.asked.append(body)
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
        try:
            said = self.says(body)
        finally:
            with self._lock:
                self._busy -= 1
        if isinstance(said, int) and said >= 100:
            return said, {"error": {"message": f"refused with {said}"}}
        text = said if isinstance(said, str) else json.dumps(said)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 10}}


@contextmanager
def outside(says: Says) -> Iterator[Outside]:
    """Listening on loopback until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, answer = found.answer(self.path, self.headers.get("authorization"), body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nowhere."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Outside(f"http://127.0.0.1:{server.server_port}/v1", says)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
