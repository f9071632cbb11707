"""The unmodified `openai` SDK against `bloomery up` on the shipped model."""

import math
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


def test_negative_seeds_give_one_answer_each(sdk: OpenAI) -> None:
    def said(seed: int) -> str:
        return sdk.completions.create(prompt="The", **SAMPLED | {"seed": seed}).choices[0].text

    answers = [said(seed) for seed in (-1, 1, -(2**63), 2**63 - 1)]
    assert len(set(answers)) == 4
    assert [said(seed) for seed in (-1, -(2**63))] == answers[::2]


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


def shown(sdk: OpenAI, **asked: object) -> list[openai.types.chat.ChatCompletionTokenLogprob]:
    answer = sdk.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=20, **SAMPLED | asked)
    return answer.choices[0].logprobs.content


def test_both_log_probabilities_are_told_and_belong_together(sdk: OpenAI) -> None:
    asked = {"temperature": 0.6, "extra_body": {"top_k": 5}}
    raw, processed = (
        shown(sdk, **asked | {"extra_body": {**asked["extra_body"], "logprobs_mode": mode}}) for mode in ("raw_logprobs", "processed_logprobs")
    )
    assert [token.token for token in raw] == [token.token for token in processed]
    for own, drawn_from in zip(raw, processed, strict=True):
        scaled = [other.logprob / 0.6 for other in own.top_logprobs[:5]]
        total = math.log(math.fsum(map(math.exp, scaled)))
        assert [other.logprob for other in drawn_from.top_logprobs] == pytest.approx([value - total for value in scaled], abs=1e-4)
        assert [other.token for other in drawn_from.top_logprobs] == [other.token for other in own.top_logprobs[:5]]
        assert drawn_from.logprob == pytest.approx(own.logprob / 0.6 - total, abs=1e-4)
    plain = [shown(sdk, extra_body={"logprobs_mode": mode}) for mode in ("raw_logprobs", "processed_logprobs")]
    assert plain[0] == plain[1]


def test_penalties_are_those_of_the_definition(sdk: OpenAI) -> None:
    asked = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "max_tokens": 40}
    raw, processed = (shown(sdk, **asked, extra_body={"logprobs_mode": mode}) for mode in ("raw_logprobs", "processed_logprobs"))
    said: list[bytes] = []
    penalised = 0
    for own, drawn_from in zip(raw, processed, strict=True):
        expected = {}
        for other in own.top_logprobs:
            times = said.count(bytes(other.bytes))
            expected[bytes(other.bytes)] = other.logprob - 0.4 * times - 0.7 * (times > 0)
            penalised += times > 0
        told = {bytes(other.bytes): other.logprob for other in drawn_from.top_logprobs if bytes(other.bytes) in expected}
        # What all tokens together gain by it is not known from here, so only differences are.
        gains = [value - expected[token] for token, value in told.items()]
        assert gains == pytest.approx([gains[0]] * len(gains), abs=1e-4)
        said.append(bytes(own.bytes))
    assert penalised > 2


def test_a_bias_forces_and_bans(sdk: OpenAI) -> None:
    scored = sdk.completions.create(prompt="The csv module", extra_body={"prompt_logprobs": 0}, **SAMPLED | {"max_tokens": 1}).choices[0]
    token = next(iter(scored.prompt_logprobs[1]))
    only = sdk.chat.completions.create(messages=MESSAGES, logit_bias={token: 100}, logprobs=True, **SAMPLED).choices[0]
    (text,) = {shown.token for shown in only.logprobs.content}
    assert only.finish_reason == "length"
    banned = sdk.chat.completions.create(messages=MESSAGES, logit_bias={token: -100}, logprobs=True, n=4, **SAMPLED)
    assert all(text not in {shown.token for shown in choice.logprobs.content} for choice in banned.choices)


def test_penalised_and_biased_requests_are_repeatable_alone_and_in_company(sdk: OpenAI) -> None:
    asked = {**SAMPLED, "presence_penalty": 1.0, "frequency_penalty": 0.5, "extra_body": {"repetition_penalty": 1.2, "min_p": 0.02}}
    alone = sdk.chat.completions.create(messages=MESSAGES, **asked).choices[0].message.content
    with ThreadPoolExecutor(4) as pool:
        company = list(pool.map(lambda n: sdk.chat.completions.create(messages=MESSAGES, **asked | {"n": n}), (1, 2, 3, 1)))
    assert [answer.choices[0].message.content for answer in company] == [alone] * 4
    assert alone != sdk.chat.completions.create(messages=MESSAGES, **SAMPLED).choices[0].message.content


def test_an_answer_does_not_end_before_its_time(sdk: OpenAI) -> None:
    asked = {**SAMPLED, "max_tokens": 40, "seed": 3}
    usages = [
        sdk.chat.completions.create(messages=MESSAGES, **asked, extra_body=extra).usage.completion_tokens
        for extra in ({"min_tokens": 30}, {"ignore_eos": True})
    ]
    assert usages[0] > 30
    assert usages[1] == 40


def test_a_prompt_is_scored_alike_in_every_way(sdk: OpenAI) -> None:
    asked = {"model": "bloomery-tiny", "prompt": "The csv module reads files.", "max_tokens": 0}
    echoed = sdk.completions.create(**asked, echo=True, logprobs=2).choices[0].logprobs
    (table,) = (choice.prompt_logprobs for choice in sdk.completions.create(**asked, extra_body={"prompt_logprobs": 2}).choices)
    assert table[0] is None
    assert [next(iter(row.values()))["logprob"] for row in table[1:]] == echoed.token_logprobs[1:]


def test_the_best_of_several_is_the_likeliest(sdk: OpenAI) -> None:
    # End tokens are counted and not shown, so none may come where the choice is to be checked from here.
    asked = {**SAMPLED, "prompt": "The csv module", "best_of": 4, "logprobs": 0, "extra_body": {"ignore_eos": True}}
    every = sdk.completions.create(n=4, **asked).choices
    means = {choice.text: math.fsum(choice.logprobs.token_logprobs) / len(choice.logprobs.tokens) for choice in every}
    assert len(means) == 4
    ranked = sdk.completions.create(n=2, **asked).choices
    assert [choice.text for choice in ranked] == sorted(means, key=lambda text: -means[text])[:2]
