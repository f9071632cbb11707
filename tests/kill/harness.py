"""A server that gets killed, and a workload whose outcome must not care.

The workload runs in a process of its own (`python -m tests.kill.workload`), so that a reference and a disturbed run have nothing in common but
the operations they submit.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

READY_S = 90.0
WORK_S = 240.0


class Server(NamedTuple):
    """A running `bloomery up`."""

    url: str
    key: str
    data_dir: Path

    def processes(self) -> dict[str, int]:
        """Pid of every child that runs at the moment, by name."""
        children = json.loads((self.data_dir / "processes.json").read_text())
        return {child["name"]: child["pid"] for child in children if child["pid"]}


@contextlib.contextmanager
def server(data_dir: Path, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Start a server on a free port; stop it at the end."""
    port = free_port()
    argv = [sys.executable, "-m", "bloomery.cli.main", "up", "--data-dir", str(data_dir), "--port", str(port), "--threads", "1"]
    with (data_dir.parent / f"{data_dir.name}.log").open("w") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}, process_group=0)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(url, process)
            yield Server(url, (data_dir / "api_key").read_text().strip(), data_dir)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(READY_S)


def wait_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "the supervisor ended before it was ready"
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/healthz", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"no server at {url} after {READY_S} s")


def start_workload(to: Server, seed: int = 1) -> "subprocess.Popen[str]":
    """Submit the operations from another process; `finish` reads what came of them."""
    argv = [sys.executable, "-m", "tests.kill.workload", to.url, to.key, str(seed)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def finish(workload: "subprocess.Popen[str]") -> dict[str, Any]:
    """The workload's report: every result, and the final weights hash."""
    output, _ = workload.communicate(timeout=WORK_S)
    assert workload.returncode == 0, output
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
