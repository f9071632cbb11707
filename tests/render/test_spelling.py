import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bloomery.render.spelling import Spelling
from tests.render import builders


@given(text=st.text(max_size=30))
@settings(max_examples=150, deadline=None)
def test_bytes_of_byte_level_tokens_are_the_bytes_of_the_text(text: str) -> None:
    tokenizer = builders.byte_level()
    assert b"".join(map(Spelling(tokenizer).of, tokenizer.encode(text).ids)) == text.encode()


@given(text=st.text(max_size=30).filter(lambda text: text != "" and "\u2581" not in text))
@settings(max_examples=150, deadline=None)
def test_bytes_of_fallback_tokens_are_the_bytes_of_the_text_behind_its_first_space(text: str) -> None:
    tokenizer = builders.metaspace()
    spelled = b"".join(map(Spelling(tokenizer).of, tokenizer.encode(text).ids)).decode()
    assert spelled.removeprefix(" ") == text.removeprefix(" ")


@pytest.mark.parametrize(("tokenizer", "text"), [(builders.byte_level(), "<|im_end|>"), (builders.metaspace(), "</s>")])
def test_a_special_token_is_spelled_as_it_is_written(tokenizer: Tokenizer, text: str) -> None:
    assert Spelling(tokenizer).of(tokenizer.token_to_id(text)) == text.encode()


def test_an_id_without_a_token_has_no_bytes() -> None:
    assert Spelling(builders.byte_level()).of(10**6) == b""
