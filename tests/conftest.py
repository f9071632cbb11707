"""What all tests share: one live server, one that speaks S3, no network but loopback, and an end to how long they may take (`--within`)."""

import ipaddress
import os
import sys
import time
from collections.abc import Generator, Iterator
from typing import Any, Final

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
_ends_s = pytest.StashKey[float]()
LEFT_OUT: Final = "its turn came behind the end of --within"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--within", type=float, metavar="MINUTES", help="begin no test later than that: those left out are skipped, and told at the end")


def pytest_configure(config: pytest.Config) -> None:
    sys.addaudithook(_refuse_the_network)
    minutes: float | None = config.getoption("within")
    config.stash[_ends_s] = float("inf") if minutes is None else time.monotonic() + 60 * minutes


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > item.config.stash[_ends_s]:
        pytest.skip(LEFT_OUT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out, by file: a suite without it has not passed on a machine this slow, and has not failed either."""
    left = [report for report in terminalreporter.stats.get("skipped", ()) if LEFT_OUT in str(report.longrepr)]
    if left:
        files = sorted({report.nodeid.partition("::")[0] for report in left})
        terminalreporter.section(f"{len(left)} tests were left out, their time was over")
        terminalreporter.line(" ".join(files))


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
