"""The outer end of the fork server and of its forks: starting it, a channel to each fork, and how each ended."""

import array
import asyncio
import errno
import json
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Self, cast

import bloomery
from bloomery.grade import container
from bloomery.grade.jail import Level
from bloomery.grade.work import remove
from bloomery.types.errors import NotSupported, Unavailable

START_S: Final = 60.0
_LATE: Final = f"the fork server of graders did not start within {START_S:g} s"
_END_S: Final = 10.0
_EXIT_S: Final = 1.0
_MESSAGE_BYTES: Final = 1 << 16
_SAID_CHARS: Final = 500
"""Of the last words of who ended while it started."""
_UNEXECUTABLE: Final = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR, errno.ELOOP)
"""Of programs that no second try executes."""
_FRAMES: Final = 4096
"""Of a channel that wait to be received, at most."""
_LENGTH: Final = struct.Struct(">I")
_CODE: Final = """
import os, sys
_, descriptor, root, work = sys.argv
if descriptor != "3":
    os.dup2(int(descriptor), 3, inheritable=False)
    os.close(int(descriptor))
sys.path.insert(0, root)
from bloomery.grade.forkserver import main
main(root, work)
"""
PLACES: Final[dict[Level, str]] = {"L1": "a jail (level L1)", "L2": "a jail in a container (level L2)"}
"""Where code of graders runs."""


class Obtained(NamedTuple):
    """What this machine gives graders: the level that was asked for with what holds, or no more than `L0` and why."""

    level: Level
    layers: tuple[str, ...]
    reason: str | None

    @classmethod
    def told(cls, message: bytes, asked: Level) -> Self:
        """By a fork server, in its first message."""
        if not message:
            return cls("L0", (), "the fork server of graders ended while it started; what it said is in the log")
        told = json.loads(message)
        if "refused" in told:
            return cls("L0", (), told["refused"])
        return cls(asked, (*((container.LAYER,) if asked == "L2" else ()), *told["layers"]), None)


class Ended(NamedTuple):
    """How a fork did."""

    status: int
    """As `Popen.returncode` has it: negative for a signal."""
    why: str | None
    """`asked` or `disk` where the fork server killed it."""


class TimedOut(Exception):
    """Nothing came within the time."""


class Lost(Exception):
    """The other end is closed."""


class Garbled(Exception):
    """The other end says what no end of ours says."""


def level(asked: Level = "L1") -> Obtained:
    """Find out, in throw-away processes, whether this machine gives a level, and why not."""
    if asked == "L2" and (why := container.missing()) is not None:
        return Obtained("L0", (), why)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    work = _work_directory(asked)
    try:
        with tempfile.TemporaryFile() as said, ours:
            with theirs:
                argv, descriptors = _argv(theirs, work, asked, 0), [theirs.fileno()]
                try:
                    process = subprocess.Popen(argv, env={}, stdin=subprocess.DEVNULL, stderr=said, pass_fds=descriptors, start_new_session=True)
                except OSError as error:
                    return Obtained("L0", (), _unexecuted(argv[0], asked, error))
            with process:
                found = _first_word(ours, process, asked)
            return found if found is not None else Obtained("L0", (), _last_words(process.returncode, said))
    finally:
        _remove(work, asked)


def _first_word(control: socket.socket, process: subprocess.Popen[bytes], asked: Level) -> Obtained | None:
    """What a throw-away fork server says of itself, which ends then; None of one that ended without a word."""
    with control:
        control.settimeout(START_S)
        try:
            message = control.recv(_MESSAGE_BYTES)
        except TimeoutError:
            process.kill()
            return Obtained("L0", (), _LATE)
        except OSError:
            message = b""
    return Obtained.told(message, asked) if message else None


def _unexecuted(program: str, asked: Level, error: OSError) -> str:
    mend = f": {container.INSTALL}" if asked == "L2" else ""
    return f"`{program}` cannot be executed ({error.strerror}){mend}"


def _last_words(status: int, said: BinaryIO) -> str:
    """The reason of who ended while it started: of a program that complains or of Python the last line says it."""
    said.seek(0)
    lines = said.read().decode(errors="replace").split("\n")
    last = next((f": {line.strip()[:_SAID_CHARS]}" for line in reversed(lines) if line.strip()), ", and said nothing")
    return f"the fork server of graders ended {described(Ended(status, None))} while it started{last}"


class Channel(asyncio.Protocol):
    """To one fork. Frames are taken apart as they come, so that whoever is in time is in time even where this process was not."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._frames: deque[bytes] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._lost: Exception | None = None
        self.frame_bytes = _MESSAGE_BYTES
        """The longest frame that is taken."""

    def send(self, frame: object) -> None:
        """Whoever does not read it will be killed for something else."""
        body = json.dumps(frame, default=str).encode()
        if self._transport is not None:
            self._transport.write(_LENGTH.pack(len(body)) + body)

    async def receive(self, until: float) -> bytes:
        """The next frame, by a time of the loop; raises TimedOut or Lost."""
        while not self._frames:
            if self._lost is not None:
                raise self._lost
            self._waiting = self._loop.create_future()
            timer = self._loop.call_at(until, self._wake, TimedOut())
            try:
                await self._waiting
            finally:
                timer.cancel()
                self._waiting = None
        return self._frames.popleft()

    def close(self) -> None:
        """Drop what is left."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """By asyncio."""
        # Loops of other makers have transports of their own.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """By asyncio."""
        self._buffer += data
        while self._lost is None and len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self.frame_bytes or len(self._frames) == _FRAMES:
                self._give_up()
            elif len(self._buffer) < _LENGTH.size + length:
                break
            else:
                self._frames.append(bytes(self._buffer[_LENGTH.size : _LENGTH.size + length]))
                del self._buffer[: _LENGTH.size + length]
        if self._frames:
            self._wake()

    def connection_lost(self, _: Exception | None) -> None:
        """By asyncio."""
        self._lost = self._lost or Lost()
        self._wake()

    def _give_up(self) -> None:
        self._lost = Garbled()
        self._frames.clear()
        self.close()
        self._wake()

    def _wake(self, error: Exception | None = None) -> None:
        if self._waiting is None or self._waiting.done():
            return
        if error is None:
            self._waiting.set_result(None)
        else:
            self._waiting.set_exception(error)


class Fork(NamedTuple):
    """One jailed process."""

    number: int
    channel: Channel
    ended: "asyncio.Future[Ended]"


class ForkServer:
    """A running one. `alive` turns false when it ends, and everything that was forked has ended then."""

    def __init__(self, control: socket.socket, work: Path, process: asyncio.subprocess.Process, level: Level) -> None:
        self._loop = asyncio.get_running_loop()
        self._control, self._work, self._process, self._level = control, work, process, level
        self._forks: dict[int, Fork] = {}
        self._count = 0
        self._started: asyncio.Future[Obtained] = self._loop.create_future()
        self.alive = True
        self._loop.add_reader(control.fileno(), self._told)

    @classmethod
    async def start(cls, level: Level = "L1", *, disk_bytes: int = 0) -> tuple[Self, Obtained]:
        """Raises NotSupported with the reason where this machine gives no jail, or no container for it. `disk_bytes`: what all forks may have at a
        time together, where that is memory."""
        if level == "L2" and (why := container.missing()) is not None:
            raise NotSupported(f"code of graders runs in {PLACES[level]}, and this machine gives none: {why}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        work = _work_directory(level)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *_argv(theirs, work, level, disk_bytes),
                    env={},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except BaseException as error:
            ours.close()
            _remove(work, level)
            if isinstance(error, OSError) and level == "L2" and error.errno in _UNEXECUTABLE:
                why = _unexecuted(container.PROGRAM, level, error)
                raise NotSupported(f"code of graders runs in {PLACES[level]}, and this machine gives none: {why}") from None
            if isinstance(error, OSError):
                raise Unavailable(f"the fork server of graders could not be started: {error.strerror}") from None
            raise
        server = cls(ours, work, process, level)
        try:
            async with asyncio.timeout(START_S):
                obtained = await server._started
        except TimeoutError:
            await server.stop()
            raise Unavailable(_LATE) from None
        except asyncio.CancelledError:
            await server.stop()
            raise
        if obtained.level != level:
            await server.stop()
            raise NotSupported(f"code of graders runs in {PLACES[level]}, and this machine gives none: {obtained.reason}")
        return server, obtained

    async def fork(self, *, memory_bytes: int, cpu_s: int, disk_bytes: int) -> Fork:
        """A fresh one, which jails itself; raises Unavailable where the fork server is gone."""
        if not self.alive:
            raise Unavailable("the fork server of graders is gone")
        self._count += 1
        ours, theirs = socket.socketpair()
        order = {"do": "fork", "number": self._count, "memory_bytes": memory_bytes, "cpu_s": cpu_s, "disk_bytes": disk_bytes}
        try:
            with theirs:
                self._order(order, theirs.fileno())
        except Unavailable:
            ours.close()
            raise
        fork = Fork(self._count, Channel(), self._loop.create_future())
        self._forks[self._count] = fork
        await self._loop.create_unix_connection(lambda: fork.channel, sock=ours)
        return fork

    async def ends_itself(self, fork: Fork) -> None:
        """Give one that closed its channel a moment, for the rest of its end."""
        with suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(_EXIT_S):
                await asyncio.shield(fork.ended)

    async def end(self, fork: Fork) -> Ended | None:
        """Kill it if it is still there, and say how it ended; None where nobody knows."""
        fork.channel.close()
        try:
            if self.alive and not fork.ended.done():
                self._order({"do": "kill", "number": fork.number})
            async with asyncio.timeout(_END_S):
                return await asyncio.shield(fork.ended)
        except (TimeoutError, Unavailable):
            return None

    async def stop(self) -> None:
        """It and all its forks."""
        self._gone()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await asyncio.to_thread(_remove, self._work, self._level)

    def _order(self, order: dict[str, Any], descriptor: int | None = None) -> None:
        beside = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        try:
            # As many as have places are there, so that orders never fill the socket of one who lives.
            self._control.sendmsg([json.dumps(order).encode()], beside)
        except OSError as error:
            self._gone()
            raise Unavailable(f"the fork server of graders does not answer: {error.strerror}") from None

    def _told(self) -> None:
        try:
            message = self._control.recv(_MESSAGE_BYTES)
        except OSError:
            message = b""
        if not self._started.done():
            self._started.set_result(Obtained.told(message, self._level))
        elif message:
            told = json.loads(message)
            fork = self._forks.pop(told["ended"])
            fork.ended.set_result(Ended(told["status"], told["why"]))
        if not message:
            self._gone()

    def _gone(self) -> None:
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        for fork in self._forks.values():
            fork.ended.set_exception(Unavailable("the fork server of graders went away"))
            # Nobody may be waiting for it.
            fork.ended.exception()
        self._forks.clear()


def described(ended: Ended) -> str:
    """In words."""
    return f"by {signal.Signals(-ended.status).name}" if ended.status < 0 else f"with status {ended.status}"


def _argv(control: socket.socket, work: Path, level: Level, disk_bytes: int) -> Sequence[str]:
    root = Path(bloomery.__file__).parent.parent
    inside = container.command(disk_bytes) if level == "L2" else []
    # Isolated: no variable and no file of a user changes what is imported. Nobody writes into the interpreter's directories.
    return [*inside, sys.executable, "-I", "-B", "-X", "utf8", "-c", _CODE, str(control.fileno()), str(root), str(work)]


def _work_directory(level: Level) -> Path:
    if level == "L2":
        return container.WORK
    work = Path(tempfile.mkdtemp(prefix="bloomery-graders-"))
    # The owner of a directory in it need not be allowed to look around.
    work.chmod(0o711)
    return work


def _remove(work: Path, level: Level) -> None:
    if level == "L2":
        # It was gone with the container.
        return
    with suppress(OSError):
        # Of a fork server that was killed, something may be left that only its forks' users could remove.
        remove(work)
