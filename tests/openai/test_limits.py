"""Numbers at the edges of the contract, and the one message about how many tokens fit."""

import json
import re
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.openai.server import CONTEXT, ScriptedServer
from tests.openai.test_contract import USER, chat, complete

# The ranges that the OpenAI reference gives, from both sides.
WITHIN = [
    ({"temperature": 0}, {"temperature": 0}),
    ({"temperature": 2}, {"temperature": 2.0}),
    ({"top_p": 1}, {"top_p": 1}),
    ({"frequency_penalty": -2, "presence_penalty": -2}, {"frequency_penalty": 2, "presence_penalty": 2}),
    ({"logit_bias": {"0": -100}}, {"logit_bias": {"50": 100}}),
    ({"min_p": 0}, {"min_p": 1}),
    ({"repetition_penalty": 0.01}, {"repetition_penalty": 100}),
    ({"min_tokens": 0}, {"min_tokens": 1}),
    ({"prompt_logprobs": 0}, {"prompt_logprobs": 20}),
    ({"n": 1}, {"n": 128}),
    ({"seed": -(2**63)}, {"seed": 2**63 - 1}),
]
OUTSIDE = [
    ({"temperature": 2.01}, "temperature", "<= 2"),
    ({"temperature": 1e44}, "temperature", "<= 2"),
    ({"temperature": -0.01}, "temperature", ">= 0"),
    ({"temperature": True}, "temperature", "expected `float"),
    ({"top_p": 1.01}, "top_p", "<= 1"),
    ({"top_p": -1}, "top_p", "> 0"),
    ({"top_k": 2**64}, "top_k", "<= 2147483647"),
    ({"n": 10**30}, "n", "<= 128"),
    ({"seed": 10**30}, "seed", "<= 9223372036854775807"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "<= 2"),
    ({"presence_penalty": -2.5}, "presence_penalty", ">= -2"),
    ({"presence_penalty": "high"}, "presence_penalty", "expected `float"),
    ({"logit_bias": {"50": 100.5}}, "logit_bias", "<= 100"),
    ({"logit_bias": {"50": None}}, "logit_bias", "expected `float"),
    ({"logit_bias": {"050": 1}}, "logit_bias", "token ids in digits"),
    ({"logit_bias": {"50\n": 1}}, "logit_bias", "token ids in digits"),
    ({"logit_bias": {"cat": 1}}, "logit_bias", "token ids in digits"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids in digits"),
    ({"logit_bias": {"999999": 1}}, "logit_bias", "ids are from 0 to"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "length <= 1024"),
    ({"logit_bias": [1]}, "logit_bias", "expected `object"),
    ({"min_p": -0.1}, "min_p", ">= 0"),
    ({"min_p": 1.1}, "min_p", "<= 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", ">= 0.01"),
    ({"repetition_penalty": 1e9}, "repetition_penalty", "<= 100"),
    ({"min_tokens": -1}, "min_tokens", ">= 0"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "at most 5"),
    ({"ignore_eos": 1}, "ignore_eos", "expected `bool"),
    ({"stop_token_ids": [999_999]}, "stop_token_ids", "outside the vocabulary"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0", ">= 0"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", "length <= 128"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "<= 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "leave out `stream`"),
    ({"logprobs_mode": "raw_logits"}, "logprobs_mode", "invalid enum value"),
    ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode", "needs `logprobs`"),
    ({"max_tokens": -1}, "max_tokens", ">= 0"),
    ({"max_tokens": 1.5}, "max_tokens", "expected `int"),
]
OUTSIDE_CHAT = [
    ({"logprobs": 5}, "logprobs", "expected `bool"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", ">= 0"),
    ({"logprobs": False, "top_logprobs": 5}, "top_logprobs", "needs `logprobs`"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", ">= 0"),
]
OUTSIDE_COMPLETION = [
    ({"logprobs": 21}, "logprobs", "<= 20"),
    ({"logprobs": -1}, "logprobs", ">= 0"),
    ({"best_of": 0}, "best_of", ">= 1"),
    ({"best_of": 129}, "best_of", "<= 128"),
    ({"best_of": 2, "n": 3}, "best_of", "at least `n`, which is 3"),
    ({"best_of": 2, "stream": True}, "best_of", "leave out `stream`"),
    ({"best_of": 2, "max_tokens": 0}, "best_of", "leave `best_of` at 1"),
    ({"best_of": 128, "prompt": ["x"] * 9}, "best_of", "at most 1024"),
    ({"prompt_logprobs": 20, "n": 128, "prompt": ["x" * 400]}, "prompt_logprobs", "at most 1048576 are given at a time"),
    ({"logprobs": 20, "echo": True, "n": 128, "prompt": ["x" * 400]}, "logprobs", "at most 1048576 are given at a time"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "unknown field"),
]


@pytest.mark.parametrize("edges", WITHIN)
def test_both_ends_of_a_range_belong_to_it(sdk: OpenAI, edges: tuple[dict[str, Any], ...]) -> None:
    for edge in edges:
        assert chat(sdk, max_tokens=1, extra_body=edge).choices


@pytest.mark.parametrize(
    ("path", "change", "field", "problem"),
    [
        *(("chat/completions", *case) for case in [*OUTSIDE, *OUTSIDE_CHAT]),
        *(("completions", *case) for case in [*OUTSIDE, *OUTSIDE_COMPLETION]),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(server: ScriptedServer, path: str, change: dict[str, Any], field: str, problem: str) -> None:
    body = {"model": "tiny", **({"messages": USER} if path.startswith("chat") else {"prompt": "The"})} | change
    answer = server.http.post(f"/v1/{path}", content=json.dumps(body))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", field)
    assert f"`{field}`" in error["message"]
    assert problem in error["message"]
    assert server.scripted.requests == []


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("asked", [CONTEXT, 10**30])
def test_too_many_tokens_are_told_how_many_fit_by_the_name_they_were_asked_by(sdk: OpenAI, server: ScriptedServer, field: str, asked: int) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(sdk, **{field: asked})
    assert refused.value.param == field
    told = re.search(r"the prompt has (\d+) tokens and the model's context (\d+): ask for at most (\d+) `(\w+)`, not (\d+)", refused.value.message)
    assert told is not None
    prompt, context, fits, named, given = told.groups()
    assert (int(context), named, int(given)) == (CONTEXT, field, asked)
    answer = chat(sdk, **{field: int(fits)})
    assert (answer.usage.prompt_tokens, server.scripted.requests[-1].params.max_tokens) == (int(prompt), int(fits))
    with pytest.raises(openai.BadRequestError, match=rf"at most {fits} `{field}`, not {int(fits) + 1}"):
        chat(sdk, **{field: int(fits) + 1})


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
        ("completions", {"prompt": ["x", "y" * 10**6]}, "prompt"),
        ("responses", {"input": "x" * 10**6}, "input"),
        ("embeddings", {"input": ["x", "y" * 10**6]}, "input.1"),
        ("embeddings", {"input": "y" * 10**6}, "input"),
    ],
)
def test_a_text_that_is_far_too_long_is_refused_without_counting_its_tokens(
    server: ScriptedServer, path: str, body: dict[str, Any], field: str
) -> None:
    answer = server.http.post(f"/v1/{path}", json={"model": "tiny"} | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    told = rf"`{field}` has at least \d+ tokens and leaves no room in the model's context of {CONTEXT}: shorten it"
    assert re.fullmatch(told, answer.json()["error"]["message"])
    assert server.scripted.requests == []


@pytest.mark.parametrize(("given", "field"), [("", "input"), ([""], "input.0"), ([10**6], "input"), ([[1], [10**6]], "input.1")])
def test_an_input_is_named_as_it_was_sent(server: ScriptedServer, given: Any, field: str) -> None:
    error = server.http.post("/v1/embeddings", json={"model": "tiny", "input": given}).json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"`{field}` h")


def test_both_names_with_one_value_are_one_wish(sdk: OpenAI, server: ScriptedServer) -> None:
    chat(sdk, max_tokens=3, max_completion_tokens=3)
    assert server.scripted.requests[0].params.max_tokens == 3


def test_a_completion_that_asks_for_nothing_gets_what_fits(sdk: OpenAI, server: ScriptedServer) -> None:
    tokens = [65] * (CONTEXT - 5)
    sdk.completions.create(model="tiny", prompt=tokens)
    assert server.scripted.requests[0].params.max_tokens == 5
    with pytest.raises(openai.BadRequestError, match=f"leaves no room in the model's context of {CONTEXT}: shorten it to at most {CONTEXT - 1}"):
        sdk.completions.create(model="tiny", prompt=[65] * CONTEXT)
    complete(sdk, prompt=[65] * CONTEXT, echo=True, logprobs=0, max_tokens=0)
    with pytest.raises(openai.BadRequestError, match=f"shorten it to at most {CONTEXT}"):
        complete(sdk, prompt=[65] * (CONTEXT + 1), max_tokens=0)
