"""Samples with drafts over a fake engine: what they cost, and how their refusals name what is wrong."""

from typing import Any

import httpx
import pytest
import tinker

from bloomery.services.access.principal import Allowance
from bloomery.types.generation import GenerateFailed
from bloomery.types.ids import new_id
from bloomery.types.protocol import SamplerEvents
from tests.live import wait_until
from tests.tinker.over_fake_engine import KEY, Served
from tests.tinker.samples import ENDLESS, ME, sampler_of

BODY: dict[str, Any] = {"prompt": [1, 1, 1], "drafts": [[1, 2], []], "max_tokens": 50, "seed": 1}


def ask(server: Served, sampler: tinker.SamplingClient, seq: int, key: str = KEY, **changes: Any) -> httpx.Response:
    body = BODY | {"sampling_session_id": sampler._sampling_session_id, "seq_id": seq} | changes
    return httpx.post(f"{server.url}/api/v1/samples", json=body, headers={"x-api-key": key})


def test_drafts_are_paid_for_like_the_prompt(server: Served, service: tinker.ServiceClient) -> None:
    sampler = sampler_of(service)
    key = server.do(lambda: server.services.auth.create(ME, new_id("key"), frozenset({"infer"}), allowance=Allowance(tokens=60))).key
    hopeless = ask(server, sampler, 2000, key, drafts=[[1] * 29, [1] * 29])
    assert (hopeless.status_code, hopeless.json()["error"]["field"]) == (400, "drafts")
    assert "has 61 tokens, and this key may use 60 per minute" in hopeless.json()["error"]["message"]
    assert ask(server, sampler, 2001, key, drafts=[[1] * 20, [1] * 20]).status_code == 200
    refused = ask(server, sampler, 2002, key, drafts=[[1] * 20, []])
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")


def test_other_drafts_under_a_number_that_is_taken_are_refused(server: Served, service: tinker.ServiceClient) -> None:
    sampler = sampler_of(service)
    first = ask(server, sampler, 2050)
    assert first.status_code == 200
    assert ask(server, sampler, 2050).json() == first.json()
    refused = ask(server, sampler, 2050, drafts=[[1, 3], []])
    assert (refused.status_code, refused.json()["error"]["code"], refused.json()["error"]["field"]) == (409, "conflict", "seq_id")


def test_drafts_of_which_nothing_came_are_given_back(server: Served, service: tinker.ServiceClient) -> None:
    sampler, asked = sampler_of(service), len(server.engine.sampled)
    key = server.do(lambda: server.services.auth.create(ME, new_id("key"), frozenset({"infer"}), allowance=Allowance(tokens=60))).key
    paid: dict[str, Any] = {"prompt": ENDLESS, "drafts": [[1]] * 40, "max_tokens": 1}
    begun = ask(server, sampler, 2100, key, **paid).json()["request_id"]
    wait_until(lambda: len(server.engine.sampled) > asked)
    failed = GenerateFailed(request_id=server.engine.sampled[-1].request_id, message="the weights melted", category="server")
    server.loop.call_soon_threadsafe(server.engine._post, SamplerEvents(events=(failed,)))
    told = httpx.post(f"{server.url}/api/v1/retrieve_future", json={"request_id": begun}, headers={"x-api-key": key})
    assert "melted" in told.json()["error"]
    assert [ask(server, sampler, seq, key, **paid).status_code for seq in (2101, 2102)] == [200, 429]


def test_drafts_take_room_while_their_samples_are_made(server: Served, service: tinker.ServiceClient) -> None:
    sampler, before = sampler_of(service), server.futures._running
    begun = ask(server, sampler, 2000, prompt=ENDLESS, drafts=[[1] * 20, [1] * 7])
    running = server.futures._running
    assert (running.sequences - before.sequences, running.tokens - before.tokens) == (2, len(ENDLESS) + 27)
    httpx.post(f"{server.url}/api/v1/cancel_future", json={"request_id": begun.json()["request_id"]}, headers={"x-api-key": KEY})
    wait_until(lambda: server.futures._running == before)


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"seed": 1 << 64}, "seed", "`seed` is 18446744073709551616"),
        ({"stop": [1 << 30]}, "stop", "`stop` holds ids outside the vocabulary"),
        ({"drafts": [[]] * 1025}, "drafts", "at most 1024 items"),
        ({"drafts": []}, "drafts", "at least 1 item"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"top_p": 2.0}, "top_p", "`top_p` is 2.0"),
        ({"drafts": [[1 << 30]]}, "drafts", "`drafts` holds token id"),
        ({"prompt": []}, "prompt", "the prompt is"),
    ],
)
def test_refusals_name_fields_of_the_body(server: Served, service: tinker.ServiceClient, changes: dict[str, Any], field: str, says: str) -> None:
    error = ask(server, sampler_of(service), 3000, **changes).json()["error"]
    assert (error["code"], error["field"]) == ("invalid", field)
    assert says in error["message"]
