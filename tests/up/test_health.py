"""Whatever answers on the api's port, the supervisor goes on."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from bloomery.up.health import Health, ask

NOBODY = Health(answers=False, waiting_for=frozenset())


@contextmanager
def saying(answer: Any) -> Iterator[int]:
    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            """Nothing on the terminal."""

    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "answer", [{"error": "internal"}, [], "ready", None, {"replicas": None}, {"replicas": {"wanted": 1, "ready": [], "silent": []}}]
)
def test_an_answer_of_somebody_else_is_none(answer: Any) -> None:
    with saying(answer) as port:
        assert ask("127.0.0.1", port) == NOBODY


def test_an_answer_of_the_api_is_understood() -> None:
    with saying(
        {"waiting_for": ["tiny"], "replicas": {"wanted": ["hash"], "ready": ["replica-0"], "silent": ["replica-1"]}, "runners": ["here"]}
    ) as port:
        told = Health(True, frozenset({"tiny"}), frozenset({"hash"}), frozenset({"replica-0"}), frozenset({"replica-1"}), frozenset({"here"}))
        assert ask("127.0.0.1", port) == told
