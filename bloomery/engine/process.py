"""The engine process put together: the event loop with the socket on the main thread, the executor on one other."""

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from bloomery.config import EngineConfig
from bloomery.engine.executor import Executor, Inbox, Stop
from bloomery.engine.hosted import CheckpointAfter
from bloomery.engine.server import Server
from bloomery.obs.garbage_collector import spare_what_stays


def run(config: EngineConfig) -> None:
    """Serve until a signal asks to stop; every run is checkpointed then."""
    asyncio.run(_serve(config))


async def _serve(config: EngineConfig) -> None:
    inbox: Inbox = SimpleQueue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, inbox.put, Stop())
    checkpoint_after = CheckpointAfter(config.checkpoint_s, config.checkpoint_bytes)
    server = Server(Path(config.model.socket), inbox)
    with ThreadPoolExecutor(1, "executor") as thread:
        try:
            executor = await loop.run_in_executor(thread, Executor, config, inbox, server.deliver, checkpoint_after)
            spare_what_stays()
            async with server:
                await loop.run_in_executor(thread, executor.run)
        finally:
            inbox.put(Stop())
