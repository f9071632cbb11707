"""The api's end of the socket to one engine.

`EngineLink` connects, and connects again whenever the connection ends. What concerns runs goes to `inbox` in the order of arrival, beginning with
the `Welcome` of each connection; sampler events go to the iterator of their request, which raises `EngineLost` when its connection ends, so that
the request can be submitted again. A connection on which nothing comes any more is given up (`pulse`). Waits have deadlines and name the engine.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import msgspec

from bloomery.obs import background
from bloomery.services.engines.connection import Connection, EngineLost, Inbox, Received, read_message
from bloomery.services.engines.pulse import SILENCE, Pulse, Silence, Silent
from bloomery.services.engines.stream import RequestStream
from bloomery.services.listeners import Listeners
from bloomery.types.errors import BY_CODE, Unavailable, WorkerError, reason
from bloomery.types.generation import Abort, Generate, Weights
from bloomery.types.ids import new_id
from bloomery.types.kept import ToldEvent
from bloomery.types.protocol import (
    Alive,
    Compare,
    Compared,
    Drain,
    Drained,
    EngineStatus,
    FromEngine,
    Role,
    SamplerEvents,
    Stage,
    Staged,
    Welcome,
)
from bloomery.types.resources import Fidelity

__all__ = ["EngineLink", "EngineLost"]

log = logging.getLogger(__name__)

FIRST_DELAY_S: Final = 0.05
LAST_DELAY_S: Final = 0.5
READY_S: Final = 120.0
"""How long a request waits for an engine that loads its model or is being restarted."""
COMPARE_S: Final = 120.0
STAGE_S: Final = 120.0
"""Weights wait for room in memory while everything there is in use, and in an engine that trains for the end of a pass."""

Answer = TypeVar("Answer", Compared, Staged)


class EngineLink:
    """The way to the engine of one base model, or to a replica, which has no inbox because it has no runs; connects while it is entered."""

    def __init__(self, base_hash: str, socket: Path, inbox: Inbox | None, silence: Silence = SILENCE) -> None:
        self.base_hash = base_hash
        self.connection: Connection | None = None
        self.status: EngineStatus | None = None
        self.problem = "it was not reached yet"
        """Why there is no connection, where there is none."""
        self.away_since_s: float | None = time.monotonic()
        """When it went, or was not there yet; None while there is a connection."""
        self.silent = False
        """Whether a process is at the other end and says nothing."""
        self.turned = Listeners()
        """When it comes, goes, begins to work, and has nothing more in hand."""
        self.changed = Listeners()
        """When it comes or goes, or says something new of itself."""
        self._seen = (False, False)
        """Whether it was there and whether it worked, as its listeners were told."""
        self._socket, self._silence = socket, silence
        self._inbox = inbox
        self._role: Role = "engine" if inbox is not None else "replica"
        self._what = f"the {self._role} of base model {base_hash}"
        self._connected = asyncio.Event()
        self._streams: dict[str, RequestStream] = {}
        self._asked: dict[str, asyncio.Future[Any]] = {}
        """What gets one answer, by its id."""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = background.start(self._stay_connected(), f"engine-link-{self.base_hash[:8]}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await background.stop(self._task)

    @property
    def ready(self) -> bool:
        """Whether the engine answers: a write may find the connection broken before the reader does."""
        return self.connection is not None and self.connection.open

    @property
    def late(self) -> bool:
        """Whether a sign of life of it is missing."""
        return self.connection is not None and self.connection.pulse.late

    @property
    def load(self) -> int:
        """Samples in hand."""
        return sum(stream.samples for stream in self._streams.values())

    @property
    def works(self) -> bool:
        """Whether it has anything in hand, as far as it said."""
        status = self.status
        return bool(self._streams) or (status is not None and status.running_sequences + status.waiting_sequences + status.queued_operations > 0)

    @property
    def welcome(self) -> Welcome | None:
        """What the engine said of itself, while it is connected."""
        return self.connection.welcome if self.connection and self.ready else None

    def proved_root(self, version: str) -> str | None:
        """The root that a version's live tensors were found to have at the other end; None where it is not in memory there."""
        if self.connection is not None and version == self.base_hash and (proved := self.connection.welcome.proved) is not None:
            return proved.root
        held = None if self.status is None else self.status.proved_versions.get(version)
        return None if held is None else held.root

    def detail(self) -> dict[str, Any]:
        """For status pages."""
        if self.connection is None:
            return {"problem": self.problem}
        welcome = self.connection.welcome
        known: dict[str, Any] = {"pid": welcome.pid, "boot_id": welcome.boot_id, "numerics": welcome.numerics, "bit_exact": welcome.bit_exact}
        known |= {"proved": None if welcome.proved is None else msgspec.structs.asdict(welcome.proved)}
        known |= {"model_type": welcome.base.model_type, "parameters": welcome.base.parameters, "dtype": welcome.base.dtype}
        return known | (msgspec.to_builtins(self.status) if self.status else {})

    async def connected(self) -> Connection:
        """The connection, as soon as there is one, however long that takes."""
        while self.connection is None or not self.connection.open:
            self._connected.clear()
            await self._connected.wait()
        return self.connection

    async def wait_ready(self, timeout_s: float = READY_S) -> Connection:
        """The connection, as soon as there is one."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.connected()
        except TimeoutError:
            raise Unavailable(f"{self._what} did not answer within {timeout_s:g} s: {self.problem}") from None

    async def generate(self, request: Generate) -> AsyncGenerator[ToldEvent, None]:
        """The events of one request until its last; leaving early aborts it."""
        connection = await self.wait_ready()
        stream = self._streams[request.request_id] = RequestStream(request)
        self._note_turn()
        try:
            await connection.send(request)
            while not stream.complete:
                yield await stream.next()
        finally:
            del self._streams[request.request_id]
            self._note_turn()
            if not stream.complete and connection.open:
                connection.post(Abort(request_id=request.request_id))

    def holds_more(self, request_id: str) -> bool:
        """Whether a token of a request, or the end of a sample, waits to be read."""
        stream = self._streams.get(request_id)
        return stream is not None and stream.holds_more

    async def compare(self, order: Compare) -> Fidelity:
        """The fidelity card of answers that some process of this base gave; the engine's error, of its kind, where there is none."""
        what = f"made no fidelity card of version {order.weights.version}"
        compared = await self._ask(await self.wait_ready(), order, Compared, COMPARE_S, what)
        if compared.error is not None:
            raise BY_CODE.get(compared.code, WorkerError)(compared.error)
        return Fidelity.model_validate_json(compared.card)

    async def stage(self, weights: Weights) -> None:
        """Have weights in memory, proved, at the other end, which goes on with what it does; its error, of its kind, where they cannot be.

        EngineLost where nobody is there, or goes meanwhile.
        """
        if self.connection is None:
            raise EngineLost(f"{self._what}, which is not there: {self.problem}")
        order = Stage(request_id=new_id("stage"), weights=weights)
        staged = await self._ask(self.connection, order, Staged, STAGE_S, f"did not load version {weights.version}")
        if staged.error is not None:
            raise BY_CODE.get(staged.code, WorkerError)(staged.error)

    async def _ask(self, connection: Connection, order: Compare | Stage, kind: type[Answer], timeout_s: float, otherwise: str) -> Answer:
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[order.request_id] = waiting
        try:
            await connection.send(order)
            async with asyncio.timeout(timeout_s):
                answer = await waiting
        except TimeoutError:
            raise Unavailable(f"{self._what} {otherwise} within {timeout_s:g} s") from None
        finally:
            del self._asked[order.request_id]
        if not isinstance(answer, kind):
            raise WorkerError(f"{self._what} answered {type(order).__name__} with {type(answer).__name__}")
        return answer

    async def drain(self, timeout_s: float) -> bool:
        """Have every run checkpointed before a clean stop; says whether the engine managed in time."""
        if self.connection is None:
            return False
        connection = self.connection
        with suppress(EngineLost, TimeoutError):
            await connection.send(Drain())
            async with asyncio.timeout(timeout_s):
                await connection.drained.wait()
        return connection.drained.is_set()

    async def _stay_connected(self) -> None:
        delay_s = FIRST_DELAY_S
        while True:
            try:
                await self._converse()
            except asyncio.IncompleteReadError as error:
                self.silent, self.problem = False, "it closed the connection" + (" in the middle of a message" if error.partial else "")
            except (OSError, ValueError, msgspec.MsgspecError, Unavailable) as error:
                self.silent = isinstance(error, Silent)
                self.problem = f"{type(error).__name__}: {reason(error)}" if str(error) else type(error).__name__
            if self.connection is not None:
                delay_s = FIRST_DELAY_S
                self._end_connection()
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LAST_DELAY_S)

    async def _converse(self) -> None:
        reader, writer = await asyncio.open_unix_connection(self._socket)
        pulse = Pulse(self._silence)
        try:
            connection = Connection(await self._welcome(reader), writer, pulse)
            async with background.running(pulse.watch(reader), f"pulse-{self.base_hash[:8]}"):
                self._begin_connection(connection)
                while True:
                    pulse.feel(message := await read_message(reader))
                    self._take(message)
        finally:
            writer.close()

    async def _welcome(self, reader: asyncio.StreamReader) -> Welcome:
        # The executor says it, which may be in the middle of a step; nothing else is said before.
        timeout_s = self._silence.executor * self._silence.look_s
        try:
            async with asyncio.timeout(timeout_s):
                message = await read_message(reader)
        except TimeoutError:
            raise Silent(f"it did not say who it is for {timeout_s:g} s") from None
        if not isinstance(message, Welcome):
            raise Unavailable(f"the process at {self._socket} began with {type(message).__name__}, not with a welcome: it is no engine")
        if message.base.base_hash != self.base_hash:
            raise Unavailable(f"the engine at {self._socket} holds base model {message.base.base_hash}, not {self.base_hash}")
        if message.role != self._role:
            raise Unavailable(f"the process at {self._socket} is of the role `{message.role}`, not `{self._role}`")
        return message

    def _begin_connection(self, connection: Connection) -> None:
        log.info("connected to %s (pid %d)", self._what, connection.welcome.pid)
        self.connection, self.away_since_s, self.silent = connection, None, False
        self._connected.set()
        self._note_turn()
        self.changed.tell()
        if self._inbox is not None:
            self._inbox.put_nowait(Received(connection, connection.welcome))

    def _end_connection(self) -> None:
        assert self.connection is not None
        log.warning("lost %s: %s", self._what, self.problem)
        self.connection.close()
        self.connection, self.status, self.away_since_s = None, None, time.monotonic()
        self._connected.clear()
        self._note_turn()
        self.changed.tell()
        for stream in self._streams.values():
            stream.fail(EngineLost(f"{self._what} went away: {self.problem}"))
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(EngineLost(f"{self._what} went away before it answered: {self.problem}"))

    def _take(self, message: FromEngine) -> None:
        assert self.connection is not None
        match message:
            case SamplerEvents(events=events):
                for event in events:
                    if (stream := self._streams.get(event.request_id)) is not None:
                        stream.put(event)
            case EngineStatus():
                before, self.status = self.status, message
                self._note_turn()
                if message != before:
                    self.changed.tell()
            case Alive():
                pass
            case Drained():
                self.connection.drained.set()
            case Compared(request_id=request_id) | Staged(request_id=request_id):
                if (waiting := self._asked.get(request_id)) is not None and not waiting.done():
                    waiting.set_result(message)
            case _ if self._inbox is not None:
                self._inbox.put_nowait(Received(self.connection, message))
            case _:
                log.error("%s spoke of runs, which it has none of: %s", self._what, type(message).__name__)

    def _note_turn(self) -> None:
        seen, self._seen = self._seen, (self.connection is not None, self.works)
        if seen != self._seen:
            self.turned.tell()
