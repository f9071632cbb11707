"""Real servers for tests: `bloomery up` as its user runs it, on a free port with a data directory of its own."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

BLOOMERY: Final = str(Path(sys.executable).with_name("bloomery"))
READY_S: Final = 180.0
STOP_S: Final = 120.0
_POLL_S: Final = 0.05


class LiveServer(NamedTuple):
    """A running server; `pids` asks anew each time, for processes come and go."""

    url: str
    key: str
    data_dir: Path
    process: "subprocess.Popen[bytes]"
    """The supervisor."""

    def children(self) -> dict[str, dict[str, object]]:
        """What the supervisor knows of its children, by name: pid, restarts, state, and since when."""
        rows = json.loads((self.data_dir / "processes.json").read_text())["children"]
        return {row["name"]: row for row in rows}

    def pids(self) -> dict[str, int]:
        """Ids of the processes that run, by name: `api`, `engine-<alias>`, and `supervisor`. Who was just killed is not among them, though
        the supervisor may not know it yet."""
        known = ((name, row["pid"]) for name, row in self.children().items())
        return {**{name: pid for name, pid in known if isinstance(pid, int) and alive(pid)}, "supervisor": self.process.pid}

    def pid(self, name: str) -> int:
        """The process of that name, waited for where it is being started again."""
        wait_until(lambda: name in self.pids())
        return self.pids()[name]

    def stop(self) -> int:
        """Ask it to stop, as Ctrl-C does; its exit status."""
        self.process.terminate()
        return self.process.wait(STOP_S)

    def logs(self) -> str:
        """The end of everything that its processes said."""
        files = [self.data_dir.parent / f"{self.data_dir.name}.up.log", *sorted((self.data_dir / "logs").glob("*.log"))]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-4000:]}" for file in files if file.exists())


@contextmanager
def running_server(
    data_dir: Path,
    *options: str,
    env: Mapping[str, str] | None = None,
    replicas: int | None = 0,
    threads: int | None = 1,
    jobs: int = 0,
    program: Sequence[str] = (BLOOMERY,),
) -> Iterator[LiveServer]:
    """A server that is ready; stopped at the end, and its logs printed if the body fails.

    A replica, and the runner of `jobs`, is one more process to start: most need none.

    `replicas` and `threads` None are what `up` chooses.
    """
    said = data_dir.parent / f"{data_dir.name}.up.log"
    argv = [
        *program,
        "up",
        "--data-dir",
        str(data_dir),
        "--port",
        "0",
        *([] if threads is None else ["--threads", str(threads)]),
        *([] if replicas is None else ["--replicas", str(replicas)]),
        "--jobs",
        str(jobs),
        *options,
    ]
    with said.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, env={**os.environ, **(env or {})})
    server = LiveServer("", "", data_dir, process)
    try:
        wait_until(lambda: " is ready: " in said.read_text() or process.poll() is not None, READY_S)
        url = said.read_text().partition(" is ready: ")[2].split("\n")[0]
        assert url, "the server did not come up"
        yield server._replace(url=url, key=(data_dir / "api_key").read_text().strip())
    except BaseException:
        print(server.logs())
        raise
    finally:
        if process.poll() is None:
            server.stop()


def free_port() -> int:
    """One below those that the kernel gives to whoever wants any: nobody is given it before a server listens there, or between two of its lives."""
    drawn = random.SystemRandom()
    while True:
        with socket.socket() as probe, suppress(OSError):
            port = drawn.randrange(20_000, 32_000)
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(condition: Callable[[], bool], within_s: float = 120.0) -> None:
    """Poll until it holds; fail when it does not in time, which is meant for what will never hold: on a slow machine a process starts for long."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(_POLL_S)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    status = Path(f"/proc/{pid}/status")
    try:
        return "\nState:\tZ" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
