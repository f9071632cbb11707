"""The unmodified `openai` SDK against `bloomery up` on the shipped model."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from openai import OpenAI

from tests.live import LiveServer

MESSAGES = [{"role": "user", "content": "Say which package reads CSV files."}]
SAMPLED = {"model": "bloomery-tiny", "max_tokens": 24, "temperature": 1.0, "seed": 17}
TOLERANCE = 1e-4
"""Scoring takes the text in one piece and sampling token by token, which differs in the last bits on machines without bit-exact mode."""


@pytest.fixture
def sdk(live_server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{live_server.url}/v1", api_key=live_server.key, max_retries=0) as client:
        yield client


def test_the_model_is_listed_and_answers_with_its_version(sdk: OpenAI) -> None:
    model = sdk.models.retrieve("bloomery-tiny")
    assert model.id in {listed.id for listed in sdk.models.list()}
    answer = sdk.chat.completions.create(messages=MESSAGES, **SAMPLED)
    assert answer.system_fingerprint == model.bloomery["version"]
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert 0 < answer.usage.completion_tokens <= 24


def test_one_seed_gives_one_answer_streamed_or_not_alone_or_in_company(sdk: OpenAI) -> None:
    alone = sdk.chat.completions.create(messages=MESSAGES, n=2, **SAMPLED)
    expected = [choice.message.content for choice in alone.choices]
    texts = ["", ""]
    for chunk in sdk.chat.completions.create(messages=MESSAGES, n=2, stream=True, **SAMPLED):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == expected
    with ThreadPoolExecutor(6) as pool:
        company = list(pool.map(lambda _: sdk.chat.completions.create(messages=MESSAGES, n=2, **SAMPLED), range(6)))
    assert [[choice.message.content for choice in answer.choices] for answer in company] == [expected] * 6


def test_sampled_logprobs_are_those_that_scoring_gives(sdk: OpenAI, live_server: LiveServer) -> None:
    sampled = sdk.completions.create(prompt="The csv module", logprobs=0, **SAMPLED)
    recorded = httpx.get(f"{live_server.url}/api/v1/spans/{sampled.id}", headers={"x-api-key": live_server.key}).json()["body"]["tokens"]
    # As recorded, because the model need not spell a text with the tokens that the tokenizer would choose for it.
    tokens = recorded["prompt"] + recorded["samples"][0]["tokens"]
    scored = sdk.completions.create(model="bloomery-tiny", prompt=tokens, logprobs=0, echo=True, max_tokens=0).choices[0].logprobs
    expected = recorded["samples"][0]["logprobs"]
    assert scored.token_logprobs[len(recorded["prompt"]) :] == pytest.approx(expected, abs=TOLERANCE)
    shown = sampled.choices[0].logprobs.token_logprobs
    assert shown == expected[: len(shown)]


def test_greedy_tokens_are_the_likeliest(sdk: OpenAI) -> None:
    answer = sdk.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **SAMPLED | {"temperature": 0.0})
    for token in answer.choices[0].logprobs.content:
        assert token.token == token.top_logprobs[0].token
        assert token.logprob == token.top_logprobs[0].logprob
        assert [other.logprob for other in token.top_logprobs] == sorted((other.logprob for other in token.top_logprobs), reverse=True)


def test_a_stop_string_shortens_the_answer(sdk: OpenAI) -> None:
    whole = sdk.completions.create(prompt="The csv module", **SAMPLED).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    shortened = sdk.completions.create(prompt="The csv module", stop=stop, **SAMPLED).choices[0]
    assert shortened.text == whole[: whole.index(stop)]
    assert shortened.finish_reason == "stop"


def test_errors_are_those_of_the_contract(sdk: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="bloomery-tiny"):
        sdk.chat.completions.create(model="gpt-7", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="context of 2048"):
        sdk.chat.completions.create(model="bloomery-tiny", messages=[{"role": "user", "content": "csv " * 3000}])
