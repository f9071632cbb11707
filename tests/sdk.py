"""The unmodified `tinker` SDK, as the tests use it; `tests/conftest.py` keeps it from reporting on them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Final, Protocol

import pytest
import tinker

LEAVES_CONNECTIONS: Final = pytest.mark.filterwarnings("ignore::ResourceWarning")
"""Of tests that use it: it leaves the connection of its first request to the garbage collector."""
ENDS_S: Final = 60.0


class Server(Protocol):
    """Where a client may connect to."""

    @property
    def url(self) -> str:
        """Its address."""

    @property
    def key(self) -> str:
        """Of its first project, and good for everything."""


@contextmanager
def connected(
    server: Server, *, key: str | None = None, headers: Mapping[str, str] = MappingProxyType({}), **options: object
) -> Iterator[tinker.ServiceClient]:
    """A client with the server's key or another, that sends these headers with whatever it sends; the options are those of the SDK."""
    client = tinker.ServiceClient(base_url=server.url, api_key=key or server.key, default_headers_overrides=dict(headers), **options)
    status = "errored"
    try:
        yield client
        status = "success"
    finally:
        # Its own end was seen to wait for ever, where a heartbeat was due in that moment: what it had to say has been said long before this.
        with suppress(TimeoutError):
            client.close(status).result(timeout=ENDS_S)
