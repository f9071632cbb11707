"""`/v1/responses` by the unmodified `openai` SDK: whole, streamed, with functions and schemas, and what is refused."""

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.live import wait_until
from tests.openai.server import CONTEXT, PROCESSED_LOGPROB, ScriptedServer, logprob_at
from tests.services.fake_engine import BASE

FUNCTION = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
OUTSIDE = [
    ({"previous_response_id": "resp-1"}, "previous_response_id", "send the whole conversation as `input`"),
    ({"conversation": "conv-1"}, "conversation", "send the whole conversation as `input`"),
    ({"background": True}, "background", "read it as a stream"),
    ({"prompt": {"id": "p"}}, "prompt", "`instructions`"),
    ({"reasoning": {"effort": "high"}}, "reasoning", "leave it out"),
    ({"truncation": "auto"}, "truncation", "leave it out"),
    ({"background": 0}, "background", "read it as a stream"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "is not offered"),
    ({"text": {"mood": "good"}}, "text.mood", "unknown field"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]}, "input.0.arguments", "not the text of a JSON object"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": NaN}'}]}, "input.0.arguments", "NaN, which is no JSON"),
    ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools.1.name", "a name of its own"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "`web_search` are not offered"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools.0.type", "run them yourself"),
    ({"tools": [{"type": ["function"], "name": "f"}]}, "tools.0.type", "expected `str`"),
    ({"tools": [{"name": "f"}]}, "tools.0.type", "it is `function`"),
    ({"tool_choice": {"name": "f"}}, "tool_choice.type", "it is `function`"),
    ({"input": [{"type": {"a": 1}}]}, "input.0.type", "expected `str`"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "name a function"),
    ({"include": ["reasoning.encrypted_content"]}, "include", "message.output_text.logprobs"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "`item_reference` are not offered"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0.type", "text alone"),
    ({"input": []}, "input", "length >= 1"),
    ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
    ({"temperature": 3}, "temperature", "<= 2"),
    ({"top_logprobs": 21}, "top_logprobs", "<= 20"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "needs `stream`"),
    ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode", "needs `top_logprobs`"),
    ({"logprobs_mode": "raw_logits", "top_logprobs": 0}, "logprobs_mode", "invalid enum value"),
    ({"no_such": 1}, "no_such", "unknown field"),
    ({"max_output_tokens": CONTEXT}, "max_output_tokens", "ask for at most"),
    ({"input": "x" * 2 * CONTEXT}, "input", "leaves no room"),
]


def respond(sdk: OpenAI, **options: Any) -> Any:
    return sdk.responses.create(**{"model": "tiny", "input": "What is 12 times 3?"} | options)


def test_a_response_is_a_chat_completion_in_other_words(sdk: OpenAI, server: ScriptedServer) -> None:
    raw = sdk.responses.with_raw_response.create(
        model="tiny", input="What is 12 times 3?", instructions="Be brief.", metadata={"episode": "e"}, user="u", temperature=0.5, top_p=0.9
    )
    answer = raw.parse()
    assert answer.id.startswith("resp-")
    assert (answer.object, answer.status, answer.output_text) == ("response", "completed", "It is 36.")
    assert (answer.model, answer.instructions, answer.metadata, answer.temperature, answer.top_p) == ("tiny", "Be brief.", {"episode": "e"}, 0.5, 0.9)
    assert [(item.type, item.status, item.content[0].type) for item in answer.output] == [("message", "completed", "output_text")]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 times 3?"}]
    asked = server.scripted.requests[0]
    assert asked.prompt.numpy().tolist() == server.services.models.tokenizer(BASE).render_prompt(messages)
    assert (asked.params.temperature, asked.params.top_p) == (0.5, 0.9)
    assert answer.usage.input_tokens == asked.prompt.shape[0]
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert raw.headers["x-bloomery-version"] == BASE
    span = server.span(answer.id)
    assert span["episode_id"] == "e" if "episode_id" in span else span["span"]["episode_id"] == "e"


def test_an_answer_may_be_sent_back_as_a_part_of_the_next_question(sdk: OpenAI, server: ScriptedServer) -> None:
    first = respond(sdk, input=[{"role": "user", "content": [{"type": "input_text", "text": "What is 12 times 3?"}]}])
    again = [{"role": "user", "content": "What is 12 times 3?"}, *first.output, {"role": "user", "content": "And times 4?"}]
    assert respond(sdk, input=again).status == "completed"
    messages = [
        {"role": "user", "content": "What is 12 times 3?"},
        {"role": "assistant", "content": "It is 36."},
        {"role": "user", "content": "And times 4?"},
    ]
    assert server.scripted.requests[1].prompt.numpy().tolist() == server.services.models.tokenizer(BASE).render_prompt(messages)


def test_a_stream_has_the_events_in_their_order_and_ends_with_the_whole(sdk: OpenAI) -> None:
    events = list(respond(sdk, stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert deltas > 3
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "It is 36."
    done = events[-1].response
    assert (done.id, done.status, done.output_text) == (events[0].response.id, "completed", "It is 36.")
    assert events[-2].item == done.output[0]
    assert done.usage.output_tokens == respond(sdk).usage.output_tokens


def test_the_streaming_helper_of_the_sdk_builds_the_same_response(sdk: OpenAI) -> None:
    with sdk.responses.stream(model="tiny", input="What is 12 times 3?") as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == "It is 36."


def test_every_event_is_named_in_the_stream(server: ScriptedServer) -> None:
    answer = server.http.post("/v1/responses", json={"model": "tiny", "input": "x", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    for block in answer.text.strip().split("\n\n"):
        named, data = block.split("\n")
        assert named == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_an_answer_that_was_cut_off_is_incomplete(sdk: OpenAI) -> None:
    answer = respond(sdk, max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason, answer.output[0].status) == ("incomplete", "max_output_tokens", "incomplete")
    last = list(respond(sdk, max_output_tokens=3, stream=True))[-1]
    assert (last.type, last.response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")
    assert last.response.output_text == answer.output_text


def test_an_empty_answer_is_an_empty_message(sdk: OpenAI, server: ScriptedServer) -> None:
    server.scripted.script.says = ("",)
    assert [item.content[0].text for item in respond(sdk).output] == [""]
    last = list(respond(sdk, stream=True))[-1]
    assert (last.type, [item.content[0].text for item in last.response.output]) == ("response.completed", [""])


@pytest.mark.parametrize(("mode", "first"), [(None, logprob_at(0)), ("raw_logprobs", logprob_at(0)), ("processed_logprobs", PROCESSED_LOGPROB)])
def test_logprobs_come_with_the_text_and_say_whose_they_are(sdk: OpenAI, mode: str | None, first: float) -> None:
    extra = {"logprobs_mode": mode} if mode else {}
    answer = respond(sdk, top_logprobs=2, include=["message.output_text.logprobs"], extra_body=extra)
    part = answer.output[0].content[0]
    assert (answer.logprobs_mode, part.logprobs[0].logprob) == (mode or "raw_logprobs", first)
    assert "".join(token.token for token in part.logprobs) == part.text
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)
    *events, last = respond(sdk, top_logprobs=2, stream=True, extra_body=extra)
    streamed = [token for event in events if event.type == "response.output_text.delta" for token in event.logprobs]
    assert [(token.token, token.logprob) for token in streamed] == [(token.token, token.logprob) for token in part.logprobs]
    assert last.response.logprobs_mode == answer.logprobs_mode
    assert respond(sdk).logprobs_mode is None


@pytest.mark.parametrize(("change", "field", "problem"), OUTSIDE, ids=[field for _, field, _ in OUTSIDE])
def test_what_is_not_offered_is_refused_by_the_name_that_it_was_asked_by(
    server: ScriptedServer, change: dict[str, Any], field: str, problem: str
) -> None:
    answer = server.http.post("/v1/responses", json={"model": "tiny", "input": "x"} | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", field)
    assert problem in error["message"]
    assert field.split(".")[0] in error["message"]
    assert server.scripted.requests == []


def test_an_unknown_model_is_not_found(sdk: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        respond(sdk, model="gpt-7")
    assert unknown.value.code == "model_not_found"


def test_a_name_of_the_callers_that_resembles_a_field_is_told_as_it_is(sdk: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="`messages-large`"):
        respond(sdk, model="messages-large")


def test_values_that_ask_for_nothing_may_be_sent(sdk: OpenAI) -> None:
    nothing = {"background": False, "truncation": "disabled", "service_tier": "auto", "tools": [], "include": [], "parallel_tool_calls": True}
    assert respond(sdk, previous_response_id=None, text={"format": {"type": "text"}}, **nothing).status == "completed"


def test_a_stream_that_breaks_off_says_so_in_its_last_event(sdk: OpenAI, server: ScriptedServer) -> None:
    server.scripted.script.fail_after = 3
    events = list(respond(sdk, stream=True))
    assert (events[-1].type, events[-1].response.status, events[-1].response.error.code) == ("response.failed", "failed", "server_error")
    assert "the weights melted" in events[-1].response.error.message
    with pytest.raises(openai.InternalServerError):
        respond(sdk)


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_told_by_the_callers_name_of_it(server: ScriptedServer, stream: bool) -> None:
    server.scripted.script.refuses = "response_format.json_schema"
    answer = server.http.post("/v1/responses", json={"model": "tiny", "input": "x", "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["message"]) == (400, "text.format", "`text.format` is too much")


def test_a_client_that_hangs_up_stops_the_work(sdk: OpenAI, server: ScriptedServer) -> None:
    server.scripted.script.stall_after = 2
    with respond(sdk, stream=True) as stream:
        next(iter(stream))
    wait_until(lambda: len(server.scripted.aborted) == 1)
    with server.asking("/v1/responses", {"model": "tiny", "input": "x"}):
        assert len(server.scripted.aborted) == 1
    wait_until(lambda: len(server.scripted.aborted) == 2)
