"""The socket of an engine: one conversation at a time, and a newer one ends the one before.

Frames that arrive go to the executor's inbox in order, behind a `Connected`; messages of the executor carry the number of the conversation that they
belong to, and those of an earlier one are dropped. The event loop itself says that the process is alive, however long a step of the executor takes.
"""

import asyncio
import logging
from pathlib import Path
from typing import Final, Self

import msgspec

from bloomery.config import stopping
from bloomery.engine.executor import Connected, Disconnected, Inbox
from bloomery.obs import background
from bloomery.obs.failpoints import failpoint
from bloomery.types.protocol import ALIVE_EVERY_S, Alive, FromEngine, OperationDone, frame, frame_length, parse_to_engine

log = logging.getLogger(__name__)

_BUFFER_BYTES: Final = 1 << 20


class Server:
    """Listens while it is entered."""

    def __init__(self, path: Path, inbox: Inbox, alive_every_s: float = ALIVE_EVERY_S) -> None:
        self._path, self._inbox, self._alive_every_s = path, inbox, alive_every_s
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._conversation = 0
        self._begun = 0
        """The last conversation that the executor has said something in: nothing goes before its welcome."""
        self._beat: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._converse, self._path, limit=_BUFFER_BYTES)
        self._beat = background.start(self._say_alive(), "signs-of-life")
        log.info("listens at %s", self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        await background.stop(self._beat)
        self._server.close()
        if self._writer is not None:
            await self._flush(self._writer)

    def deliver(self, conversation: int, message: FromEngine) -> None:
        """Send a message; called from the executor's thread."""
        data, is_result = frame(message), isinstance(message, OperationDone)
        self._loop.call_soon_threadsafe(self._write, conversation, data, is_result)

    def _write(self, conversation: int, data: bytes, is_result: bool) -> None:
        if conversation != self._conversation or self._writer is None:
            return
        self._begun = conversation
        self._writer.write(data)
        if is_result:
            failpoint("engine.result.sent")

    async def _say_alive(self) -> None:
        while True:
            await asyncio.sleep(self._alive_every_s)
            if self._writer is not None and self._begun == self._conversation:
                self._writer.write(frame(Alive()))

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            log.info("a newer connection replaces the one before")
            self._writer.close()
        self._conversation += 1
        conversation, self._writer = self._conversation, writer
        self._inbox.put(Connected(conversation))
        try:
            await self._receive(reader, conversation)
        except asyncio.IncompleteReadError as error:
            log.info("the api closed the connection%s", " in the middle of a message" if error.partial else "")
        except OSError as error:
            log.info("the connection ended: %s", error)
        except (ValueError, msgspec.MsgspecError) as error:
            log.error("the connection sent something that is no message of this protocol: %s", error)
        finally:
            writer.close()
            if conversation == self._conversation:
                self._writer = None
            self._inbox.put(Disconnected(conversation))

    async def _receive(self, reader: asyncio.StreamReader, conversation: int) -> None:
        while True:
            payload = await reader.readexactly(frame_length(await reader.readexactly(4)))
            if conversation != self._conversation:
                return
            self._inbox.put(parse_to_engine(payload))

    async def _flush(self, writer: asyncio.StreamWriter) -> None:
        """Let the last messages out; whoever does not read them will ask again."""
        writer.close()
        try:
            async with asyncio.timeout(stopping.LAST_MESSAGES_S):
                await writer.wait_closed()
        except (TimeoutError, OSError) as error:
            log.info("the last messages were not read: %r", error)
