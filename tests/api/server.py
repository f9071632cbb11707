"""The real app over real services, a fake engine on a real socket, and a transport to it for synchronous clients.

All of it lives on an event loop in a thread, so that tests are plain functions. The api can be stopped and started again, as after a death;
meanwhile connections are refused.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI

from bloomery.api.app import create_app
from bloomery.client import Client
from bloomery.config import AgentConfig, ApiConfig, EndpointConfig, RecordMode
from bloomery.config.data_dir import DataDir
from bloomery.services.core import Services
from bloomery.services.jobs.leases import FIRST_PAUSE_S
from bloomery.store.blobs import Blobs
from tests.services.fake_engine import BASE, FakeEngine, fake_base
from tests.store.template import migrated

T = TypeVar("T")
KEY = "tml-test-key"
URL = "http://server"


class Server:
    """An api and its engine; `http` is a client of it."""

    def __init__(self, directory: Path, record: RecordMode, **options: Any) -> None:
        (directory / "api_key").write_text(f"{KEY}\n")
        migrated(DataDir(directory).database)
        models = (fake_base(directory),)
        self.config = ApiConfig(data_dir=str(directory), host="127.0.0.1", port=0, record=record, models=models, **options)
        self.engine = FakeEngine(directory / "s", Blobs(directory / "blobs"))
        self.transport = _Transport(self)
        self.http = httpx.Client(base_url=URL, headers={"x-api-key": KEY}, transport=self.transport)
        self.first_pause_s = FIRST_PAUSE_S
        """Of jobs whose processes die, from the next start on."""
        self.app: FastAPI | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stack = AsyncExitStack()

    @property
    def services(self) -> Services:
        """Those of the running api."""
        assert self.app is not None
        found: Services = self.app.state.services
        return found

    def client(self, **options: Any) -> Client:
        """A client of our own."""
        return Client(URL, KEY, transport=self.transport, **options)

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = 30.0) -> T:
        """The result of work on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def hold_engine(self, hold: bool) -> None:
        """Have the engine's executor wait, or go on."""

        async def turn() -> None:
            self.engine.gate.clear() if hold else self.engine.gate.set()

        self.call(turn())

    def start(self) -> None:
        """Start the api."""
        self.app = create_app(self.call(self._open()))

    def stop(self) -> None:
        """Stop the api; the engine stays."""
        self.app = None
        self.call(self._stack.aclose())

    async def _open(self) -> Services:
        self._stack = AsyncExitStack()
        services = await self._stack.enter_async_context(Services.open(self.config, first_pause_s=self.first_pause_s))
        await services.links[BASE].wait_ready()
        return services

    @contextmanager
    def running(self) -> Iterator["Server"]:
        self._thread.start()
        self.call(self.engine.start())
        self.start()
        try:
            yield self
        finally:
            if self.app is not None:
                self.stop()
            self.call(self.engine.crash())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class _Transport(httpx.BaseTransport):
    def __init__(self, server: Server) -> None:
        self._server = server

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        app = self._server.app
        if app is None:
            raise httpx.ConnectError("connection refused", request=request)
        return self._server.call(_pass_on(app, request))


async def _pass_on(app: FastAPI, request: httpx.Request) -> httpx.Response:
    asynchronous = httpx.Request(request.method, request.url, headers=request.headers, content=request.read())
    response = await httpx.ASGITransport(app, raise_app_exceptions=False).handle_async_request(asynchronous)
    return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())


@contextmanager
def serving(
    directory: Path,
    *,
    record: RecordMode = "full",
    endpoints: tuple[EndpointConfig, ...] = (),
    agents: tuple[AgentConfig, ...] = (),
    public_hosts: tuple[str, ...] = (),
) -> Iterator[Server]:
    """A running server."""
    with Server(directory, record, endpoints=endpoints, agents=agents, public_hosts=public_hosts).running() as server:
        yield server
