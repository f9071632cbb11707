"""Rows of every kind in tokens: which of them carry loss, written out; and prompts are those that are served."""

from pathlib import Path
from typing import Any

import pytest

from bloomery.render import ChatTokenizer, Rendered
from bloomery.render.rows import row_examples, row_pair, row_prompt
from bloomery.types.datasets import ChatRow, CompletionRow, PreferenceRow, PromptRow
from bloomery.types.errors import InvalidInput
from tests.render import builders

IMPORTED: dict[str, Any] = {"label_source": "import", "source_span": None}
# As Qwen 3 has it: tools and calls in JSON, and the reasoning of the last answer alone.
THINKING = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content and loop.last %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ASKS = {"role": "user", "content": "What is 12 times 3?"}
AGAIN = {"role": "user", "content": "Really?"}
SAYS = {"role": "assistant", "content": "It is 36."}
INSISTS = {"role": "assistant", "content": "Yes."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}, "strict": True}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"b": 1, "a": 2}'}}


@pytest.fixture
def plain(tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer.load(builders.chatml_directory(tmp_path / "plain"))


@pytest.fixture
def thinking(tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer.load(builders.chatml_directory(tmp_path / "thinking", THINKING))


def golden(tokenizer: ChatTokenizer, rendered: Rendered) -> str:
    """The text, with what carries loss in brackets and its weight behind it unless that is 1."""
    written, inside = "", 0.0
    for token, weight in zip([*rendered.tokens, None], [*rendered.weights, 0.0], strict=True):
        if weight != inside:
            written += (f"]{inside if inside != 1 else ''}" if inside else "") + ("[" if weight else "")
            inside = weight
        written += "" if token is None else tokenizer.decode([token])
    return written


def chat(*messages: dict[str, Any], **more: Any) -> ChatRow:
    return ChatRow(messages=list(messages), **IMPORTED, **more)


def test_every_answer_of_a_conversation_carries_loss_unless_its_weight_is_0(plain: ChatTokenizer) -> None:
    (whole,) = row_examples(plain, chat(ASKS, SAYS, AGAIN, INSISTS))
    before = "<|im_start|>user\nWhat is 12 times 3?<|im_end|>\n<|im_start|>assistant\n"
    assert golden(plain, whole) == f"{before}[It is 36.<|im_end|>]\n<|im_start|>user\nReally?<|im_end|>\n<|im_start|>assistant\n[Yes.<|im_end|>]\n"
    (last,) = row_examples(plain, chat(ASKS, {**SAYS, "weight": 0}, AGAIN, INSISTS))
    assert last.tokens == whole.tokens
    assert golden(plain, last).startswith(f"{before}It is 36.<|im_end|>\n")
    with pytest.raises(InvalidInput, match="nothing to learn"):
        row_examples(plain, chat(ASKS, {**SAYS, "weight": 0}))


def test_the_weight_of_a_row_multiplies_those_of_its_tokens(plain: ChatTokenizer) -> None:
    (rendered,) = row_examples(plain, chat(ASKS, SAYS, weight=0.25))
    assert golden(plain, rendered).endswith("[It is 36.<|im_end|>]0.25\n")
    assert rendered.trained == sum(weight > 0 for weight in rendered.weights)


def test_tools_and_calls_are_written_as_they_are_when_the_model_is_served(thinking: ChatTokenizer) -> None:
    row = chat(ASKS, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": "3"}, SAYS, tools=[TOOL])
    (rendered,) = row_examples(thinking, row)
    assert golden(thinking, rendered) == (
        '<|im_start|>system\n{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}}}\n'
        "<|im_end|>\n<|im_start|>user\nWhat is 12 times 3?<|im_end|>\n<|im_start|>assistant\n"
        '[<tool_call>\n{"name": "add", "arguments": {"b": 1, "a": 2}}\n</tool_call><|im_end|>]\n'
        "<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n[It is 36.<|im_end|>]\n"
    )


def test_a_template_that_drops_earlier_reasoning_gives_an_example_of_each_answer(thinking: ChatTokenizer) -> None:
    row = chat(ASKS, {**SAYS, "reasoning_content": "12+12+12"}, AGAIN, {**INSISTS, "reasoning_content": "sure"})
    first, second = (golden(thinking, example) for example in row_examples(thinking, row))
    assert first == "<|im_start|>user\nWhat is 12 times 3?<|im_end|>\n<|im_start|>assistant\n[<think>12+12+12</think>\nIt is 36.<|im_end|>]\n"
    assert second.endswith(
        "assistant\nIt is 36.<|im_end|>\n<|im_start|>user\nReally?<|im_end|>\n<|im_start|>assistant\n[<think>sure</think>\nYes.<|im_end|>]\n"
    )


def test_both_sides_of_a_preference_share_the_prompt_and_only_answers_carry_loss(plain: ChatTokenizer) -> None:
    row = PreferenceRow(messages=[ASKS, SAYS, AGAIN], preferred=[INSISTS], rejected=[{"role": "assistant", "content": "No."}], weight=3, **IMPORTED)
    preferred, rejected = row_pair(plain, row)
    asked = plain.render_prompt([ASKS, SAYS, AGAIN])
    assert preferred.tokens[: len(asked)] == rejected.tokens[: len(asked)] == asked
    assert golden(plain, preferred).endswith("assistant\n[Yes.<|im_end|>]\n")
    assert golden(plain, rejected).endswith("assistant\n[No.<|im_end|>]\n")
    assert golden(plain, preferred).count("[") == 1


def test_completions_and_preferences_between_texts_have_no_template(plain: ChatTokenizer) -> None:
    (rendered,) = row_examples(plain, CompletionRow(prompt="The quick", completion=" fox", **IMPORTED))
    assert golden(plain, rendered) == "The quick[ fox<|im_end|>]"
    assert rendered.tokens[: rendered.weights.index(1.0)] == plain.encode("The quick")
    preferred, rejected = row_pair(plain, PreferenceRow(prompt="The quick", preferred=" fox", rejected=" dog", **IMPORTED))
    assert preferred == rendered
    assert golden(plain, rejected) == "The quick[ dog<|im_end|>]"


def test_a_prompt_is_the_one_that_is_served(thinking: ChatTokenizer) -> None:
    row = PromptRow(messages=[ASKS], tools=[TOOL], item={"answer": 36}, **IMPORTED)
    served = {"type": "function", "function": {name: TOOL["function"][name] for name in ("name", "parameters")}}  # type: ignore[index]
    assert row_prompt(thinking, row) == thinking.render_prompt([ASKS], tools=[served])


def test_what_a_context_cuts_off_is_gone_from_the_end(plain: ChatTokenizer) -> None:
    (rendered,) = row_examples(plain, chat(ASKS, SAYS))
    start = rendered.weights.index(1.0)
    assert rendered.cut(start).trained == 0
    assert rendered.cut(start + 1) == Rendered(rendered.tokens[: start + 1], [0.0] * start + [1.0])
