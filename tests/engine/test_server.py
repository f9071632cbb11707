"""The engine's end of the socket: the process says that it is alive, whatever its executor does."""

import asyncio
from pathlib import Path
from queue import SimpleQueue

from bloomery.engine.executor import Connected, Inbox
from bloomery.engine.server import Server
from bloomery.types.protocol import Alive, BaseInfo, FromEngine, Welcome, frame_length, parse_from_engine

BASE = BaseInfo(base_hash="base", model_type="test", vocab_size=1, context=1, parameters=1, dtype="float32", parts={})
WELCOME = Welcome(boot_id="boot", pid=1, base=BASE, numerics="n", sampling_numerics="s", bit_exact=True, runs={})


async def read(reader: asyncio.StreamReader) -> FromEngine:
    return parse_from_engine(await reader.readexactly(frame_length(await reader.readexactly(4))))


def test_a_silent_executor_does_not_silence_its_process_and_nothing_comes_before_the_welcome(tmp_path: Path) -> None:
    async def story() -> None:
        inbox: Inbox = SimpleQueue()
        async with asyncio.timeout(60), Server(tmp_path / "s", inbox, alive_every_s=0.01) as server:
            for conversation in (1, 2):
                reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
                while inbox.empty() or inbox.get() != Connected(conversation):
                    await asyncio.sleep(0)
                first = asyncio.create_task(read(reader))
                await asyncio.wait({first}, timeout=0.05)
                assert not first.done()
                server.deliver(conversation, WELCOME)
                assert await first == WELCOME
                assert [await read(reader) for _ in range(2)] == [Alive()] * 2
                writer.close()
                await writer.wait_closed()

    asyncio.run(story())
