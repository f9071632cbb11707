"""What all tests share: one live server, one that speaks S3, and no network but loopback."""

import ipaddress
import os
import sys
from collections.abc import Generator, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import settings

# Torch reads these when it is imported. Threads that spin at a barrier beside busy workers and servers take ten times as long as those that sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from bloomery.obs.garbage_collector import importing
from tests.certificates import nobody_trusted
from tests.live import LiveServer, running_server
from tests.s3 import running_s3

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The tinker SDK reports to the server it talks to; a test that is about reports sends its own.
os.environ["TINKER_TELEMETRY"] = "0"
# How long an example takes says more about the machine than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
# So does how long an answer takes, and httpx gives up after five seconds unless it is told otherwise.
for phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, phase, 60.0)

_server = pytest.StashKey[LiveServer]()


def pytest_configure() -> None:
    sys.addaudithook(_refuse_the_network)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Of a million objects of what is imported none becomes garbage, and a look at all of them takes half a second: the collector is spared them."""
    with importing():
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def certificates() -> Iterator[None]:
    with nobody_trusted():
        yield


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that speaks S3, shared by all tests that make buckets of their own there."""
    with running_s3(tmp_path_factory.mktemp("s3") / "log") as url:
        yield url


@pytest.fixture(scope="session")
def live_server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """`bloomery up` on the shipped model, shared by all tests that only use it."""
    with running_server(tmp_path_factory.mktemp("live") / "data", jobs=2) as server:
        request.config.stash[_server] = server
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show what the server said beside the failure of a test that used it."""
    report: Any = yield
    if report.failed and "live_server" in getattr(item, "fixturenames", ()) and _server in item.config.stash:
        report.sections.append(("live server", item.config.stash[_server].logs()))
    return report


def _refuse_the_network(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.sendto"):
        address = arguments[1]
        if isinstance(address, tuple) and not _is_loopback(address[0]):
            raise PermissionError(f"tests talk to loopback only, not to {address[0]}")


def _is_loopback(host: Any) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
