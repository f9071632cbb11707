"""docs/contract.md is what the tests of this directory show, and has no row that none of them does; and what counts as showing."""

from typing import Any

import httpx
import pytest

from tests.tinker.contract_entries import Entry
from tests.tinker.contract_page import CLAIMS, PAGE, UNTESTED, page
from tests.tinker.contract_traffic import REFUSED, TAKEN, Exchange, outcomes


def test_the_page_has_what_the_tests_show_and_nothing_untested(request: pytest.FixtureRequest) -> None:
    if (claims := request.config.stash[CLAIMS]) is None:
        pytest.skip("tells from all of tests/tinker, of which this run has a part")
    expected = page(claims)
    untested = [row for row in expected.splitlines() if UNTESTED in row]
    assert not untested, "mark the tests that show these with `contract`, or write them"
    assert PAGE.read_text() == expected, "run `make contract`"


def answered(path: str, body: Any, answer: dict[str, Any], status: int = 200) -> Exchange:
    return Exchange(httpx.Request("POST", f"http://server/api/v1{path}", json=body), httpx.Response(status, json=answer))


def test_what_is_left_at_its_default_shows_nothing() -> None:
    sample = {"num_samples": 1, "prompt_logprobs": True, "sampling_params": {"top_k": -1, "top_p": 0.5}, "seq_id": 0}
    shown = {entry.field for entry, _ in outcomes([answered("/asample", sample, {})])}
    assert shown == {"", "prompt_logprobs", "sampling_params.top_p", "seq_id"}


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [({"metrics": {}}, {TAKEN}), ({"error": "no", "category": "user"}, {REFUSED}), ({"error": "no", "category": "server"}, set())],
)
def test_an_operation_is_judged_by_its_result(answer: dict[str, Any], outcome: set[str]) -> None:
    step, entry = answered("/optim_step", {"seq_id": 1}, {"request_id": "f"}), Entry("POST /api/v1/optim_step", "seq_id")
    assert outcomes([step]) == set()
    found = outcomes([step, answered("/retrieve_future", {"request_id": "f"}, answer)])
    assert {outcome for used, outcome in found if used == entry} == outcome
