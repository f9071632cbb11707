"""The real api on a real port in a thread of this process, over a fake engine: what the SDK needs and nothing more."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from bloomery.api.app import create_app
from bloomery.api.routes.tinker.futures import MAX_RUNNING, SampleFutures
from bloomery.config import ApiConfig, RecordMode
from bloomery.config.data_dir import DataDir
from bloomery.services.core import Services
from bloomery.services.training.active import Patience
from bloomery.store.blobs import Blobs
from tests.services.fake_engine import FakeEngine, fake_base, fake_engine
from tests.store.template import migrated

KEY = "tml-contract-test"
MODEL = "tiny"
T = TypeVar("T")


@dataclass
class Served:
    """A running server; `do` runs a coroutine on its loop."""

    url: str
    engine: FakeEngine
    services: Services
    loop: asyncio.AbstractEventLoop
    futures: SampleFutures
    key: str = KEY

    def do(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run something where the server runs."""

        async def run() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(120)


@contextmanager
def served(
    directory: Path,
    *,
    record: RecordMode = "off",
    most_samples: int = MAX_RUNNING,
    patience: Patience | None = None,
    custom_losses: bool = False,
) -> Iterator[Served]:
    """Serve until left; opened again on the same directory, it is the next life of the api."""
    ready: threading.Event = threading.Event()
    stop: list[Callable[[], Any]] = []
    found: list[Served] = []

    async def serve() -> None:
        (directory / "api_key").write_text(KEY)
        migrated(DataDir(directory).database)
        models = (fake_base(directory, MODEL),)
        config = ApiConfig(data_dir=str(directory), host="127.0.0.1", port=0, record=record, models=models, custom_losses=custom_losses)
        async with fake_engine(directory / "s", Blobs(directory / "blobs")) as engine, Services.open(config, patience=patience) as services:
            app = create_app(services)
            app.state.sample_futures = SampleFutures(max_running=most_samples)
            server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="on", timeout_graceful_shutdown=1))
            running = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.005)
            port = server.servers[0].sockets[0].getsockname()[1]
            futures = app.state.sample_futures
            found.append(Served(f"http://127.0.0.1:{port}", engine, services, asyncio.get_running_loop(), futures))
            stop.append(lambda: setattr(server, "should_exit", True))
            ready.set()
            await running

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(120), "the server did not start"
        yield found[0]
    finally:
        for end in stop:
            end()
        thread.join(120)
