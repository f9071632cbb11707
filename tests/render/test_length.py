"""How few tokens a text can have: a bound, or nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from bloomery.render.length import Lengths
from tests.render import builders

TEXT = st.one_of(
    st.text(max_size=60), st.lists(st.sampled_from(["The", " fox", "e\u0301", "\u212b", " " * 9, "12", *builders.CHATML_SPECIAL])).map("".join)
)
CUT = pre_tokenizers.Split(" ", "isolated")


def changed(*, normalizer: object = None, cutter: object = None, added: AddedToken | None = None) -> Tokenizer:
    tokenizer = Tokenizer.from_str(builders.byte_level().to_str())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if cutter is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cutter, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if added is not None:
        tokenizer.add_tokens([added])
    return tokenizer


CERTAIN = [changed(), changed(normalizer=normalizers.NFC()), changed(cutter=CUT), changed(added=AddedToken("a long word that is added"))]
BOUNDED = [(tokenizer, Lengths(tokenizer)) for tokenizer in CERTAIN]


@given(text=TEXT)
@settings(max_examples=100, deadline=None)
def test_no_text_has_fewer_tokens_than_its_bound(text: str) -> None:
    for tokenizer, lengths in BOUNDED:
        assert lengths.least(text) <= len(tokenizer.encode(text).ids)


@pytest.mark.parametrize("tokenizer", CERTAIN)
def test_a_long_text_has_many_tokens(tokenizer: Tokenizer) -> None:
    assert Lengths(tokenizer).least("x" * 100_000) >= 1000


def test_a_text_that_is_composed_first_has_no_bound() -> None:
    lengths = Lengths(changed(normalizer=normalizers.NFC()))
    assert lengths.least("e\u0301" * 100_000) == 0
    assert lengths.least("\u00e9" * 100_000) > 0


@pytest.mark.parametrize(
    "tokenizer",
    [
        builders.metaspace(),
        changed(normalizer=normalizers.Strip()),
        changed(cutter=pre_tokenizers.Split(" ", "removed")),
        changed(cutter=pre_tokenizers.WhitespaceSplit()),
        changed(added=AddedToken("<mask>", lstrip=True)),
    ],
    ids=["unknown characters are one token", "spaces at the ends go", "spaces go", "spaces go by themselves", "a token takes spaces with it"],
)
def test_where_a_tokenizer_may_drop_text_there_is_no_bound(tokenizer: Tokenizer) -> None:
    assert Lengths(tokenizer).least(" " * 100_000) == 0
