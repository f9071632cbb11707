"""`/v1/responses` in the words of chat completions, and its errors in the caller's: each field by the table of this one request."""

from typing import Any

import pytest

from bloomery.api.routes.openai.requests import MAX_PIECES
from bloomery.api.routes.openai.response_requests import parse_response
from bloomery.api.routes.openai.response_words import InOtherWords, in_other_words
from bloomery.types.errors import BloomeryError, InvalidInput, NotFound, RateLimited, WorkerError
from tests.openai.server import ScriptedServer

CALL = {"type": "function_call", "name": "messages", "arguments": "{}"}
CONVERSATION = {
    "model": "tiny",
    "instructions": "Be brief.",
    "max_output_tokens": 5,
    "tools": [{"type": "function", "name": name} for name in ("messages", "max_completion_tokens")],
    "tool_choice": {"type": "function", "name": "messages"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    "input": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {**CALL, "call_id": "a"},
        {**CALL, "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "three"},
        {**CALL, "call_id": "c"},
    ],
}
NAMES = {
    "messages": "input",
    "messages.0.content": "instructions",
    "messages.1": "input.0",
    "messages.1.content": "input.0.content",
    "messages.2.content": "input.1.content",
    "messages.2.tool_calls.0.function.arguments": "input.2.arguments",
    "messages.2.tool_calls.1.function.name": "input.3.name",
    "messages.2.tool_calls.1.id": "input.3.call_id",
    "messages.3.content": "input.4.output",
    "messages.3.tool_call_id": "input.4.call_id",
    "messages.4.tool_calls.0.function.arguments": "input.5.arguments",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "tools.1.function.name": "tools.1.name",
    "tools": "tools",
    "tool_choice.function.name": "tool_choice.name",
    "tool_choice": "tool_choice",
    "temperature": "temperature",
    "top_logprobs": "top_logprobs",
    "messages_of_mine": "messages_of_mine",
    "tools.7.function": "tools.7.function",
}


def words(body: dict[str, Any]) -> InOtherWords:
    return in_other_words(parse_response(body, MAX_PIECES))


def told(error: BloomeryError) -> tuple[str, str | None]:
    found = words(CONVERSATION).told(error)
    assert type(found) is type(error)
    return found.message, found.field


@pytest.mark.parametrize(("ours", "theirs"), NAMES.items())
def test_every_field_has_the_name_that_its_caller_gave_it(ours: str, theirs: str) -> None:
    assert told(InvalidInput(f"`{ours}` is wrong, and `seed` is not", field=ours)) == (f"`{theirs}` is wrong, and `seed` is not", theirs)


def test_what_is_not_the_field_of_the_error_is_told_as_it_is() -> None:
    said = "`tools.1.function.name`: `messages` is there already, like `max_completion_tokens`"
    assert told(InvalidInput(said, field="tools.1.function.name")) == (
        "`tools.1.name`: `messages` is there already, like `max_completion_tokens`",
        "tools.1.name",
    )
    for error in (NotFound("no `messages`", field="model"), RateLimited("`messages`"), WorkerError("`messages`", field="messages")):
        assert words(CONVERSATION).told(error) is error


def test_a_text_as_input_is_the_input() -> None:
    for body, place in (({"model": "tiny", "input": "x"}, 0), ({"model": "tiny", "input": "x", "instructions": "y"}, 1)):
        for field in (f"messages.{place}", f"messages.{place}.content"):
            assert words(body).told(InvalidInput("wrong", field=field)).field == "input"


def test_the_conversation_is_the_same() -> None:
    calls = [{"id": each, "type": "function", "function": {"name": "messages", "arguments": "{}"}} for each in "abc"]
    assert words(CONVERSATION).body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "a", "content": "three"},
        {"role": "assistant", "content": None, "tool_calls": calls[2:]},
    ]


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"tools": [{"type": "function", "name": "messages"}] * 2}, "tools.1.name", "`tools.1.name`: `messages` is there already"),
        ({"input": [{**CALL, "call_id": "x" * 300}]}, "input.0.call_id", "`input.0.call_id`: expected `str` of length <= 256"),
        ({"tools": [{"type": "function", "name": "f"}] * 129}, "tools", "length <= 128"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format.schema", "`text.format.schema`"),
    ],
)
def test_errors_behind_the_translation_name_what_was_sent(server: ScriptedServer, change: dict[str, Any], field: str, says: str) -> None:
    error = server.http.post("/v1/responses", json={"model": "tiny", "input": "x"} | change).json()["error"]
    assert error["param"] == field
    assert says in error["message"]
