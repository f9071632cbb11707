"""The client of endpoints over a transport that plays the other end."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from bloomery.grade.declared import SamplingParams
from bloomery.grade.endpoints import Endpoint
from bloomery.grade.models import Question
from bloomery.types import errors
from bloomery.types.grading import GradeUsage

QUESTION = Question(
    model="m", messages=[{"role": "user", "content": "?"}], schema={"type": "object"}, params=SamplingParams(max_completions_tokens=9, seed=1)
)
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def chat(content: str | None, finish: str = "stop", **message: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}], "usage": USAGE}


def endpoint(answer: Callable[[httpx.Request], httpx.Response]) -> Endpoint:
    return Endpoint("http://judge.test/v1", "secret", transport=httpx.MockTransport(answer))


async def test_a_question_is_a_chat_completion_with_a_schema() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json=chat("{}"))

    async with endpoint(answer) as models:
        said = await models.ask(QUESTION)
    assert (said.text, said.whole, said.refusal, said.usage) == ("{}", True, None, GradeUsage(prompt_tokens=5, completion_tokens=2))
    assert (str(asked[0].url), asked[0].headers["authorization"]) == ("http://judge.test/v1/chat/completions", "Bearer secret")
    assert json.loads(asked[0].content) == {
        "model": "m",
        "messages": [{"role": "user", "content": "?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "verdict", "schema": {"type": "object"}, "strict": True}},
        "seed": 1,
        "max_completion_tokens": 9,
    }


async def test_cut_off_answers_and_refusals_are_told_apart() -> None:
    async with endpoint(lambda _: httpx.Response(200, json=chat("{", "length"))) as models:
        assert not (await models.ask(QUESTION)).whole
    async with endpoint(lambda _: httpx.Response(200, json=chat(None, refusal="No."))) as models:
        assert (await models.ask(QUESTION)).refusal == "No."


async def test_vectors_come_in_the_order_of_their_texts() -> None:
    data = [{"index": 1, "embedding": [2]}, {"index": 0, "embedding": [1]}]
    async with endpoint(lambda _: httpx.Response(200, json={"data": data, "usage": {"prompt_tokens": 4}})) as models:
        found = await models.embed("e", ["a", "b"])
    assert (found.vectors, found.usage.prompt_tokens) == ([[1.0], [2.0]], 4)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.InvalidInput),
        (401, errors.Unauthorized),
        (403, errors.Forbidden),
        (404, errors.NotFound),
        (429, errors.RateLimited),
        (500, errors.Unavailable),
        (503, errors.Unavailable),
    ],
)
async def test_refusals_are_the_errors_that_they_are(status: int, kind: type[errors.BloomeryError]) -> None:
    refusal = httpx.Response(status, json={"error": {"message": "because"}}, headers={"retry-after": "7"})
    async with endpoint(lambda _: refusal) as models:
        with pytest.raises(kind, match="because") as refused:
            await models.ask(QUESTION)
    if isinstance(refused.value, errors.RateLimited):
        assert refused.value.retry_after_s == 7


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no",
        b"[]",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{"message": 3}]}',
        b'{"choices": [{"message": {"content": ["a"]}}]}',
        b'{"choices": [{"message": {"refusal": {}}}]}',
        b'{"choices": [{"message": {}}], "usage": 3}',
        b'{"choices": [{"message": {}}], "usage": {"prompt_tokens": -5}}',
        b'{"choices": [{"message": {}}], "usage": {"completion_tokens": 1e300}}',
        b'{"choices": [{"message": {}}], "usage": {"prompt_tokens": Infinity}}',
        b"[" * 100_000,
    ],
)
async def test_what_is_not_of_the_contract_is_no_answer(content: bytes) -> None:
    async with endpoint(lambda _: httpx.Response(200, content=content)) as models:
        with pytest.raises(errors.Unavailable, match="contract"):
            await models.ask(QUESTION)


@pytest.mark.parametrize("number", [b"1" + b"0" * 400, b'"one"', b"null"])
async def test_what_is_no_vector_is_no_answer(number: bytes) -> None:
    async with endpoint(lambda _: httpx.Response(200, content=b'{"data": [{"index": 0, "embedding": [' + number + b"]}]}")) as models:
        with pytest.raises(errors.Unavailable, match="contract"):
            await models.embed("e", ["a"])


async def test_a_refusal_too_deep_to_be_read_is_a_refusal() -> None:
    async with endpoint(lambda _: httpx.Response(400, content=b"[" * 100_000)) as models:
        with pytest.raises(errors.InvalidInput, match="answers 400"):
            await models.ask(QUESTION)


async def test_halves_of_characters_in_an_answer_are_signs_for_them() -> None:
    async with endpoint(lambda _: httpx.Response(200, content=json.dumps(chat("\ud800 said", refusal="\udfff")))) as models:
        said = await models.ask(QUESTION)
    assert (said.text, said.refusal) == ("? said", "?")


async def test_an_endpoint_that_is_away_is_named_and_its_key_is_not() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async with endpoint(answer) as models:
        with pytest.raises(errors.Unavailable, match=r"judge\.test") as away:
            await models.ask(QUESTION)
    assert "secret" not in away.value.message


async def test_an_answer_without_end_is_cut_off() -> None:
    async with endpoint(lambda _: httpx.Response(200, content=b" " * (17 << 20))) as models:
        with pytest.raises(errors.Unavailable, match="16 MiB"):
            await models.ask(QUESTION)
