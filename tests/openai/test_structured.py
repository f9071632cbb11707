"""Answers of a form that was asked for: over the unmodified `openai` SDK, at the door and from the shipped model."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, Field

from bloomery.models import tiny
from bloomery.types.generation import Grammar
from tests.live import LiveServer, running_server
from tests.openai.server import ScriptedServer
from tests.openai.tool_model import TEMPLATE

USER = [{"role": "user", "content": "Which package reads CSV files?"}]
SAMPLED = {"model": "bloomery-tiny", "messages": USER, "max_tokens": 500, "seed": 5}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}

BACKSLASHES = {"properties": {"pattern": {"const": {"pattern": "a\\"}}, "b": {"pattern": "a\\\\"}}}
"""That end what is no regular expression, and one that escapes the last."""


def named(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def chat(sdk: OpenAI, **options: Any) -> Any:
    return sdk.chat.completions.create(**{"model": "tiny", "messages": USER} | options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(kind="json_schema", text='{"type": "object"}')),
        ({"response_format": named({})}, Grammar(kind="json_schema", text="{}")),
        ({"response_format": named(None)}, Grammar(kind="json_schema", text='{"type": "object"}')),
        ({"response_format": named(SCHEMA)}, Grammar(kind="json_schema", text=json.dumps(SCHEMA))),
        ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, Grammar(kind="json_schema", text=json.dumps(SCHEMA))),
        ({"extra_body": {"structured_outputs": {"json": "{}"}}}, Grammar(kind="json_schema", text="{}")),
        ({"response_format": named(BACKSLASHES)}, Grammar(kind="json_schema", text=json.dumps(BACKSLASHES))),
        ({"extra_body": {"structured_outputs": {"regex": "a\\\\"}}}, Grammar(kind="regex", text="a\\\\")),
        ({"extra_body": {"structured_outputs": {"json_object": True}}}, Grammar(kind="json_schema", text='{"type": "object"}')),
        ({"extra_body": {"structured_outputs": {"regex": "[ab]+"}}}, Grammar(kind="regex", text="[ab]+")),
        ({"extra_body": {"structured_outputs": {"choice": ["yes", "n.o|"]}}}, Grammar(kind="regex", text=r"yes|n\.o\|")),
        ({"extra_body": {"structured_outputs": {"grammar": 'start: "x"'}}}, Grammar(kind="lark", text='start: "x"')),
    ],
    ids=str,
)
def test_the_form_reaches_the_engine(sdk: OpenAI, server: ScriptedServer, options: dict[str, Any], expected: Grammar | None) -> None:
    chat(sdk, **options)
    assert _unnamed(server.scripted.requests[-1].grammar) == expected
    if "extra_body" in options:
        sdk.completions.create(model="tiny", prompt="x", **options)
        assert _unnamed(server.scripted.requests[-1].grammar) == expected


def _unnamed(grammar: Grammar | None) -> Grammar | None:
    """Without the name that the caller knows it by."""
    return None if grammar is None else Grammar(kind=grammar.kind, text=grammar.text)


@pytest.mark.parametrize(
    ("options", "field", "problem"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required field"),
        ({"response_format": named({"type": "objct"})}, "response_format.json_schema.schema", "Invalid type: objct"),
        ({"response_format": named({"not": {}})}, "response_format.json_schema.schema", "Unimplemented keys"),
        ({"response_format": named({"$ref": "http://example.com"})}, "response_format.json_schema.schema", "example.com"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}, "response_format.json_schema.name", "letters"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a\n", "schema": {}}}}, "response_format.json_schema.name", "letters"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs", "exactly one"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "json_object": True}}}, "structured_outputs", "exactly one"),
        ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "structured_outputs.regex", "unclosed group"),
        ({"extra_body": {"structured_outputs": {"regex": "a\\"}}}, "structured_outputs.regex", "ends with a backslash"),
        ({"extra_body": {"structured_outputs": {"json": {"pattern": "a\\\\\\"}}}}, "structured_outputs.json", "ends with a backslash"),
        ({"response_format": named({"anyOf": [{"pattern": "\\"}]})}, "response_format.json_schema.schema", "ends with a backslash"),
        ({"response_format": named({"patternProperties": {"x\\": {}}})}, "response_format.json_schema.schema", "ends with a backslash"),
        ({"extra_body": {"structured_outputs": {"json": '{"const": ' + "9" * 5000 + "}"}}}, "structured_outputs.json", "no JSON schema"),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "structured_outputs.choice", ""),
        ({"extra_body": {"structured_outputs": {"grammar": "start: x"}}}, "structured_outputs.grammar", "cannot be followed"),
        ({"extra_body": {"structured_outputs": {"grammar": "begin ="}}}, "structured_outputs.grammar", "neither Lark nor GBNF"),
        pytest.param({"extra_body": {"structured_outputs": {"grammar": "x" * 200_000}}}, "structured_outputs.grammar", "at most 131072", id="long"),
        ({"extra_body": {"structured_outputs": {"json": "true"}}}, "structured_outputs.json", "no JSON schema"),
        ({"extra_body": {"structured_outputs": {"json": "{"}}}, "structured_outputs.json", "no JSON schema"),
        ({"extra_body": {"structured_outputs": {"whitespace_pattern": " "}}}, "structured_outputs.whitespace_pattern", "unknown field"),
        ({"extra_body": {"guided_json": {}}}, "guided_json", "structured_outputs"),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"structured_outputs": {"regex": "a"}}},
            "structured_outputs",
            "give one of them",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_by_name(sdk: OpenAI, server: ScriptedServer, options: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(sdk, **options)
    assert refused.value.param == field
    assert problem in refused.value.message
    assert server.scripted.requests == []


class Package(BaseModel):
    """What a caller of `parse` has."""

    name: Literal["csv", "json"]
    stars: int = Field(ge=1, le=5)
    tags: list[Literal["text", "fast"]] = Field(max_length=3)


@pytest.fixture
def live_sdk(live_server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{live_server.url}/v1", api_key=live_server.key, max_retries=0) as client:
        yield client


@pytest.mark.slow
def test_parse_gives_the_model_of_the_caller(live_sdk: OpenAI) -> None:
    answer = live_sdk.chat.completions.parse(response_format=Package, n=2, **SAMPLED)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert choice.message.parsed == Package.model_validate_json(choice.message.content)
    again = live_sdk.chat.completions.parse(response_format=Package, n=2, **SAMPLED)
    assert [choice.message.content for choice in again.choices] == [choice.message.content for choice in answer.choices]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"extra_body": {"structured_outputs": {"json": {"$ref": "#"}}}}, "structured_outputs.json"),
        ({"extra_body": {"structured_outputs": {"regex": r"[^\s\S]"}}}, "structured_outputs.regex"),
        ({"response_format": named({"$ref": "#"})}, "response_format.json_schema.schema"),
    ],
    ids=str,
)
def test_what_only_the_engine_finds_wrong_is_refused_by_name_too(live_sdk: OpenAI, options: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        live_sdk.chat.completions.create(**SAMPLED, **options)
    assert refused.value.param == field
    assert f"`{field}`" in refused.value.message


def test_a_response_is_told_so_in_its_own_words(live_sdk: OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": {"$ref": "#"}}}
    with pytest.raises(BadRequestError) as refused:
        live_sdk.responses.create(model=SAMPLED["model"], input="Hello", text=form)
    assert refused.value.param == "text.format.schema"


@pytest.mark.slow
def test_choices_patterns_and_grammars_hold_streamed_or_not(live_sdk: OpenAI) -> None:
    for extra, pattern in (
        ({"choice": ["csv", "the (json) module/x\n#"]}, r"csv|the \(json\) module/x\n#"),
        ({"regex": r"[a-z]{2,8}\.(py|txt)"}, r"[a-z]{2,8}\.(py|txt)"),
        ({"grammar": 'start: word ("+" word)*\nword: "a" | "b"'}, r"[ab](\+[ab])*"),
    ):
        asked = {**SAMPLED, "max_tokens": 60, "extra_body": {"structured_outputs": extra}}
        whole = live_sdk.chat.completions.create(**asked).choices[0]
        assert re.fullmatch(pattern, whole.message.content) or whole.finish_reason == "length"
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in live_sdk.chat.completions.create(stream=True, **asked))
        assert streamed == whole.message.content


def test_log_probabilities_of_a_constrained_answer_are_of_both_kinds(live_sdk: OpenAI) -> None:
    asked = {**SAMPLED, "logprobs": True, "temperature": 0.7}
    raw, processed = (
        live_sdk.chat.completions.create(**asked, extra_body={"structured_outputs": {"choice": ["csv", "json"]}, "logprobs_mode": mode})
        for mode in ("raw_logprobs", "processed_logprobs")
    )
    assert raw.choices[0].message.content == processed.choices[0].message.content
    pairs = list(zip(raw.choices[0].logprobs.content, processed.choices[0].logprobs.content, strict=True))
    assert all(own.logprob < drawn_from.logprob <= 0 for own, drawn_from in pairs)


@pytest.mark.slow
def test_tools_are_called_by_a_model_that_never_learned_it(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(Path(tiny.__file__).with_name("weights"), directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    tool = {"type": "function", "function": {"name": "rate", "parameters": Package.model_json_schema()}}
    with (
        running_server(tmp_path / "data", "--model", f"tools={directory}") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as sdk,
    ):
        for choice in ("required", {"type": "function", "function": {"name": "rate"}}):
            asked = {**SAMPLED, "model": "tools", "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
            whole = sdk.chat.completions.create(**asked).choices[0]
            assert whole.finish_reason == "tool_calls"
            (call,) = whole.message.tool_calls
            assert call.function.name == "rate"
            assert Package.model_validate_json(call.function.arguments)
            with sdk.chat.completions.stream(**asked) as stream:
                (same,) = stream.get_final_completion().choices[0].message.tool_calls
            assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)
