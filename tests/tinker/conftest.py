"""The servers and clients of these tests, and what holds those that claim rows of docs/contract.md to what they send.

A test claims rows by `@pytest.mark.contract(PLACE, *FIELDS)`.

Which tests show a field people say, for a request that happens to carry it shows nothing; that the test sent it, and that a server took or refused it
as claimed, is read off its traffic, so that nobody has to believe a claim and none outlives what it is about. Listening where the clients send is the
one place that sees SDKs and plain requests, servers of this process and of others, and leaves no hook in the product.
"""

import gc
from collections.abc import Generator, Iterator

import pytest
import tinker

from tests.live import LiveServer
from tests.sdk import LEAVES_CONNECTIONS, connected
from tests.tinker.contract_page import CLAIMS, DIRECTORY, claims_of
from tests.tinker.contract_traffic import listening, outcomes
from tests.tinker.over_fake_engine import Served, served


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    whole = {item.path for item in items} >= set(DIRECTORY.glob("test_*.py")) and not any("::" in argument for argument in config.args)
    for item in items:
        if DIRECTORY in item.path.parents:
            item.add_marker(LEAVES_CONNECTIONS)
    config.stash[CLAIMS] = [claim for item in items for claim in claims_of(item)] if whole else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    if not (claims := list(claims_of(item))):
        return (yield)
    with listening() as heard:
        result = yield
    shown = outcomes(heard)
    for claim in claims:
        if (claim.entry, claim.outcome) not in shown:
            said = " ".join(claim.entry)
            pytest.fail(f"claims that `{said}` is {claim.outcome}, but sends nothing to show it (see docs/contract.md)", pytrace=False)
    return result


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """What the SDK left is collected where its warning is ignored, not under a test of somewhere else."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[tinker.ServiceClient]:
    """Of a whole server."""
    with connected(live_server) as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The api over a fake engine, which records all."""
    with served(tmp_path_factory.mktemp("server"), record="full") as running:
        yield running


@pytest.fixture(scope="module")
def service(server: Served) -> Iterator[tinker.ServiceClient]:
    """A client of the api over a fake engine."""
    with connected(server) as found:
        yield found
