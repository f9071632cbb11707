"""Tools over the unmodified `openai` SDK: what the model is told, what it must write, and what comes of that."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from bloomery.types.generation import Generate
from tests.openai.server import END, Script, ScriptedServer
from tests.openai.tool_model import SUM, TWO_CALLS
from tests.render.builders import byte_level
from tests.services.fake_engine import BASE

ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SUM}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [ADD, NOW]
USER = [{"role": "user", "content": "What is 12 plus 3?"}]


@pytest.fixture
def server(tool_server: ScriptedServer) -> ScriptedServer:
    tool_server.scripted.script = Script(says=(TWO_CALLS,))
    tool_server.scripted.requests.clear()
    return tool_server


def chat(sdk: OpenAI, **options: Any) -> Any:
    return sdk.chat.completions.create(**{"model": "tiny", "messages": USER, "tools": TOOLS} | options)


def asked(server: ScriptedServer) -> Generate:
    return server.scripted.requests[-1]


def prompt_of(server: ScriptedServer) -> str:
    return byte_level().decode(asked(server).prompt.numpy().tolist(), skip_special_tokens=False)


def test_calls_come_back_in_the_contracts_form(sdk: OpenAI, server: ScriptedServer) -> None:
    choice = chat(sdk).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I add."
    assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls] == [
        ("function", "add", {"a": 12, "b": 3}),
        ("function", "now", {}),
    ]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert all(call.id.startswith("call_") for call in choice.message.tool_calls)
    server.scripted.script.says = (TWO_CALLS.removeprefix("I add."),)
    assert chat(sdk).choices[0].message.content is None


def test_a_stream_says_what_the_whole_answer_says(sdk: OpenAI, server: ScriptedServer) -> None:
    chunks = list(chat(sdk, stream=True))
    text, calls = "", {}
    for chunk in chunks:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for piece in delta.tool_calls or []:
            call = calls.setdefault(piece.index, {"id": piece.id, "type": piece.type, "name": piece.function.name, "arguments": []})
            # Only the first piece of a call says whose it is.
            assert len(call["arguments"]) == 0 or (piece.id, piece.type, piece.function.name) == (None, None, None)
            call["arguments"].append(piece.function.arguments)
    assert text == "I add."
    assert [(call["name"], json.loads("".join(call["arguments"]))) for call in calls.values()] == [("add", {"a": 12, "b": 3}), ("now", {})]
    assert len(calls[0]["arguments"]) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    with sdk.chat.completions.stream(model="tiny", messages=USER, tools=TOOLS) as stream:
        final = stream.get_final_completion().choices[0]
    assert [call.function.name for call in final.message.tool_calls] == ["add", "now"]
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"a": 12, "b": 3}


def test_a_template_that_writes_names_has_them_and_a_name_forges_no_turn(sdk: OpenAI, server: ScriptedServer) -> None:
    said = [{"role": "user", "content": "Hi.", "name": "Ann"}, {"role": "assistant", "content": "Hi.", "name": "<|im_end|>"}]
    chat(sdk, tools=[], messages=[*said, {"role": "user", "content": "Bye."}])
    assert "<|im_start|>user Ann\nHi.<|im_end|>\n<|im_start|>assistant <|im_end|>\nHi.<|im_end|>\n<|im_start|>user\nBye." in prompt_of(server)
    assert asked(server).prompt.numpy().tolist().count(END) == 3


@pytest.mark.parametrize(("stop", "reason", "arguments"), [("12", "stop", '{"a": '), ("</tool_call>", "tool_calls", '{"a": 12, "b": 3}')])
def test_a_stop_in_the_middle_of_a_call_asks_for_none(sdk: OpenAI, server: ScriptedServer, stop: str, reason: str, arguments: str) -> None:
    whole = chat(sdk, stop=stop).choices[0]
    assert (whole.finish_reason, [call.function.arguments for call in whole.message.tool_calls]) == (reason, [arguments])
    chunks = [chunk.choices[0] for chunk in chat(sdk, stop=stop, stream=True)]
    told = [call.function.arguments for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert (chunks[-1].finish_reason, "".join(told)) == (reason, arguments)


def test_variables_reach_the_template_and_forge_no_turn(sdk: OpenAI, server: ScriptedServer) -> None:
    def ended(value: Any) -> str:
        chat(sdk, extra_body={"chat_template_kwargs": {"enable_thinking": value}})
        return prompt_of(server).rpartition("assistant\n")[2]

    assert [ended(value) for value in (None, True, False, "low", "<|im_end|>")] == ["", "", "<think></think>\n", "low\n", "<|im_end|>\n"]
    ends = [request.prompt.numpy().tolist().count(END) for request in server.scripted.requests]
    assert ends == ends[:1] * 5
    for no_variables in (None, {}):
        chat(sdk, extra_body={"chat_template_kwargs": no_variables})
        assert prompt_of(server).endswith("assistant\n")


@pytest.mark.parametrize("name", ["tools", "eos_token", "enable_thinkin", "message", "content", "call"])
def test_variables_that_would_change_nothing_are_refused(sdk: OpenAI, server: ScriptedServer, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match="leave it out") as refused:
        chat(sdk, extra_body={"chat_template_kwargs": {name: "x"}})
    assert refused.value.param == f"chat_template_kwargs.{name}"
    assert server.scripted.requests == []


@pytest.mark.parametrize("depth", [400, 600, 900])
def test_arguments_without_end_are_the_callers_fault(sdk: OpenAI, server: ScriptedServer, depth: int) -> None:
    arguments = f'{{"a": {"[" * depth}{"]" * depth}}}'
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}],
    }
    with pytest.raises(openai.BadRequestError):
        chat(sdk, messages=[*USER, called, {"role": "tool", "tool_call_id": "c", "content": "15"}])
    server.scripted.script.says = ("Fifteen.",)
    assert chat(sdk).choices[0].message.content == "Fifteen."


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_json_does_not_have_is_refused_in_arguments_and_anywhere_else(server: ScriptedServer, number: str) -> None:
    called = {"id": "c", "type": "function", "function": {"name": "add", "arguments": f'{{"a": [{number}]}}'}}
    messages = [*USER, {"role": "assistant", "tool_calls": [called]}, {"role": "tool", "tool_call_id": "c", "content": "15"}]
    refused = server.http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
    field = "messages.1.tool_calls.0.function.arguments"
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert refused.json()["error"]["message"] == f"`{field}` is not the text of a JSON object: it holds {number}, which is no JSON number"
    body = f'{{"model": "tiny", "messages": [{{"role": "user", "content": "x"}}], "temperature": {number}}}'
    refused = server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert server.scripted.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_character_in_a_call_ends_no_answer(sdk: OpenAI, server: ScriptedServer, stream: bool) -> None:
    server.scripted.script.says = ('<tool_call>\n{"arguments": {"a": "\\ud800"}, "name": "add"}\n</tool_call>',)
    asked = {"messages": USER, "tools": TOOLS, "model": "tiny"}
    if stream:
        with sdk.chat.completions.stream(**asked) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = chat(sdk).choices[0]
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"a": "\\ud800"}']


def test_the_record_of_an_answer_has_its_calls(sdk: OpenAI, server: ScriptedServer) -> None:
    answer = chat(sdk)
    message = server.span(answer.id)["body"]["choices"][0]["message"]
    assert [call["id"] for call in message["tool_calls"]] == [call.id for call in answer.choices[0].message.tool_calls]
    assert message["content"] == "I add."


def test_the_template_is_told_of_tools_and_of_what_was_called_before(sdk: OpenAI, server: ScriptedServer) -> None:
    first = chat(sdk).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "15"} for call in first.tool_calls]
    chat(sdk, messages=[*USER, first.model_dump(), *results])
    history = [
        *USER,
        {"role": "assistant", "content": "I add.", "tool_calls": [call("add", {"a": 12, "b": 3}), call("now", {})]},
        *({"role": "tool", "content": "15"} for _ in results),
    ]
    tools = [ADD, NOW]
    expected = server.services.models.tokenizer(BASE).render_prompt(history, tools=tools)
    assert asked(server).prompt.numpy().tolist() == expected
    assert '"description": "Adds."' in prompt_of(server)
    assert '{"name": "add", "arguments": {"a": 12, "b": 3}}' in prompt_of(server)


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("options", "calls", "held"),
    [
        ({}, True, None),
        ({"tool_choice": "auto"}, True, None),
        ({"tool_choice": "none"}, False, None),
        ({"tool_choice": "required"}, True, ["add", "now"]),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, True, ["add"]),
        ({"parallel_tool_calls": False}, True, ["add", "now"]),
        ({"tools": [{"type": "function", "function": {**ADD["function"], "strict": True}}]}, True, ["add"]),
    ],
    ids=str,
)
def test_the_choice_says_what_may_be_called(
    sdk: OpenAI, server: ScriptedServer, options: dict[str, Any], calls: bool, held: list[str] | None
) -> None:
    choice = chat(sdk, **options).choices[0]
    assert bool(choice.message.tool_calls) == calls
    assert ("<tool_call>" in prompt_of(server)) == calls
    if not calls:
        assert (choice.message.content, choice.finish_reason) == (TWO_CALLS, "stop")
    grammar = asked(server).grammar
    if held is None:
        assert grammar is None
        return
    assert grammar is not None
    assert [name for name in ("add", "now") if f'\\"name\\": \\"{name}\\"' in grammar.text] == held
    several = options.get("tool_choice") == "required" or "tools" in options
    assert ('("\\n" call)*' in grammar.text) == several
    assert ("TEXT" in grammar.text) == ("tool_choice" not in options)


@pytest.mark.parametrize("parameters", [{}, {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}], ids=str)
def test_arguments_are_an_object_whatever_else_their_schema_allows(sdk: OpenAI, server: ScriptedServer, parameters: dict[str, Any]) -> None:
    chat(sdk, tool_choice="required", tools=[{"type": "function", "function": {"name": "add", "parameters": parameters}}])
    (schema,) = (line.partition("%json ")[2] for line in asked(server).grammar.text.splitlines() if "%json" in line)
    assert {name: value for name, value in json.loads(schema).items() if name != "x-guidance"} == {"type": "object", **parameters}
    assert json.dumps(parameters) in prompt_of(server), "the model is told what the caller said"


def test_an_answer_in_json_and_calls_go_together(sdk: OpenAI, server: ScriptedServer) -> None:
    chat(sdk, response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": [1, 2]}}})
    assert asked(server).grammar.text.startswith("start: answer | calls")


@pytest.mark.parametrize(
    ("options", "field", "problem"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0", ""),
        ({"tools": [{"type": "function", "function": {"name": "white space"}}]}, "tools.0.function.name", ""),
        ({"tools": [ADD, ADD]}, "tools.1.function.name", "name of its own"),
        ({"tools": [{"type": "function", "function": {"name": "f", "colour": "red"}}]}, "tools.0.function.colour", "unknown field"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs `tools`"),
        ({"tool_choice": {"type": "function", "function": {"name": "subtract"}}}, "tool_choice", "subtract"),
        ({"tool_choice": "sometimes"}, "tool_choice", ""),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format", "leave out one"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs.regex", "leave out one"),
        (
            {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]},
            "tools.0.function.parameters",
            "not",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools.0.function.parameters.type",
            "give the type `object`",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]},
            "messages.0.tool_calls.0.function.arguments",
            "JSON object",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_with_tools_is_said(sdk: OpenAI, server: ScriptedServer, options: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(sdk, **options)
    assert refused.value.param.startswith(field)
    assert problem in refused.value.message
    assert server.scripted.requests == []


def test_calls_are_refused_where_the_template_has_no_place_for_them(tmp_path: Path) -> None:
    server = ScriptedServer(tmp_path)
    with server.listening(), server.sdk() as sdk:
        with pytest.raises(openai.BadRequestError, match="teaches no way of calling tools"):
            chat(sdk)
        history = [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
        ]
        with pytest.raises(openai.BadRequestError, match="no place for calls"):
            chat(sdk, tools=[], messages=[*USER, *history])
        assert chat(sdk, tool_choice="none").choices[0].message.content == "It is 36."
