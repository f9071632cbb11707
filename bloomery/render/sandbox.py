"""A template in a process of its own: `worker` renders, and this end starts it, waits for it, and starts another when it was killed.

The worker limits itself in processor time, so a busy machine does not make honest templates fail; the wait here is longer and only for what should
not happen.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from bloomery.render import worker
from bloomery.types.errors import InvalidInput, Unavailable

ANSWER_S: Final = 20.0
_PASSED_ON: Final = ("LD_LIBRARY_PATH", "TZ")


class Sandbox:
    """One template. The process starts with the first rendering; one rendering at a time."""

    def __init__(self, template: str) -> None:
        self._template = template
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def render(self, variables: dict[str, Any], chosen: Mapping[str, Any] | None = None) -> str:
        """What the template writes; variables are JSON values. Of those that were `chosen` for it, one that it does not read is refused."""
        with self._lock:
            answer = self._ask(json.dumps([{**variables, **(chosen or {})}, list(chosen or ())]))
        if "unread" in answer:
            raise unread(answer["unread"])
        if "error" in answer:
            raise InvalidInput(f"the model's chat template refuses these messages: {answer['error']}", field="messages")
        return answer["text"]

    def close(self) -> None:
        """End the process; a later rendering starts another."""
        with self._lock:
            self._end()

    def _ask(self, line: str) -> dict[str, str]:
        if self._process is None or not self._process.alive:
            self._process = _Process(self._template)
        try:
            return self._process.ask(line)
        except TimeoutError:
            self._end()
            raise Unavailable(f"the chat template was not rendered within {ANSWER_S:g} s: this machine is too busy") from None
        except (OSError, EOFError):
            raise InvalidInput(f"the model's chat template {_why(self._end())}", field="messages") from None

    def _end(self) -> int:
        process, self._process = self._process, None
        return 0 if process is None else process.end()


def unread(name: str) -> InvalidInput:
    """Of a variable that would change nothing."""
    field = f"chat_template_kwargs.{name}"
    return InvalidInput(f"`{field}`: the chat template of this model has no variable of that name: leave it out", field=field)


class _Process:
    def __init__(self, template: str) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(ANSWER_S)
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        with theirs:
            # By its path and isolated: it needs nothing of ours, and neither this directory nor the environment should reach it.
            command = [sys.executable, "-I", str(Path(worker.__file__))]
            self._child = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment)
        self._lines = self._channel.makefile("rb")
        # Without an owner that closes it, the child must not outlive this object or leave a zombie.
        self._finish = weakref.finalize(self, _finish, self._child, self._channel, self._lines)
        self._send(json.dumps(template))

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def ask(self, line: str) -> dict[str, str]:
        self._send(line)
        answer = self._lines.readline()
        if not answer.endswith(b"\n"):
            raise EOFError
        parsed: dict[str, str] = json.loads(answer)
        return parsed

    def end(self) -> int:
        """Kill it, unless it has ended; its exit status."""
        self._finish()
        return self._child.wait()

    def _send(self, line: str) -> None:
        self._channel.sendall(line.encode() + b"\n")


def _finish(child: subprocess.Popen[bytes], channel: socket.socket, lines: BinaryIO) -> None:
    lines.close()
    channel.close()
    child.kill()
    child.wait()


def _why(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"needs more than {worker.CPU_S:g} s of processor time"
    return f"ended its process with status {status}"
