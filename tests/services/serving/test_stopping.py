from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bloomery.render.spelling import BYTE_LEVEL_ALPHABET
from bloomery.services.serving.stopping import StopStrings, TextStream


class Bytes:
    """A real byte-level tokenizer with one token per byte and a few merges, so that tokens hold parts of characters and whole words."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        pairs = [("a", "b"), ("ab", "c"), ("Ċ", "Ċ")]
        vocab = {piece: index for index, piece in enumerate([*alphabet, *(left + right for left, right in pairs)])}
        self._tokenizer = Tokenizer(models.BPE(vocab, pairs))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def id_of(self, piece: str) -> int:
        return self._tokenizer.token_to_id(piece)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


TOKENIZER = Bytes()
PIECES = {byte: piece for piece, byte in BYTE_LEVEL_ALPHABET.items()}


def run(text: str, strings: list[str], min_tokens: int = 0) -> tuple[str, int, str | None]:
    """Text handed out piece by piece, number of tokens consumed, and the match."""
    watch = StopStrings(TOKENIZER, strings, min_tokens=min_tokens)
    pieces, used = [], 0
    for token in TOKENIZER.encode(text):
        used += 1
        stopped = watch.feed(token)
        pieces.append(watch.take())
        if stopped:
            break
    pieces.append(watch.take(final=True))
    return "".join(pieces), used, watch.matched


def test_a_stop_string_over_several_tokens_ends_at_its_last_token() -> None:
    text, used, matched = run("one\n\nUser: two", ["\n\nUser:"])
    assert (text, matched) == ("one", "\n\nUser:")
    assert TOKENIZER.decode(TOKENIZER.encode("one\n\nUser: two")[:used]) == "one\n\nUser:"


def test_a_stop_string_of_several_bytes_per_character_is_found() -> None:
    assert run("so gut 🔥 wie neu", ["🔥"])[::2] == ("so gut ", "🔥")


def test_a_string_that_the_first_tokens_complete_is_text_and_one_that_they_begin_is_not() -> None:
    assert run("x-y-x-y", ["-y"], min_tokens=3)[::2] == ("x-y-x", "-y")
    assert run("x-y-x-y", ["-y"], min_tokens=2) == ("x", 3, "-y")
    assert run("x-y", ["-y"], min_tokens=9)[::2] == ("x-y", None)


def test_the_string_that_begins_first_wins() -> None:
    assert run("xabcx", ["bc", "abc"])[::2] == ("x", "abc")


def test_an_end_that_may_become_a_stop_string_is_held_until_it_cannot() -> None:
    watch = StopStrings(TOKENIZER, ["END"])
    taken = []
    for token in TOKENIZER.encode("an ENd"):
        assert not watch.feed(token)
        taken.append(watch.take())
    assert taken == ["a", "n", " ", "", "", "ENd"]
    assert watch.take(final=True) == ""


def test_broken_bytes_come_out_and_do_not_hold_what_follows() -> None:
    stream = TextStream(TOKENIZER)
    half = TOKENIZER.encode("🔥")[:1]
    text = "".join(stream.feed(token) for token in [*half * 7, *TOKENIZER.encode("ok")]) + stream.finish()
    assert text.endswith("ok")
    assert "\ufffd" in text


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.binary(min_size=1, max_size=3) | st.text(alphabet="ab\u0648é漢🔥", min_size=1, max_size=2).map(str.encode), max_size=12))
def test_broken_bytes_spoil_no_character_behind_them(parts: list[bytes]) -> None:
    tokens = [TOKENIZER.id_of(PIECES[byte]) for byte in b"".join(parts)]
    stream = TextStream(TOKENIZER)
    assert "".join(map(stream.feed, tokens)) + stream.finish() == TOKENIZER.decode(tokens)


@pytest.mark.parametrize("strings", [[], ["zzz"]])
def test_text_without_a_match_comes_out_whole(strings: list[str]) -> None:
    assert run("äöü and ab", strings)[::2] == ("äöü and ab", None)


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="abcé🔥\n ", max_size=30), strings=st.lists(st.text(alphabet="abcé🔥\n", min_size=1, max_size=4), max_size=3))
def test_streaming_finds_what_a_search_over_the_whole_text_finds(text: str, strings: list[str]) -> None:
    found, used, matched = run(text, strings)
    spelled = TOKENIZER.decode(TOKENIZER.encode(text)[:used])
    assert (matched is None) == (not any(string in text for string in strings))
    if matched is None:
        assert found == text
    else:
        assert spelled.startswith(found + matched)
        # No stop string was complete before the token that ended it.
        earlier = TOKENIZER.decode(TOKENIZER.encode(text)[: used - 1])
        assert not any(string in earlier for string in strings)
