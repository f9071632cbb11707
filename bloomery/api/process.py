"""The api process put together: the services, the application over them, and uvicorn, which serves it."""

import asyncio
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
import uvloop

from bloomery.api.app import create_app
from bloomery.api.connection import Connection
from bloomery.config import ApiConfig, stopping
from bloomery.obs.garbage_collector import spare_what_stays
from bloomery.services.core import Services


def run(config: ApiConfig) -> None:
    """Serve until a signal asks to stop."""
    _allow_open_files()
    logging.getLogger("uvicorn.error").addFilter(_CutAtStop())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config))


async def _serve(config: ApiConfig) -> None:
    async with Services.open(config) as services:
        app = create_app(services)
        spare_what_stays()
        settings = uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http=Connection,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=stopping.REQUESTS_S,
            server_header=False,
        )
        await _Server(settings, at_stop=services.live.close).serve()


class _Server(uvicorn.Server):
    """Leaves the process alive after a stop signal: its services have yet to drain the engines. What would never end by itself is ended `at_stop`."""

    def __init__(self, config: uvicorn.Config, at_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._at_stop = at_stop

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what is open, and wait for it no longer than `REQUESTS_S`."""
        self._at_stop()
        await super().shutdown(sockets)


class _CutAtStop(logging.Filter):
    """A clean stop cuts the requests that are still open. uvicorn calls each an error of the application; they are what was announced."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str) and record.msg.startswith("Cancel %s running task"):
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _allow_open_files() -> None:
    """Whoever waits for a result holds a connection, and the soft limit of many shells is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
