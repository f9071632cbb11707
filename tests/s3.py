"""A server that speaks S3, in a process of its own on loopback: moto's, whose conditional writes are those of the real one when they take turns.

It looks at an object and writes it in two steps, between which another request may write, where S3 does both at once: `python -m tests.s3 PORT`.
"""

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import Any

from bloomery.store.objects import Bucket, BucketAccess, open_bucket
from bloomery.types.ids import new_id
from tests.live import wait_until

READY_S = 60.0
_SIGNED = {"authorization": "AWS4-HMAC-SHA256 Credential=tests/20260101/us-east-1/s3/aws4_request"}


@contextmanager
def running_s3(log: Path) -> Iterator[str]:
    """The address of a server that is empty, until the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Proxies of the environment would be asked for loopback too, and it has nothing of anybody's account.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_") and "proxy" not in name.lower()}
    argv = [sys.executable, "-m", "tests.s3", str(port)]
    with log.open("wb") as out, subprocess.Popen(argv, cwd=Path(__file__).parents[1], stdout=out, stderr=out, env=environment) as process:
        try:
            wait_until(lambda: _answers(port), READY_S)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _serve(port: int) -> None:
    # Its imports take seconds, which nobody has who only asks it.
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import run_simple

    app, turn = DomainDispatcherApplication(create_backend_app), Lock()

    def in_turn(environ: dict[str, Any], start_response: Any) -> Any:
        with turn if {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"} & environ.keys() else nullcontext():
            return app(environ, start_response)

    run_simple("127.0.0.1", port, in_turn, threaded=True, request_handler=MotoRequestHandler)


def new_bucket(endpoint: str, *, deadline_s: float = 30.0) -> Bucket:
    """A bucket that nobody else uses."""
    return open_bucket(new_access(endpoint), deadline_s=deadline_s)


def new_access(endpoint: str) -> BucketAccess:
    """What another process opens the same bucket with."""
    name = new_id("bucket")
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT", headers=_SIGNED), timeout=READY_S):
        return BucketAccess(name, prefix="chain", endpoint=endpoint, key_id="tests", secret="tests")


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=READY_S):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
