"""Every public form of a row becomes the same row, and what is none is told by reason, field and what would mend it."""

from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.grade.calling import loaded
from bloomery.services.data.row import stored_row
from bloomery.services.data.row_kinds import Broken, kind_of, row_of
from bloomery.types.datasets import ChatRow, CompletionRow, PreferenceRow, PromptRow, RowKind
from bloomery.types.grading import GradeInput, Sample
from tests.services.data.rows_of_files import jsonl, read, rows_of

USER = {"role": "user", "content": "What is the weather in Cologne?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "K\u00f6ln"}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWERED = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
SAYS = {"role": "assistant", "content": "It rains."}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}}}


def made(record: dict[str, Any], kind: RowKind | None = None) -> Any:
    """The row that a client is shown."""
    return row_of(record, kind or kind_of(record)).row.resource()


def problem(record: Any, kind: RowKind | None = None) -> Any:
    """The one problem of a file with this row alone."""
    with ExitStack() as stack:
        (found,) = read(stack, jsonl(record), kind=kind).rejected.first
        return found


def test_a_conversation_with_tools_reasoning_and_weights_is_kept_as_openai_has_it() -> None:
    thinks = {**SAYS, "reasoning_content": "wet", "weight": 1}
    row = made(
        {"messages": [{"role": "developer", "content": "Be brief."}, USER, {**CALLS, "weight": 0}, ANSWERED, thinks], "tools": [TOOL], "weight": 2}
    )
    assert isinstance(row, ChatRow)
    assert [message["role"] for message in row.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert row.messages[2] == {"role": "assistant", "tool_calls": [CALL], "weight": 0}
    assert row.messages[4] == {"role": "assistant", "content": "It rains.", "reasoning_content": "wet"}
    assert (row.tools, row.weight) == ([TOOL], 2.0)
    assert list(row.tools[0]["function"]["parameters"]["properties"]) == ["z", "a"]


def test_parts_of_text_are_one_text_and_arguments_may_be_objects() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "it?"}]}
    calls = {"role": "assistant", "tool_calls": [{"id": "call_1", "function": {"name": "weather", "arguments": {"city": "K\u00f6ln"}}}]}
    row = made({"messages": [parts, calls, ANSWERED, SAYS]})
    assert row.messages[0]["content"] == "What is it?"
    assert row.messages[1]["tool_calls"] == [CALL]


def test_both_public_shapes_of_preferences_are_one_row() -> None:
    worse = {"role": "assistant", "content": "Sun."}
    theirs = made({"input": {"messages": [USER], "tools": [TOOL]}, "preferred_output": [SAYS], "non_preferred_output": [worse]})
    assert isinstance(theirs, PreferenceRow)
    assert (theirs.messages, theirs.preferred, theirs.rejected, theirs.tools) == ([USER], [SAYS], [worse], [TOOL])
    explicit = made({"prompt": [USER], "chosen": [SAYS], "rejected": [worse], "tools": [TOOL]})
    implicit = made({"chosen": [USER, SAYS], "rejected": [USER, worse], "tools": [TOOL]})
    assert theirs == explicit == implicit


def test_preferences_between_texts_stay_texts() -> None:
    row = made({"chosen": "The sky is blue.", "rejected": "The sky is green."})
    assert (row.prompt, row.preferred, row.rejected, row.messages) == ("The sky is", " blue.", " green.", [])
    assert made({"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}) == row


def test_prompts_keep_every_other_field_for_graders() -> None:
    row = made({"messages": [USER], "answer": {"city": "K\u00f6ln"}, "level": 3, "tools": [TOOL]})
    assert isinstance(row, PromptRow)
    assert (row.messages, row.item, row.tools) == ([USER], {"answer": {"city": "K\u00f6ln"}, "level": 3}, [TOOL])
    assert made({"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"}).item == {"answer": "4"}
    assert made({"text": "a", "label": "b"}, "prompt").item == {"text": "a", "label": "b"}


def test_a_prompt_that_is_a_text_is_a_field_too_and_trl_functions_get_texts_then() -> None:
    text, messages = made({"prompt": "2+2?", "answer": "4"}), made({"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"})
    assert isinstance(text, PromptRow)
    assert isinstance(messages, PromptRow)
    assert (text.messages, text.item) == (messages.messages, {"prompt": "2+2?", "answer": "4"})
    source = "def score(prompts, completions, answer):\n    return [float(c == a) for c, a in zip(completions, answer)]"
    for row, score in ((text, 1.0), (messages, 0.0)):
        given = GradeInput(item=row.item, messages=row.messages, sample=Sample(output_text="4"))
        assert loaded(source, "score", "auto").outcomes([given.model_dump()]) == [{"score": score, "reason": None, "metrics": {}}]


def test_completions_are_texts_and_completions_of_messages_are_conversations_without_loss_before() -> None:
    row = made({"prompt": "Once", "completion": " upon a time"})
    assert isinstance(row, CompletionRow)
    assert (row.prompt, row.completion) == ("Once", " upon a time")
    asked = [USER, SAYS, {"role": "user", "content": "And now?"}]
    chat = made({"prompt": asked, "completion": [SAYS]})
    assert isinstance(chat, ChatRow)
    assert [message.get("weight") for message in chat.messages] == [None, 0, None, None]


BROKEN: dict[str, tuple[Any, str | None, str]] = {
    "wrong_role": ({"messages": [USER, {"role": "gpt", "content": "x"}]}, "messages.1.role", "write `assistant` for `gpt`"),
    "unknown_form": ({"conversations": [{"from": "human", "value": "x"}]}, "conversations", "ShareGPT"),
    "no_answer": ({"messages": [USER]}, "messages.0.role", "give the kind `prompt`"),
    "wrong_weight": ({"messages": [USER, {**SAYS, "weight": 0.5}]}, "messages.1.weight", "1 is learned and 0 is not"),
    "nothing_to_learn": ({"messages": [USER, {**SAYS, "weight": 0}]}, "messages", "give one the weight 1"),
    "unknown_call": ({"messages": [USER, CALLS, {**ANSWERED, "tool_call_id": "call_2"}, SAYS]}, "messages.2.tool_call_id", "the same `id`"),
    "wrong_tool": ({"messages": [USER, SAYS], "tools": [{"name": "x"}]}, "tools.0", '"type": "function"'),
    "not_text": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, SAYS]}, "messages.0.content.0", "type `text`"),
    "same_answers": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "rejected", "leave the row out"),
    "unknown_field": ({"messages": [USER, {**SAYS, "thinking": "hm"}]}, "messages.1.thinking", "write `reasoning_content`"),
    "misplaced_field": ({"messages": [{**USER, "weight": 1}, SAYS]}, "messages.0.weight", "leave `weight` out"),
    "mixed_forms": ({"prompt": ["a"], "completion": "b"}, "prompt", ""),
    "two_forms": ({"messages": [USER, SAYS], "text": "x"}, "messages", ""),
    "no_question": ({"messages": [{"role": "system", "content": "x"}, SAYS]}, "messages", ""),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_broken_row_is_told_by_reason_field_and_what_would_mend_it(reason: str) -> None:
    record, field, suggestion = BROKEN[reason]
    found = problem(record)
    assert (found.reason, found.field) == (reason, field)
    assert suggestion in (found.suggestion or "")


def test_alpaca_is_told() -> None:
    assert "Alpaca" in problem({"instruction": "a", "output": "b"}).suggestion


@pytest.mark.parametrize("arguments", ["[1]", '{"a": NaN}', '{"a": 1e999}'])
def test_wrong_arguments_are_told(arguments: str) -> None:
    call = {"id": "1", "function": {"name": "weather", "arguments": arguments}}
    found = problem({"messages": [USER, {"role": "assistant", "tool_calls": [call]}]})
    assert (found.reason, found.field) == ("wrong_arguments", "messages.1.tool_calls.0.function.arguments")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308 * 10])
def test_numbers_that_json_does_not_have_are_refused(value: float) -> None:
    assert problem({"messages": [USER], "answer": value}).reason == "not_finite"


def test_half_pairs_are_found_wherever_they_are() -> None:
    half = '{"messages": [{"role": "user", "content": "q"}], "answer": {"deep": ["\\ud800"]}}'
    with ExitStack() as stack:
        (found,) = read(stack, half).rejected.first
    assert (found.reason, found.field) == ("not_unicode", "answer")


def test_deep_values_are_refused_and_kill_nobody() -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    assert problem({"messages": [USER], "answer": deep}).reason == "too_deep"
    with ExitStack() as stack:
        (found,) = read(stack, '{"a":' * 100_000).rejected.first
    assert found.reason == "not_json"


def test_kinds_are_not_mixed() -> None:
    with ExitStack() as stack:
        reading = read(stack, jsonl({"text": "a", "label": "b"}, {"prompt": "a", "completion": "b"}, {"messages": [USER, SAYS]}))
        assert [(found.row, found.reason) for found in reading.rejected.first] == [(2, "mixed_kinds")]
        assert reading.kind == "chat"
        assert len(reading.spools["train"]) == 2


def test_fields_that_a_row_does_not_have_are_counted() -> None:
    with ExitStack() as stack:
        reading = read(stack, jsonl({"text": "a", "label": "b", "id": 1}, {"text": "c", "label": "b", "id": 2, "note": None}))
        assert reading.ignored == {"id": 2}


values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(item=st.dictionaries(st.text(min_size=1, max_size=3).filter(lambda name: name not in ("tools", "messages")), values, min_size=1, max_size=4))
def test_the_hash_of_a_row_does_not_depend_on_the_order_of_fields(item: dict[str, Any]) -> None:
    there = {"messages": [USER], **item}
    back = dict(reversed(there.items()))
    left, right = row_of(there, "prompt").row, row_of(back, "prompt").row
    assert left.hash == right.hash
    assert left.canonical("train") == right.canonical("train")


@given(lines=st.lists(st.binary(max_size=12) | st.sampled_from([b'{"text": "a", "label": "b"}', b'{"messages": []}', b"[", b"{}"]), max_size=8))
def test_every_line_of_any_file_is_a_row_or_has_a_problem(lines: list[bytes]) -> None:
    content = b"\n".join([b'{"text": "first", "label": "x"}', *lines])
    with ExitStack() as stack:
        reading = read(stack, content)
        assert len(reading.spools["train"]) + reading.rejected.count == reading.rows["train"]
        assert sum(reading.reasons.values()) == reading.rejected.count
        assert reading.rows["train"] == sum(bool(line.strip()) for line in content.split(b"\n"))


FIELDS = (
    "messages",
    "tools",
    "weight",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "input",
    "preferred_output",
    "non_preferred_output",
    "text",
    "label",
)
MESSAGE_FIELDS = ("role", "content", "tool_calls", "weight", "tool_call_id", "name", "reasoning_content", "function", "arguments", "id", "messages")
odd = st.sampled_from([None, True, 0, 1, 10**400, -1.5, "", " ", "user", "assistant", "tool", "{}", "[", "a", "\ud800"])
nested = st.recursive(
    odd, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(MESSAGE_FIELDS), inner, max_size=5), max_leaves=12
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(record=st.dictionaries(st.sampled_from(FIELDS), nested, max_size=5), kind=st.sampled_from(["chat", "preference", "prompt", "completion"]))
def test_whatever_a_record_holds_it_is_a_row_that_can_be_stored_or_broken(record: dict[str, Any], kind: RowKind) -> None:
    for wanted in (kind, None):
        try:
            found = row_of(record, wanted or kind_of(record)).row
        except Broken:
            continue
        assert stored_row(found.line("train").encode()) == found
        assert found.resource().kind == found.kind
        assert found.prompt


def test_rows_of_files_are_those_of_clients() -> None:
    (row,) = rows_of(jsonl({"messages": [USER, SAYS]}))
    assert row.resource() == made({"messages": [USER, SAYS]})
