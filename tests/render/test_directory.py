from pathlib import Path
from typing import Any

import pytest

from bloomery.render import ChatTokenizer
from bloomery.types.errors import InvalidInput
from tests.render import builders

USER = [{"role": "user", "content": "The fox"}]
END, START, STOP = (builders.byte_level().token_to_id(text) for text in builders.CHATML_SPECIAL)


def load(directory: Path, **files: Any) -> ChatTokenizer:
    return ChatTokenizer.load(builders.write(directory, builders.byte_level(), **files))


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template": "own {{ messages[0].content }}"},
        {"tokenizer_config": {"chat_template": "own {{ messages[0].content }}"}},
        {"tokenizer_config": {"chat_template": [{"name": "x", "template": "x"}, {"name": "default", "template": "own {{ messages[0].content }}"}]}},
        {"chat_template": "own {{ messages[0].content }}", "tokenizer_config": {"chat_template": "old"}},
    ],
    ids=["a file", "in the settings", "several with names", "the file wins"],
)
def test_the_template_is_found_where_either_transformers_writes_it(tmp_path: Path, files: dict[str, Any]) -> None:
    tokenizer = load(tmp_path, **files)
    assert tokenizer.decode(tokenizer.render_prompt(USER)) == "own The fox"


def test_the_template_hash_is_that_of_the_template_alone(tmp_path: Path) -> None:
    in_file = load(tmp_path / "a", chat_template=builders.CHATML)
    in_settings = load(tmp_path / "b", tokenizer_config={"chat_template": builders.CHATML, "eos_token": "<|im_end|>"})
    assert in_file.template_hash == in_settings.template_hash
    assert in_file.template_hash != load(tmp_path / "c", chat_template=builders.CHATML + " ").template_hash


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [STOP, END]}}, (STOP, END)),
        ({"generation_config": {"eos_token_id": END}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, (END, STOP)),
        ({"config": {"eos_token_id": END}}, (END,)),
        ({"config": {"eos_token_id": START}, "generation_config": {"eos_token_id": END}}, (END,)),
        ({"special_tokens_map": {"eos_token": {"content": "<|im_end|>", "lstrip": False}}}, (STOP,)),
        ({"tokenizer_config": {"eos_token": "<|endoftext|>", "chat_template": builders.CHATML}}, (END, STOP)),
        ({}, ()),
    ],
    ids=["several", "both files", "the model's", "generation before model", "old map", "the template's end of turn", "none"],
)
def test_every_end_token_is_known(tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert load(tmp_path, **files).end_tokens == expected


def test_named_tokens_reach_the_template(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, chat_template="{{ eos_token }}{{ bos_token }}", tokenizer_config={"eos_token": {"content": "<|im_end|>"}})
    assert tokenizer.render_prompt(USER) == [STOP]


def test_without_a_template_only_messages_are_refused(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert tokenizer.template_hash is None
    assert tokenizer.vocab_size == builders.byte_level().get_vocab_size()
    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"
    with pytest.raises(InvalidInput, match="no chat template"):
        tokenizer.render_prompt(USER)


def test_tools_are_refused_by_templates_without_a_place_for_them(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(builders.chatml_directory(tmp_path))
    with pytest.raises(InvalidInput, match="no place for tools"):
        tokenizer.render_prompt(USER, tools=[{"name": "add"}])


def test_a_saved_limit_on_length_is_not_applied(tmp_path: Path) -> None:
    tokenizer = builders.byte_level(("<|endoftext|>",))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    builders.write(tmp_path, tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert ChatTokenizer.load(tmp_path).encode("The quick brown fox") == tokenizer.encode("The quick brown fox").ids


@pytest.mark.parametrize(("present", "hint"), [(None, "save the tokenizer"), ("tokenizer.model", "tokenizer.model alone")])
def test_a_missing_tokenizer_is_named(tmp_path: Path, present: str | None, hint: str) -> None:
    if present:
        (tmp_path / present).write_bytes(b"\x00")
    with pytest.raises(InvalidInput, match=r"tokenizer.json is missing") as refused:
        ChatTokenizer.load(tmp_path)
    assert hint in refused.value.message
    assert str(tmp_path) in refused.value.message


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("tokenizer.json", b"{}", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", b"[]", "holds a list"),
        ("tokenizer_config.json", b'{"chat_template": 7}', "is a int, not text"),
        ("chat_template.jinja", b"\xff", "cannot be read"),
        ("chat_template.jinja", b"x" * (2**20 + 1), "over the limit of 1048576"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    builders.chatml_directory(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=match):
        ChatTokenizer.load(tmp_path)
