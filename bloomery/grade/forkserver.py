"""The fork server of graders: a small clean process, started with an empty environment, whose forks jail themselves.

It takes orders on descriptor 3, a socket of whole messages to the process that started it: `fork`, with the end of a channel beside it, and `kill`.
It says what the machine gives, and which fork ended how. It sees neither programs nor rows, dies with its parent, and its forks with it. It alone
makes work directories, and removes them. Standard library alone.
"""

import array
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from bloomery.grade import inside
from bloomery.grade.jail import CHANNEL, DEATH_SIGNAL, ENVIRONMENT, MOST_DESCRIPTORS, Confinement, Ground, Refused, found_ground, is_readable
from bloomery.grade.libc import call
from bloomery.grade.work import holds_more_than, make, remove

_MESSAGE_BYTES: Final = 1 << 16
_LOOK_MS: Final = 200
"""How often work directories are measured."""


class Jailed(NamedTuple):
    """A fork that runs."""

    pid: int
    work: Path
    disk_bytes: int


def main(root: str, work: str) -> None:
    """Serve until the other end is closed. `root` is where this package was imported from, which its forks forget; `work` an empty directory."""
    # One that leaves time to tidy up; the forks' own is SIGKILL.
    call("prctl", DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    sys.path.remove(root)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_DESCRIPTORS, MOST_DESCRIPTORS))
    control = socket.socket(fileno=CHANNEL)
    place = Path(work)
    try:
        ground = found_ground(place)
    except Refused as refused:
        control.send(json.dumps({"refused": str(refused)}).encode())
        return
    for trial in place.iterdir():
        remove(trial)
    sys.path[:] = [entry for entry in sys.path if is_readable(entry)]
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    inside.rehearse()
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"layers": ground.layers()}).encode())
    ForkServer(control, ground, place).serve()
    with suppress(OSError):
        remove(place)


class ForkServer:
    """One thread, which waits for orders and for deaths."""

    def __init__(self, control: socket.socket, ground: Ground, place: Path) -> None:
        self._control, self._ground, self._place = control, ground, place
        self._jailed: dict[int, Jailed] = {}
        self._why: dict[int, str] = {}
        self._orphaned = False

    def serve(self) -> None:
        """Until the other end is closed."""
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        waiting.register(woken, select.POLLIN)
        look = time.monotonic()
        while True:
            ready = {descriptor for descriptor, _ in waiting.poll(_LOOK_MS if self._jailed else None)}
            if woken in ready:
                os.read(woken, 4096)
            if self._orphaned or (self._control.fileno() in ready and not self._obey()):
                break
            if time.monotonic() > look:
                self._measure()
                look = time.monotonic() + _LOOK_MS / 1000
            self._reap()
        for number in self._jailed:
            self._kill(number)
        while self._jailed:
            self._reap(os.WEXITED)

    def _end(self, *_: object) -> None:
        self._orphaned = True

    def _obey(self) -> bool:
        message, passed = _received(self._control)
        if not message:
            return False
        order = json.loads(message)
        if order["do"] == "fork":
            self._fork(order, passed[0])
        else:
            self._kill(order["number"])
        return True

    def _fork(self, order: dict[str, Any], channel: int) -> None:
        number, work = order["number"], self._place / str(order["number"])
        limits = Confinement(memory_bytes=order["memory_bytes"], cpu_s=order["cpu_s"], file_bytes=order["disk_bytes"])
        make(work, self._ground.user(number))
        server = os.getpid()
        if (pid := os.fork()) == 0:
            self._become_jailed(channel, work, number, limits, server)
        os.close(channel)
        self._jailed[number] = Jailed(pid, work, order["disk_bytes"])

    def _become_jailed(self, channel: int, work: Path, number: int, limits: Confinement, server: int) -> None:
        status = 1
        try:
            os.dup2(channel, CHANNEL)
            nowhere = os.open("/dev/null", os.O_RDWR)
            for standard in range(3):
                os.dup2(nowhere, standard)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._ground.confine(work, number, limits, server)
            inside.serve(CHANNEL)
            status = 0
        finally:
            # Nothing that others left to be done at the end is done.
            os._exit(status)

    def _kill(self, number: int) -> None:
        if (jailed := self._jailed.get(number)) is not None and os.waitid(os.P_PID, jailed.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            self._why.setdefault(number, "asked")
            os.kill(jailed.pid, signal.SIGKILL)

    def _reap(self, how: int = os.WEXITED | os.WNOHANG) -> None:
        for number, jailed in [*self._jailed.items()]:
            if os.waitid(os.P_PID, jailed.pid, how | os.WNOWAIT) is None:
                continue
            _, status = os.waitpid(jailed.pid, 0)
            del self._jailed[number]
            with suppress(OSError):
                # What cannot be removed goes with the directory of all of them.
                remove(jailed.work)
            ended = {"ended": number, "status": os.waitstatus_to_exitcode(status), "why": self._why.pop(number, None)}
            with suppress(OSError):
                # Nobody may want to know any more.
                self._control.send(json.dumps(ended).encode())

    def _measure(self) -> None:
        for number, jailed in self._jailed.items():
            if holds_more_than(jailed.work, jailed.disk_bytes):
                self._why.setdefault(number, "disk")
                os.kill(jailed.pid, signal.SIGKILL)


def _received(control: socket.socket) -> tuple[bytes, list[int]]:
    descriptors = array.array("i")
    message, beside, _, _ = control.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(descriptors.itemsize))
    for level, kind, data in beside:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, list(descriptors)
