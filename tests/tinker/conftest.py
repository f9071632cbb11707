"""Holds the tests that claim rows of docs/contract.md, by `@pytest.mark.contract(PLACE, *FIELDS)`, to what they send.

Which tests show a field people say, for a request that happens to carry it shows nothing; that the test sent it, and that a server took or refused it
as claimed, is read off its traffic, so that nobody has to believe a claim and none outlives what it is about. Listening where the clients send is the
one place that sees SDKs and plain requests, servers of this process and of others, and leaves no hook in the product.
"""

from collections.abc import Generator

import pytest

from tests.tinker.table import CLAIMS, DIRECTORY, claims_of
from tests.tinker.traffic import listening, outcomes


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    whole = {item.path for item in items} >= set(DIRECTORY.glob("test_*.py")) and not any("::" in argument for argument in config.args)
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
