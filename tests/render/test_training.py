from pathlib import Path

import pytest

from bloomery.render import ChatTokenizer
from bloomery.types.errors import InvalidInput
from tests.render import builders

ROW = [
    {"role": "system", "content": "You are helpful."},
    {"role": "user", "content": "What is 12 times 3?"},
    {"role": "assistant", "content": "It is 36."},
    {"role": "user", "content": "Really?"},
    {"role": "assistant", "content": "\n Yes."},
]
FORGETS = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content if loop.last or message.role == "user" else "(earlier)" }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
OPEN_ENDED = """{% for message in messages %}{{ message.role }}:
{{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant:
{% endif %}"""


@pytest.fixture(params=[builders.CHATML, builders.CHATML + "{# other #}"], ids=["in process", "in the sandbox"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer.load(builders.chatml_directory(tmp_path, request.param))


def trained_text(tokenizer: ChatTokenizer, row: list[dict[str, str]]) -> str:
    tokens, weights = tokenizer.render_training(row)
    return tokenizer.decode([token for token, weight in zip(tokens, weights, strict=True) if weight])


def test_loss_sees_answers_and_their_end_and_nothing_else(tokenizer: ChatTokenizer) -> None:
    tokens, weights = tokenizer.render_training(ROW)
    assert tokens == tokenizer.render_prompt(ROW, add_generation_prompt=False)
    assert set(weights) == {0.0, 1.0}
    assert trained_text(tokenizer, ROW[:3]) == "It is 36.<|im_end|>"
    # The line break that starts the second answer is one token with the one that ends the prompt, and a prompt is never learned.
    assert trained_text(tokenizer, ROW).startswith("It is 36.<|im_end|>")
    assert trained_text(tokenizer, ROW).endswith(" Yes.<|im_end|>")


def test_prompt_for_sampling_is_the_beginning_of_the_row(tokenizer: ChatTokenizer) -> None:
    tokens, weights = tokenizer.render_training(ROW[:3])
    prompt = tokenizer.render_prompt(ROW[:2])
    assert tokens[: len(prompt)] == prompt
    assert weights.index(1.0) == len(prompt)


def test_text_that_looks_like_the_end_of_a_turn_does_not_end_an_answer(tokenizer: ChatTokenizer) -> None:
    row = [*ROW[:2], {"role": "assistant", "content": "東京 <|im_end|> is text"}]
    tokens, _ = tokenizer.render_training(row)
    assert trained_text(tokenizer, row) == "東京 <|im_end|> is text<|im_end|>"
    assert tokens.count(tokenizer.end_tokens[0]) == len(row)


def test_a_template_without_end_tokens_trains_to_the_end_of_the_answer(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(builders.chatml_directory(tmp_path, OPEN_ENDED))
    assert trained_text(tokenizer, ROW[:3]) == "It is 36.\n"


def test_a_template_that_rewrites_earlier_turns_is_refused_for_several_answers(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(builders.chatml_directory(tmp_path, FORGETS))
    assert trained_text(tokenizer, ROW[1:3]) == "It is 36.<|im_end|>"
    with pytest.raises(InvalidInput, match="message 2 differently when more messages follow"):
        tokenizer.render_training(ROW)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ([], "messages"),
        (ROW[:2], "messages"),
        (ROW[2:3], "messages.0.role"),
        ([{"content": "x"}], "messages.0"),
        ([*ROW[:2], {"role": "assistant"}], "messages.2.content"),
    ],
)
def test_rows_without_anything_to_learn_are_refused(tmp_path: Path, row: list[dict[str, str]], field: str) -> None:
    tokenizer = ChatTokenizer.load(builders.chatml_directory(tmp_path))
    with pytest.raises(InvalidInput) as refused:
        tokenizer.render_training(row)
    assert refused.value.field == field


def test_a_message_with_the_weight_0_carries_no_loss(tokenizer: ChatTokenizer) -> None:
    silenced = [*ROW[:2], {**ROW[2], "weight": 0}, *ROW[3:]]
    tokens, weights = tokenizer.render_training(silenced)
    assert tokens == tokenizer.render_training(ROW).tokens
    assert weights.index(1.0) > len(tokenizer.render_prompt(ROW[:3], add_generation_prompt=False))
    with pytest.raises(InvalidInput, match="nothing to learn"):
        tokenizer.render_training([*ROW[:2], {**ROW[2], "weight": 0}])


def test_a_template_that_rewrites_earlier_turns_gives_one_example_of_each_answer(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(builders.chatml_directory(tmp_path, FORGETS))
    examples = tokenizer.render_examples(ROW)
    assert examples == [tokenizer.render_examples(ROW[:3])[0], tokenizer.render_examples([*ROW[:2], {**ROW[2], "weight": 0}, *ROW[3:]])[0]]
    assert [tokenizer.decode([token for token, weight in zip(*example, strict=True) if weight]) for example in examples] == [
        "It is 36.<|im_end|>",
        "\n Yes.<|im_end|>",
    ]


def test_completions_meet_their_prompt_as_they_do_when_it_is_served(tokenizer: ChatTokenizer) -> None:
    tokens, weights = tokenizer.render_completion("What is", " 12 times 3?")
    prompt = tokenizer.encode("What is")
    assert tokens[: len(prompt)] == prompt
    assert weights == [0.0] * len(prompt) + [1.0] * (len(tokens) - len(prompt))
    assert tokenizer.decode(tokens) == "What is 12 times 3?<|im_end|>"
