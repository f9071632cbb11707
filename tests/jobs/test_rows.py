"""Rows of data sets as methods take them."""

from pathlib import Path
from typing import Any

import pytest

from bloomery.jobs.rows import Words, examples, pair_questions, pairs, problems, prompt_words, questions
from bloomery.render import ChatTokenizer
from bloomery.types.datasets import ChatRow, CompletionRow, PreferenceRow, PromptRow
from bloomery.types.errors import InvalidInput
from tests.render.builders import chatml_directory
from tests.render.test_rows import CALL, THINKING, TOOL
from tests.render.test_training import FORGETS

ASKS: Any = {"role": "user", "content": "What is 12 times 3?"}
SAYS: Any = {"role": "assistant", "content": "It is 36."}
FROM: Any = {"label_source": "import", "source_span": None}


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer.load(chatml_directory(tmp_path))


def test_a_row_has_at_most_the_tokens_that_there_is_room_for(tokenizer: ChatTokenizer) -> None:
    chat = ChatRow(messages=[ASKS, SAYS], **FROM)
    pair = PreferenceRow(messages=[ASKS], preferred=[SAYS], rejected=[{**SAYS, "content": "No."}], **FROM)
    prompt = PromptRow(messages=[ASKS], **FROM)
    brief: Any = {"role": "user", "content": "3?"}
    short = {
        ChatRow: ChatRow(messages=[brief, SAYS], **FROM),
        PreferenceRow: PreferenceRow(messages=[brief], preferred=[SAYS], rejected=[{**SAYS, "content": "No."}], **FROM),
        PromptRow: PromptRow(messages=[brief], **FROM),
    }
    whole, asked = len(tokenizer.render_training([ASKS, SAYS]).tokens), len(tokenizer.render_prompt([ASKS]))
    for made, row, length in ((examples, chat, whole), (pairs, pair, whole), (problems, prompt, asked)):
        # Held-out rows are scored whole, and a model scores no more tokens than it has a context for.
        assert len(made([row], tokenizer, length, "train")) == 1  # type: ignore[operator]
        with pytest.raises(InvalidInput, match=f"1 rows of `train` cannot be used: row 1: {length} tokens, and {length - 1} are taken"):
            made([short[type(row)], row], tokenizer, length - 1, "train")  # type: ignore[operator]


@pytest.mark.parametrize("template", [None, FORGETS], ids=["whole", "rewritten"])
def test_of_every_row_the_last_answer_is_asked_for_once(tmp_path: Path, template: str | None) -> None:
    tokenizer = ChatTokenizer.load(chatml_directory(tmp_path, *([] if template is None else [template])))
    again: Any = {"role": "user", "content": "Really?"}
    messages = [ASKS, SAYS, again, {"role": "assistant", "content": "Yes, really."}]
    rows = [ChatRow(messages=messages, **FROM), ChatRow(messages=[*messages[:3], {**messages[3], "weight": 0}], **FROM)]
    assert len(examples(rows[:1], tokenizer, 200, "eval")) == (1 if template is None else 2)
    asked = questions(rows, tokenizer)
    assert [each.words for each in asked] == [Words(place, "Really?", "Yes, really.") for place in range(2)]
    assert [each.prompt for each in asked] == [tokenizer.render_prompt(messages[:3])] * 2
    (said,) = questions([CompletionRow(prompt="12 times 3 is", completion=" 36.", **FROM)], tokenizer)
    assert said == (tokenizer.encode("12 times 3 is"), Words(0, "12 times 3 is", " 36."))


def test_an_answer_that_thinks_or_calls_a_tool_is_asked_for_as_the_template_writes_it(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(chatml_directory(tmp_path, THINKING))
    rows = [
        ChatRow(messages=[ASKS, {"role": "assistant", "tool_calls": [CALL]}], tools=[TOOL], **FROM),
        ChatRow(messages=[ASKS, {**SAYS, "reasoning_content": "3 times 12"}], **FROM),
    ]
    calls, thinks = questions(rows, tokenizer)
    assert calls.words.reference == '<tool_call>\n{"name": "add", "arguments": {"b": 1, "a": 2}}\n</tool_call>'
    assert thinks.words.reference == "<think>3 times 12</think>\nIt is 36."
    assert thinks.prompt == tokenizer.render_prompt([ASKS])


def test_a_pair_is_asked_by_what_stands_before_both_answers(tokenizer: ChatTokenizer) -> None:
    texts = {"preferred": " 36.", "rejected": " 35."}
    rows = [
        PreferenceRow(messages=[ASKS], preferred=[SAYS], rejected=[{**SAYS, "content": "No."}], **FROM),
        # Nothing that both have in common, so that nothing asks for it.
        PreferenceRow(prompt="", **texts, **FROM),
        PreferenceRow(prompt="12 times 3 is", **texts, **FROM),
    ]
    spoken, written = pair_questions(rows, pairs(rows, tokenizer, 200, "eval"), tokenizer)
    assert (spoken.prompt, spoken.words) == (tokenizer.render_prompt([ASKS]), Words(0, "What is 12 times 3?", "It is 36.", "No."))
    assert (written.prompt, written.words) == (tokenizer.encode("12 times 3 is"), Words(2, "12 times 3 is", " 36.", " 35."))


def test_a_prompt_is_told_by_its_last_message_and_has_no_answer(tokenizer: ChatTokenizer) -> None:
    rows = [PromptRow(messages=[ASKS], **FROM), PromptRow(messages=[ASKS, SAYS, {"role": "user", "content": "Really?"}], **FROM)]
    assert list(prompt_words(problems(rows, tokenizer, 200, "eval")).items()) == [
        ("eval-1", Words(0, "What is 12 times 3?")),
        ("eval-2", Words(1, "Really?")),
    ]
