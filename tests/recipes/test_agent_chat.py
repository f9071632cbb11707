"""The contract's words: what is taken, what is refused by name, and calls of tools in the dialect of a model."""

from typing import Any

import pytest

from bloomery.recipes.agent_chat import Asked, going_on, plain, read_request, write_message, written_answer
from bloomery.render import ChatTokenizer
from bloomery.types.errors import InvalidInput
from tests.openai.tool_model import SUM, TWO_CALLS

SAID = [{"role": "user", "content": "Add."}]
TOOL = {"type": "function", "function": {"name": "add", "description": None, "parameters": SUM}}

A_LIST = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[]"}}]}


def read(**fields: Any) -> Asked:
    return read_request({"model": "policy", "messages": SAID, **fields}, "policy", 32)


def test_an_answer_is_as_long_as_asked_and_never_longer_than_the_loop_has_it() -> None:
    assert read() == Asked(SAID, [], 32, stream=False)
    assert [read(max_tokens=limit).max_tokens for limit in (8, 64)] == [8, 32]
    assert read(max_completion_tokens=4, max_tokens=None, stream=True) == Asked(SAID, [], 4, stream=True)


def test_what_changes_nothing_is_taken() -> None:
    fields = {"temperature": 1, "top_p": 1.0, "n": 1, "user": "me", "metadata": {"a": "b"}, "stop": None, "seed": None, "tool_choice": "auto"}
    assert read(**fields) == read()
    assert read(tools=[TOOL], tool_choice="none").tools == []
    assert read(tools=[TOOL]).tools == [{"type": "function", "function": {"name": "add", "parameters": SUM}}]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"top_p": 0.9},
        {"n": 2},
        {"stop": ["."]},
        {"seed": 1},
        {"logit_bias": {"1": 1}},
        {"response_format": {"type": "json_object"}},
        {"model": "other"},
        {"messages": []},
        {"max_completion_tokens": 0},
        {"tool_choice": "required"},
        {"tools": 5},
        {"anything": 1},
        {"stream": "no"},
        {"max_completion_tokens": True},
    ],
)
def test_what_would_draw_from_another_distribution_or_is_unknown_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        read(**fields)
    assert refused.value.field == next(iter(fields))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("hello", "messages.0.role"),
        ({"role": "robot", "content": ""}, "messages.0.role"),
        ({"role": ["user"], "content": ""}, "messages.0.role"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages.0.content"),
        ({"role": "user", "content": 3}, "messages.0.content"),
        ({"role": "user", "content": "x", "name": 3}, "messages.0.name"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages.0.tool_calls.0"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[]"}}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
def test_a_message_that_is_none_is_refused_with_its_place(message: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read(messages=[message])
    assert refused.value.field == field


def test_parts_are_one_text_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "Ad"}, {"type": "text", "text": "d."}]
    assert plain(0, {"role": "developer", "content": parts, "refusal": None}) == {"role": "system", "content": "Add."}


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_name_goes_to_the_template_as_it_does_when_the_model_is_served(role: str) -> None:
    message = {"role": role, "content": "x", "name": "Ann", "tool_call_id": "a"}
    assert plain(0, message) == {name: message[name] for name in message if name != "tool_call_id" or role == "tool"}


def test_calls_are_read_in_the_dialect_of_the_model_and_come_back_as_the_same_message(
    tool_tokenizer: ChatTokenizer,
) -> None:
    asked = read(tools=[TOOL, {"type": "function", "function": {"name": "now"}}])
    tokens = [*tool_tokenizer.encode(TWO_CALLS), tool_tokenizer.end_tokens[0]]
    message, reason = write_message(tool_tokenizer, asked, "chatcmpl-0123456789abcdef", tokens, stopped=True)
    assert (reason, message["content"]) == ("tool_calls", "I add.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 12, "b": 3}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert plain(1, message)["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 12, "b": 3}}
    prompt = tool_tokenizer.render_prompt([*asked.messages, plain(1, message)], tools=asked.tools)
    assert "<tool_call>" in tool_tokenizer.decode(prompt)


def test_an_answer_that_was_cut_off_says_so(tool_tokenizer: ChatTokenizer) -> None:
    message, reason = write_message(tool_tokenizer, read(), "chatcmpl-0", tool_tokenizer.encode("I ad"), stopped=False)
    assert (message["content"], reason) == ("I ad", "length")


END, OTHER_END, NEWLINE = 2, 3, 4
ENDS = (END, OTHER_END)


@pytest.mark.parametrize(
    ("told", "answer"),
    [
        ((1, 10, 11, END, NEWLINE), (10, 11, END)),
        ((1, END, NEWLINE), (END,)),
        pytest.param((1, 10, 11, NEWLINE), (), id="no end"),
        pytest.param((9, 10, END, NEWLINE), (), id="what came before is written anew"),
    ],
)
def test_what_a_template_writes_of_an_answer_is_what_it_puts_behind_its_prompt_up_to_an_end(told: tuple[int, ...], answer: tuple[int, ...]) -> None:
    assert written_answer((1,), told, ENDS) == answer


def test_an_answer_goes_on_as_it_was_sampled_whatever_the_template_would_have_made_of_it() -> None:
    behind = (END, NEWLINE, 50)
    assert going_on((1, 20, 21, END), behind, ENDS) == (1, 20, 21, END, NEWLINE, 50)
    # Cut off: the template ends it.
    assert going_on((1, 20, 21), behind, ENDS) == (1, 20, 21, END, NEWLINE, 50)
    assert going_on((1, 20, 21, OTHER_END), behind, ENDS) is None
