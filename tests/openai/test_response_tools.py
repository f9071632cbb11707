"""Functions and schemas in `/v1/responses`, by the unmodified `openai` SDK."""

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import ResponseCompletedEvent
from pydantic import BaseModel

from tests.live import LiveServer
from tests.openai.server import Script, ScriptedServer
from tests.openai.tool_model import SUM, TWO_CALLS
from tests.render.builders import byte_level

ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": SUM, "strict": True}
NOW = {"type": "function", "name": "now"}
QUESTION = "What is 12 plus 3?"


class Sum(BaseModel):
    """What the model is to write."""

    total: int


@pytest.fixture
def server(tool_server: ScriptedServer) -> ScriptedServer:
    tool_server.scripted.script = Script(says=(TWO_CALLS,))
    tool_server.scripted.requests.clear()
    return tool_server


def respond(sdk: OpenAI, **options: Any) -> Any:
    return sdk.responses.create(**{"model": "tiny", "input": QUESTION, "tools": [ADD, NOW]} | options)


def prompt_of(server: ScriptedServer) -> str:
    return byte_level().decode(server.scripted.requests[-1].prompt.numpy().tolist(), skip_special_tokens=False)


def test_calls_are_items_of_the_output(sdk: OpenAI, server: ScriptedServer) -> None:
    answer = respond(sdk)
    assert (answer.status, answer.output_text) == ("completed", "I add.")
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    calls = answer.output[1:]
    assert [(call.name, json.loads(call.arguments), call.status) for call in calls] == [
        ("add", {"a": 12, "b": 3}, "completed"),
        ("now", {}, "completed"),
    ]
    assert len({call.call_id for call in calls}) == len({call.id for call in answer.output[1:]}) == 2
    assert [tool.name for tool in answer.tools] == ["add", "now"]
    assert '"description": "Adds."' in prompt_of(server)


def test_a_stream_opens_and_closes_every_item_in_turn(sdk: OpenAI) -> None:
    events = list(respond(sdk, stream=True))
    kinds = [event.type for event in events if not event.type.endswith(".delta")]
    call = ["response.output_item.added", "response.function_call_arguments.done", "response.output_item.done"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        *call,
        *call,
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    pieces = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta" and event.output_index == 1)
    assert json.loads(pieces) == {"a": 12, "b": 3}
    assert [event.output_index for event in events if event.type == "response.output_item.done"] == [0, 1, 2]
    done, whole = events[-1].response, respond(sdk)
    assert [(item.type, getattr(item, "arguments", None)) for item in done.output] == [
        (item.type, getattr(item, "arguments", None)) for item in whole.output
    ]


def test_text_between_and_behind_calls_is_an_item_at_its_place(sdk: OpenAI, server: ScriptedServer) -> None:
    add, now = (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    )
    server.scripted.script.says = (f"{add}And the time.{now}That is all.",)
    whole, streamed = respond(sdk), list(respond(sdk, stream=True))[-1].response
    for answer in (whole, streamed):
        assert [item.content[0].text if item.type == "message" else item.name for item in answer.output] == [
            "add",
            "And the time.",
            "now",
            "That is all.",
        ]
    assert whole.usage == streamed.usage


@pytest.mark.parametrize("missing", [1, 8, 40])
def test_of_an_answer_that_is_cut_off_the_last_item_is_incomplete(sdk: OpenAI, missing: int) -> None:
    most = len(byte_level().encode(TWO_CALLS, add_special_tokens=False).ids) - missing
    whole, streamed = respond(sdk, max_output_tokens=most), list(respond(sdk, max_output_tokens=most, stream=True))[-1].response
    for answer in (whole, streamed):
        assert answer.status == "incomplete"
        assert [item.status for item in answer.output] == ["completed"] * (len(answer.output) - 1) + ["incomplete"]
    assert [item.type for item in whole.output] == [item.type for item in streamed.output]


def test_calls_come_whole_beside_log_probabilities(sdk: OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    *_, last = sdk.responses.create(model="tiny", input=QUESTION, tools=[ADD, NOW], stream=True, include=include)
    assert isinstance(last, ResponseCompletedEvent)
    assert [item.type for item in last.response.output] == ["message", "function_call", "function_call"]
    assert [item.arguments for item in last.response.output if item.type == "function_call"] == [
        item.arguments for item in respond(sdk).output if item.type == "function_call"
    ]


def test_the_streaming_helper_of_the_sdk_builds_the_calls(sdk: OpenAI) -> None:
    with sdk.responses.stream(model="tiny", input=QUESTION, tools=[ADD, NOW]) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert final.output[1].parsed_arguments == {"a": 12, "b": 3}


def test_what_came_of_the_calls_is_sent_with_the_next_request(sdk: OpenAI, server: ScriptedServer) -> None:
    first = respond(sdk)
    outputs = [{"type": "function_call_output", "call_id": item.call_id, "output": "15"} for item in first.output if item.type == "function_call"]
    server.scripted.script.says = ("It is 15.",)
    answer = respond(sdk, input=[{"role": "user", "content": QUESTION}, *first.output, *outputs])
    assert answer.output_text == "It is 15."
    said = prompt_of(server)
    assert said.count('{"name": "add", "arguments": {"a": 12, "b": 3}}') == 1
    assert said.count("<|im_start|>tool\n15<|im_end|>") == 2


@pytest.mark.parametrize(("choice", "held"), [("required", True), ({"type": "function", "name": "add"}, True), ("none", False)])
def test_a_choice_of_tools_is_passed_on(sdk: OpenAI, server: ScriptedServer, choice: Any, held: bool) -> None:
    respond(sdk, tool_choice=choice)
    assert (server.scripted.requests[-1].grammar is not None) == held


def test_a_function_whose_name_resembles_a_field_is_told_by_its_name(sdk: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="`response_format_v2`"):
        respond(sdk, tool_choice={"type": "function", "name": "response_format_v2"})


def test_a_schema_of_the_text_is_passed_on_and_a_bad_one_refused_by_its_name(sdk: OpenAI, server: ScriptedServer) -> None:
    server.scripted.script.says = ('{"total": 15}',)
    parsed = sdk.responses.parse(model="tiny", input=QUESTION, text_format=Sum)
    assert parsed.output_parsed == Sum(total=15)
    assert parsed.text.format.type == "json_schema"
    grammar = server.scripted.requests[-1].grammar
    assert grammar is not None
    assert json.loads(grammar.text)["properties"]["total"]["type"] == "integer"
    bad = {"type": "json_schema", "name": "x", "schema": {"not": {"type": "string"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.responses.create(model="tiny", input=QUESTION, text={"format": bad})
    assert refused.value.param.startswith("text.format")
    assert "response_format" not in refused.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        respond(sdk, tools=[{"type": "function", "name": "no blanks"}])
    assert refused.value.param == "tools.0.name"


def test_a_real_engine_holds_the_answer_to_the_schema(live_server: LiveServer) -> None:
    with OpenAI(base_url=f"{live_server.url}/v1", api_key=live_server.key, max_retries=0) as sdk:
        parsed = sdk.responses.parse(model="bloomery-tiny", input=QUESTION, text_format=Sum, max_output_tokens=200, temperature=0.0)
    assert isinstance(parsed.output_parsed, Sum)
