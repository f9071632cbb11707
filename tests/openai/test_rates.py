"""What a key may use per minute, how many samples may wait, and requests that are sent twice."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from bloomery.services.access.limits import RateLimits, duration
from bloomery.services.access.principal import Allowance, Principal
from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput, RateLimited
from bloomery.types.generation import Generate, SamplingParams, Weights
from bloomery.types.ids import new_id
from tests.live import wait_until
from tests.openai.server import ScriptedServer
from tests.openai.test_contract import USER, chat, tokens_of
from tests.services.fake_engine import BASE

ANSWER = "It is 36."
SAMPLED = SamplingParams(max_tokens=1, seed=0)


@contextmanager
def limited(server: ScriptedServer, **limits: int) -> Iterator[OpenAI]:
    """A client with a key of its own."""
    made = server.http.post("/api/v1/keys", json={"name": new_id("key"), "scopes": ["infer"]} | limits)
    assert made.status_code == 201, made.text
    with server.sdk(api_key=made.json()["key"]) as client:
        yield client


def raw_chat(sdk: OpenAI, **options: Any) -> Any:
    return sdk.chat.completions.with_raw_response.create(**{"model": "tiny", "messages": USER} | options)


def test_a_key_makes_as_many_requests_as_it_may_and_is_told_where_it_stands(server: ScriptedServer) -> None:
    with limited(server, requests_per_minute=2) as sdk:
        told = [raw_chat(sdk).headers for _ in range(2)]
        assert [headers["x-ratelimit-limit-requests"] for headers in told] == ["2", "2"]
        assert [headers["x-ratelimit-remaining-requests"] for headers in told] == ["1", "0"]
        assert all(headers["x-ratelimit-reset-requests"].endswith("s") for headers in told)
        assert "x-ratelimit-limit-tokens" not in told[0]
        with pytest.raises(openai.RateLimitError, match="2 requests per minute: try again in") as refused:
            raw_chat(sdk)
    assert (refused.value.code, refused.value.type) == ("rate_limit_exceeded", "requests")
    headers = refused.value.response.headers
    assert 1 <= int(headers["retry-after"]) <= 30
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-request-id"]


def test_tokens_of_prompts_and_answers_count(server: ScriptedServer) -> None:
    prompt, sampled = len(server.services.models.tokenizer(server.config.models[0].base_hash).render_prompt(USER)), len(tokens_of(ANSWER)) + 1
    with limited(server, tokens_per_minute=2 * prompt) as sdk:
        told = raw_chat(sdk).headers
        assert told["x-ratelimit-limit-tokens"] == str(2 * prompt)
        assert int(told["x-ratelimit-remaining-tokens"]) <= prompt
        with pytest.raises(openai.RateLimitError, match=f"{2 * prompt} tokens per minute and this prompt takes {prompt}") as refused:
            raw_chat(sdk)
        assert refused.value.type == "tokens"
        assert int(refused.value.response.headers["x-ratelimit-remaining-tokens"]) <= max(0, prompt - sampled + 1)
        assert len(server.scripted.requests) == 1


def test_a_prompt_that_no_minute_holds_is_refused_for_good(server: ScriptedServer) -> None:
    with limited(server, tokens_per_minute=3) as sdk:
        asked: dict[str, Callable[[], Any]] = {
            "messages": lambda: raw_chat(sdk),
            "prompt": lambda: sdk.completions.create(model="tiny", prompt=[5] * 4),
            "input": lambda: sdk.embeddings.create(model="tiny", input=[[5] * 2] * 2),
        }
        for field, ask in asked.items():
            with pytest.raises(openai.BadRequestError, match=rf"`{field}` has \d+ tokens, and this key may use 3 per minute: shorten it") as refused:
                ask()
            assert refused.value.param == field
        with pytest.raises(openai.BadRequestError) as refused:
            sdk.responses.create(model="tiny", input="x")
        assert refused.value.param == "input"
    assert server.scripted.requests == []


def test_a_prompt_of_which_nothing_came_is_not_paid_for(server: ScriptedServer) -> None:
    with limited(server, tokens_per_minute=2000) as sdk:
        asked: list[Callable[[], Any]] = [
            lambda: raw_chat(sdk),
            lambda: raw_chat(sdk, stream=True),
            lambda: sdk.completions.create(model="tiny", prompt=["x", "y"]),
            lambda: sdk.embeddings.create(model="tiny", input=["x", "y"]),
        ]
        with full_queue(server):
            for ask in asked:
                with pytest.raises(openai.InternalServerError) as refused:
                    ask()
                assert refused.value.status_code == 503
                assert refused.value.response.headers["x-ratelimit-remaining-tokens"] == "2000"
        server.scripted.script.fail_after = 0
        for ask in asked[:3]:
            with pytest.raises(openai.InternalServerError) as refused:
                ask()
            assert refused.value.response.headers["x-ratelimit-remaining-tokens"] == "2000"
        server.scripted.script.fail_after = 1
        with pytest.raises(openai.InternalServerError) as refused:
            raw_chat(sdk)
        assert int(refused.value.response.headers["x-ratelimit-remaining-tokens"]) < 2000


def test_streams_and_every_route_that_answers_are_counted(server: ScriptedServer) -> None:
    with limited(server, requests_per_minute=3) as sdk:
        assert raw_chat(sdk, stream=True).headers["x-ratelimit-remaining-requests"] == "2"
        assert sdk.responses.with_raw_response.create(model="tiny", input="x").headers["x-ratelimit-remaining-requests"] == "1"
        assert sdk.completions.with_raw_response.create(model="tiny", prompt="x").headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError):
            sdk.embeddings.create(model="tiny", input="x")
        assert "x-ratelimit-limit-requests" not in sdk.models.with_raw_response.list().headers


def test_keys_do_not_share_their_limits_and_those_without_have_none(server: ScriptedServer, sdk: OpenAI) -> None:
    with limited(server, requests_per_minute=1) as one, limited(server, requests_per_minute=1) as other:
        raw_chat(one)
        raw_chat(other)
        with pytest.raises(openai.RateLimitError):
            raw_chat(one)
    for _ in range(5):
        assert not [name for name in raw_chat(sdk).headers if name.startswith("x-ratelimit")]


def test_a_bucket_fills_evenly_and_debt_is_paid_back() -> None:
    now_s = 0.0
    caller, refusals = Principal("p", "k", frozenset(), Allowance(requests=60, tokens=600)), []
    limits = RateLimits(refusals.append, clock=lambda: now_s)
    for _ in range(60):
        limits.request(caller)
    with pytest.raises(RateLimited) as refused:
        limits.request(caller)
    assert (refused.value.retry_after_s, refusals) == (1.0, ["requests"])
    limits.prompt(caller, 600, field="prompt")
    limits.sampled(caller, 50)
    assert limits.headers(caller) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m5s",
    }
    now_s = 5.0
    with pytest.raises(RateLimited) as refused:
        limits.prompt(caller, 100, field="prompt")
    assert refused.value.retry_after_s == pytest.approx(10.0)
    now_s = 15.0
    limits.prompt(caller, 100, field="prompt")
    now_s = 1000.0
    assert limits.headers(caller)["x-ratelimit-remaining-tokens"] == "600"
    limits.prompt(caller, 100, field="prompt")
    limits.give_back(caller, 100)
    limits.give_back(caller, 100)
    assert limits.headers(caller)["x-ratelimit-remaining-tokens"] == "600"


def test_a_rollout_takes_a_request_and_its_prompt_or_neither() -> None:
    caller = Principal("p", "k", frozenset(), Allowance(requests=3, tokens=100))
    limits = RateLimits(lambda reason: None, clock=lambda: 0.0)
    limits.rollout(caller, 60, field="prompt")
    for tokens, error in ((60, RateLimited), (101, InvalidInput)) * 5:
        with pytest.raises(error):
            limits.rollout(caller, tokens, field="prompt")
    told = limits.headers(caller)
    assert (told["x-ratelimit-remaining-requests"], told["x-ratelimit-remaining-tokens"]) == ("2", "40")


def test_times_are_written_as_openai_writes_them() -> None:
    assert [duration(seconds) for seconds in (0, 0.0201, 1, 1.44, 59.99, 60, 361)] == ["0ms", "21ms", "1s", "1.5s", "60s", "1m0s", "6m1s"]


def test_limits_are_shown_with_the_key_and_outlive_the_server(server: ScriptedServer) -> None:
    made = server.http.post("/api/v1/keys", json={"name": "kept", "scopes": ["infer"], "requests_per_minute": 7, "tokens_per_minute": 8}).json()
    assert (made["requests_per_minute"], made["tokens_per_minute"]) == (7, 8)
    server.call(server.services.auth.load(server.http.headers["x-api-key"]))
    with server.client() as client:
        listed = {key.name: key for key in client.keys.list()}
    assert (listed["kept"].requests_per_minute, listed["kept"].tokens_per_minute) == (7, 8)
    assert server.http.post("/api/v1/keys", json={"name": "none", "scopes": ["infer"], "requests_per_minute": 0}).status_code == 400


@contextmanager
def full_queue(server: ScriptedServer) -> Iterator[None]:
    """Nobody else may wait."""
    prompt = Array.of(np.array([1], np.int32))
    waits = Generate(request_id="r", weights=Weights(version=BASE), prompt=prompt, params=SAMPLED, num_samples=64, priority="production")
    most, server.services.meters.max_waiting = server.services.meters.max_waiting, 64
    meter = server.services.meters.request(BASE, waits, bounded=True)
    try:
        yield
    finally:
        meter.close(0)
        server.services.meters.max_waiting = most


def test_a_full_queue_sends_requests_away_for_a_moment(server: ScriptedServer, sdk: OpenAI) -> None:
    server.scripted.script.stall_after = 0
    refused = []
    with ExitStack() as waiting:
        for _ in range(2):
            waiting.enter_context(server.asking("/v1/chat/completions", {"model": "tiny", "messages": USER, "n": 128}))
        for _ in range(2):
            server.services.meters.max_waiting = 256
            with pytest.raises(openai.InternalServerError, match="the queue of `tiny` is full: 256 samples wait, at most 256 may") as full:
                chat(sdk)
            refused.append(full.value)
        assert [(error.status_code, error.response.headers["retry-after"], error.type) for error in refused] == [(503, "1", "server_error")] * 2
        server.services.meters.max_waiting = 257
        server.scripted.script.stall_after = None
        assert chat(sdk).choices[0].message.content == ANSWER
    wait_until(lambda: len(server.scripted.aborted) == 2)
    server.services.meters.max_waiting = 128
    assert len(chat(sdk, n=128).choices) == 128
    server.services.meters.max_waiting = 1024


def test_rollouts_fill_no_queue_of_those_who_are_served(server: ScriptedServer, sdk: OpenAI) -> None:
    server.services.meters.max_waiting = 4
    rollout = Generate(request_id="r", weights=Weights(version=BASE), prompt=Array.of(np.array([1], np.int32)), params=SAMPLED, num_samples=100)
    meter = server.services.meters.request(BASE, rollout, bounded=False)
    try:
        assert chat(sdk, n=4).choices
        # More than may ever wait is no full queue: trying again would not help.
        with pytest.raises(openai.BadRequestError, match="at most 4 may wait here"):
            chat(sdk, n=5)
    finally:
        meter.close(0)
        server.services.meters.max_waiting = 1024


def test_the_same_key_and_body_give_the_stored_answer(server: ScriptedServer, sdk: OpenAI) -> None:
    for options in ({}, {"stream": True}):
        key = {"extra_headers": {"Idempotency-Key": new_id("again")}}
        first, second = (raw_chat(sdk, seed=None, **options, **key) for _ in range(2))
        assert (first.headers.get("idempotent-replayed"), second.headers["idempotent-replayed"]) == (None, "true")
        assert first.headers["x-request-id"] != second.headers["x-request-id"]
        one, two = ([*raw.parse()] if options else raw.parse().id for raw in (first, second))
        assert one == two
    assert len(server.scripted.requests) == 2


def test_a_repetition_takes_nothing_and_is_told_where_its_key_stands(server: ScriptedServer) -> None:
    with limited(server, requests_per_minute=3) as sdk:
        told = [raw_chat(sdk, extra_headers={"Idempotency-Key": key}).headers for key in ("one", "one", "two", "one")]
        assert [headers["x-ratelimit-remaining-requests"] for headers in told] == ["2", "2", "1", "1"]


def test_a_key_belongs_to_one_body_one_path_and_one_caller(server: ScriptedServer, sdk: OpenAI) -> None:
    key = {"extra_headers": {"Idempotency-Key": "mine"}}
    raw_chat(sdk, **key)
    with pytest.raises(openai.ConflictError, match="was used for another request") as other:
        raw_chat(sdk, temperature=0.5, **key)
    assert other.value.param == "idempotency-key"
    with pytest.raises(openai.ConflictError):
        sdk.responses.create(model="tiny", input="x", **key)
    with limited(server) as stranger:
        assert "idempotent-replayed" not in raw_chat(stranger, **key).headers
    with pytest.raises(openai.BadRequestError, match="1 to 255 characters"):
        raw_chat(sdk, extra_headers={"Idempotency-Key": "x" * 256})


def test_what_failed_is_served_anew(server: ScriptedServer, sdk: OpenAI) -> None:
    for stream in (False, True):
        key = {"extra_headers": {"Idempotency-Key": f"failing-{stream}"}}
        server.scripted.script.fail_after = 3
        with pytest.raises(openai.APIError, match="the weights melted"):
            list(chat(sdk, stream=stream, **key))
        server.scripted.script.fail_after = None
        assert "idempotent-replayed" not in raw_chat(sdk, stream=stream, **key).headers


def test_a_repetition_waits_for_the_first_or_takes_its_place(server: ScriptedServer, sdk: OpenAI) -> None:
    server.scripted.script.stall_after = 2
    body, key = {"model": "tiny", "messages": USER}, {"Idempotency-Key": "slow"}
    with ThreadPoolExecutor(1) as pool:
        with server.asking("/v1/chat/completions", body, **key):
            server.scripted.script.stall_after = None
            headers = {"x-api-key": server.http.headers["x-api-key"], **key}
            second = pool.submit(httpx.post, f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
            wait_until(second.running)
        assert second.result().json()["choices"][0]["message"]["content"] == ANSWER
    assert len(server.scripted.requests) == 2
