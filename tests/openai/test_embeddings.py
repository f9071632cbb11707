"""`/v1/embeddings` by the unmodified `openai` SDK, against `bloomery up` on the shipped model and beside the trainer's own forward."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
import torch
from openai import OpenAI

from bloomery.models import tiny
from bloomery.models.load import load_decoder
from bloomery.render import ChatTokenizer
from bloomery.types.resources import Price
from tests.infer.builders import full_hidden
from tests.live import LiveServer, wait_until
from tests.openai.server import Script, ScriptedServer
from tests.services.fake_engine import BASE

MODEL = "bloomery-tiny"
TEXTS = ["The csv module reads files.", "import json", "The csv module reads rows of files.", "x"]


@pytest.fixture
def sdk(live_server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{live_server.url}/v1", api_key=live_server.key, max_retries=0) as client:
        yield client


def vectors(sdk: OpenAI, inputs: object, **options: object) -> list[list[float]]:
    answer = sdk.embeddings.create(**{"model": MODEL, "input": inputs} | options)
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data]


def test_a_vector_is_the_hidden_state_of_the_last_token(sdk: OpenAI) -> None:
    decoder, tokenizer = load_decoder(tiny.PATH, dtype=torch.float32), ChatTokenizer.load(tiny.PATH)
    for text, found in zip(TEXTS, vectors(sdk, TEXTS), strict=True):
        tokens = tokenizer.encode(text)
        last_D = full_hidden(decoder, tokens, None)[len(tokens) - 1].numpy()
        assert found == (last_D / np.linalg.norm(last_D)).astype(np.float32).tolist()


def test_what_shares_the_request_or_the_batch_changes_no_bit(sdk: OpenAI) -> None:
    together = vectors(sdk, TEXTS)
    assert [vectors(sdk, text)[0] for text in TEXTS] == together
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: vectors(sdk, TEXTS), range(4))) == [together] * 4


def test_both_encodings_say_the_same(sdk: OpenAI) -> None:
    # The SDK asks for base64 and decodes it, unless it is told otherwise.
    assert vectors(sdk, TEXTS) == vectors(sdk, TEXTS, encoding_format="float")


def test_token_ids_are_taken_for_their_text(sdk: OpenAI) -> None:
    tokenizer = ChatTokenizer.load(tiny.PATH)
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert vectors(sdk, ids) == vectors(sdk, TEXTS)
    assert vectors(sdk, ids[0]) == vectors(sdk, TEXTS[0])
    assert sdk.embeddings.create(model=MODEL, input=TEXTS).usage.prompt_tokens == sum(map(len, ids))


def test_similar_texts_have_similar_vectors(sdk: OpenAI) -> None:
    near, other, like, _ = map(np.array, vectors(sdk, TEXTS))
    assert np.linalg.norm(near) == pytest.approx(1, abs=1e-6)
    assert near @ like > near @ other


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ({"dimensions": 8}, "dimensions", "not offered"),
        ({"encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": []}, "input", "1 to 2048 texts, not 0"),
        ({"input": [""]}, "input.0", "has 0 tokens"),
        ({"input": ["x", [1]]}, "input", "a list of several of either"),
        ({"input": [[1, 10**6]]}, "input.0", "outside the vocabulary"),
        ({"input": ["x " * 40_000]}, "input.0", "tokens and leaves no room"),
        ({"input": 7}, "input", "expected"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(sdk: OpenAI, change: dict[str, object], field: str, problem: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.post("/embeddings", body={"model": MODEL, "input": "x"} | change, cast_to=object)
    assert refused.value.param == field
    assert problem in refused.value.message


def test_the_refusal_of_a_later_text_is_told_while_an_earlier_one_is_in_the_making(server: ScriptedServer) -> None:
    server.scripted.script = Script(refuses="prompt", silent_about=7)
    with server.sdk(timeout=120) as client, pytest.raises(openai.BadRequestError, match="is too much"):
        client.embeddings.create(model="tiny", input=[[7, 8], [8, 9]])
    # Who waits in vain is not worked for.
    wait_until(lambda: len(server.scripted.aborted) == 1)


PRICE = Price(prompt_usd_per_mtok=1.0, cached_prompt_usd_per_mtok=0.25, completion_usd_per_mtok=1000.0)


@pytest.fixture
def priced(server: ScriptedServer) -> str:
    """A deployment whose tokens cost something."""
    with server.client() as client:
        if "embeds" not in {each.name for each in client.deployments.list()}:
            client.deployments.create("embeds", "tiny")
            client.deployments.set_price("embeds", PRICE)
    return "embeds"


def newest(server: ScriptedServer) -> dict[str, Any]:
    (span,) = server.http.get("/api/v1/spans", params={"limit": 1, "kind": "embedding"}).json()["data"]
    return span


def totals(server: ScriptedServer) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/api/v1/spans/totals", params={"kind": "embedding"}).json()["total"]
    return found


def test_a_request_leaves_one_record_with_tokens_and_cost(server: ScriptedServer, priced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.scripted, "found_tokens", 2)
    before = totals(server)
    headers = {"x-bloomery-consent": "eval", "x-bloomery-episode": "e-1"}
    with server.sdk() as client:
        answer = client.embeddings.create(model=priced, input=["The quick", "fox"], user="u-1", extra_headers=headers)
        assert answer.model_extra is not None
        detail = server.span(answer.model_extra["id"])
    span, body = detail["span"], detail["body"]
    assert (span["kind"], span["status"], span["deployment"], span["revision"], span["version"]) == ("embedding", "ok", priced, 1, BASE)
    assert (span["in_tokens"], span["cached_tokens"], span["out_tokens"]) == (answer.usage.prompt_tokens, 4, 0)
    assert span["cost_usd"] == PRICE.of(answer.usage.prompt_tokens, 0, cached_tokens=4)
    assert (span["tags"], span["consent"], span["episode_id"]) == ({"user": "u-1"}, "eval", "e-1")
    assert (span["seed"], span["ttft_us"], span["finish_reason"], span["output_hash"]) == (None, None, None, None)
    assert span["duration_us"] >= 0
    assert (body["request"]["input"], body["choices"], body["tokens"]) == (["The quick", "fox"], [], None)
    after = totals(server)
    assert (after["requests"] - before["requests"], after["in_tokens"] - before["in_tokens"]) == (1, span["in_tokens"])
    assert after["cost_usd"] == pytest.approx((before["cost_usd"] or 0.0) + span["cost_usd"])
    assert server.http.post("/api/v1/feedback", json={"target": span["id"], "metric": "near", "value": True}).status_code == 201


def test_what_was_refused_costs_nothing_and_is_recorded(server: ScriptedServer, priced: str) -> None:
    server.scripted.script = Script(refuses="prompt")
    with server.sdk() as client, pytest.raises(openai.BadRequestError, match="is too much"):
        client.embeddings.create(model=priced, input=["The", "fox"])
    span = newest(server)
    assert (span["status"], span["error_code"], span["in_tokens"] > 0, span["cost_usd"]) == ("error", "invalid", True, 0.0)


def test_of_a_request_that_fails_the_texts_that_were_embedded_cost_something(server: ScriptedServer, priced: str) -> None:
    server.scripted.script = Script(refuses="prompt", refuses_about=8)
    with server.sdk() as client, pytest.raises(openai.BadRequestError, match="is too much"):
        client.embeddings.create(model=priced, input=[[7, 7, 7], [8, 8]])
    span = newest(server)
    assert (span["status"], span["in_tokens"], span["cost_usd"]) == ("error", 5, PRICE.of(3, 0))


def test_work_that_nobody_waited_for_is_recorded_as_that(server: ScriptedServer, priced: str) -> None:
    server.scripted.script = Script(silent_about=7)
    with server.asking("/v1/embeddings", {"model": priced, "input": [7, 8]}):
        pass
    wait_until(lambda: len(server.scripted.aborted) == 1)
    wait_until(lambda: newest(server)["status"] == "cancelled")
    span = newest(server)
    assert (span["error_code"], span["in_tokens"], span["cost_usd"]) == (None, 2, PRICE.of(2, 0))


def test_texts_that_were_not_begun_when_nobody_waited_any_more_cost_nothing(server: ScriptedServer, priced: str) -> None:
    server.scripted.script = Script(silent_about=7)
    with server.client() as admin:
        key = admin.keys.create("leaves", ["infer"], tokens_per_minute=200).key
    with server.asking("/v1/embeddings", {"model": priced, "input": [[7, 8, 9]] * 40}, **{"x-api-key": key}):
        wait_until(lambda: len(server.scripted.requests) == 32)
    wait_until(lambda: len(server.scripted.aborted) == 32)
    wait_until(lambda: newest(server)["status"] == "cancelled")
    span = newest(server)
    assert (span["in_tokens"], span["cost_usd"]) == (3 * 40, PRICE.of(3 * 32, 0))
    # Of its 200 tokens a minute those of 32 texts are gone, and 104 are left.
    server.scripted.script = Script()
    with server.sdk(api_key=key) as client:
        client.embeddings.create(model=priced, input=[[7, 8, 9]] * 33)


@pytest.mark.parametrize(("inputs", "on_the_loop"), [(1, True), (200, False)])
def test_many_token_ids_are_looked_through_where_they_hold_nobody_up(server: ScriptedServer, inputs: int, on_the_loop: bool) -> None:
    called = set()

    async def watch(on: bool) -> None:
        # The profile of the thread that runs the event loop, and of no other.
        sys.setprofile((lambda frame, *_: called.add(frame.f_code.co_name)) if on else None)

    server.call(watch(True))
    try:
        answer = server.http.post("/v1/embeddings", json={"model": "tiny", "input": [[7] * 500] * inputs})
    finally:
        server.call(watch(False))
    assert answer.status_code == 200, answer.text
    assert called & {"is_tokens", "_check_tokens"} == ({"is_tokens", "_check_tokens"} if on_the_loop else set())
