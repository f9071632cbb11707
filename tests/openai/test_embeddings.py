"""`/v1/embeddings` by the unmodified `openai` SDK, against `bloomery up` on the shipped model and beside the trainer's own forward."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
import torch
from openai import OpenAI

from bloomery.models import tiny
from bloomery.models.load import load_decoder
from bloomery.render import ChatTokenizer
from tests.infer.builders import full_hidden
from tests.live import LiveServer, wait_until
from tests.openai.server import Script, ScriptedServer

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
