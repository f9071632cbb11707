"""One conversation with an engine over its socket, from the engine's welcome to its end, and what it says of runs."""

import asyncio
from typing import NamedTuple

from bloomery.services.engines.pulse import Pulse
from bloomery.types import protocol
from bloomery.types.errors import Unavailable
from bloomery.types.protocol import CheckpointWritten, FromEngine, OperationDone, RunClosed, RunOpened, ToEngine, Welcome

RunMessage = Welcome | RunOpened | OperationDone | CheckpointWritten | RunClosed


class EngineLost(Unavailable):
    """The connection to the engine ended; what it had in hand may be submitted again."""


class Connection:
    """One conversation, from a `Welcome` to its end."""

    def __init__(self, welcome: Welcome, writer: asyncio.StreamWriter, pulse: Pulse) -> None:
        self.welcome, self.pulse = welcome, pulse
        self.held = dict(welcome.runs)
        """Last executed `seq` of the runs that this engine held when the conversation began and was not told to close since."""
        self.drained = asyncio.Event()
        self._writer = writer

    @property
    def base_hash(self) -> str:
        """Of the base model at the other end."""
        return self.welcome.base.base_hash

    @property
    def open(self) -> bool:
        """Whether messages can still be sent."""
        return not self._writer.is_closing()

    def post(self, message: ToEngine) -> None:
        """Send without waiting; messages arrive in the order of the calls."""
        if not self.open:
            raise EngineLost(f"the connection to the engine of {self.base_hash} ended; it is being made anew")
        self._writer.write(protocol.frame(message))

    async def send(self, message: ToEngine) -> None:
        """Send, and wait while the engine is behind with reading."""
        self.post(message)
        await self.drain()

    async def drain(self) -> None:
        """Wait while the engine is behind with reading."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise EngineLost(f"the connection to the engine of {self.base_hash} ended while sending: {error}") from error

    def close(self) -> None:
        """Nothing more can be sent; what was not read yet never will be, and whoever waits for that hears of it."""
        self._writer.transport.abort()


class Received(NamedTuple):
    """A message about runs, and the conversation it belongs to."""

    connection: Connection
    message: RunMessage


Inbox = asyncio.Queue[Received]


async def read_message(reader: asyncio.StreamReader) -> FromEngine:
    """The next one, however long it takes to come."""
    length = protocol.frame_length(await reader.readexactly(4))
    return protocol.parse_from_engine(await reader.readexactly(length))
