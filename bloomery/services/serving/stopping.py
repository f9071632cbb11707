"""Stop strings: found in the text of a continuation while its tokens arrive one by one.

`TextStream` turns tokens into text without cutting characters; `StopStrings` watches that text. A stop string may span tokens, and a
character may too.
"""

from collections.abc import Sequence
from typing import Final, Protocol

_REPLACEMENT: Final = "\ufffd"
_MOST_MISSING: Final = 3
"""Bytes that a character of UTF-8 has before its last one, so that many tokens: what stands before these in an unreadable run is broken."""


class Decodes(Protocol):
    """What is needed of a tokenizer: text of token ids, special tokens included."""

    def decode(self, tokens: Sequence[int]) -> str: ...


class TextStream:
    """Text of a growing continuation; a token inside a character adds nothing until the character is complete."""

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        # The tokens of the previous piece are decoded again with the next ones: some tokenizers spell a token by what stands before it.
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        """The text that this token completes."""
        self._pending.append(token)
        text = self._new_text()
        return self._take_broken(text) if text.endswith(_REPLACEMENT) else self._settle(text)

    def finish(self) -> str:
        """What is left when no token comes any more."""
        return self._settle(self._new_text())

    def _new_text(self) -> str:
        return self._text_of(self._pending)

    def _text_of(self, tokens: list[int]) -> str:
        """Behind what came before."""
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + tokens)[len(before) :]

    def _take_broken(self, text: str) -> str:
        """Of text whose end is unreadable what stays as it is whatever comes, up to a border that cuts no character."""
        for held in range(_MOST_MISSING, len(self._pending)):
            certain, rest = self._pending[:-held], self._pending[-held:]
            said = self._text_of(certain)
            if said and text.startswith(said):
                self._context, self._pending = certain, rest
                return said
        return ""

    def _settle(self, text: str) -> str:
        if text:
            self._context, self._pending = self._pending, []
        return text


class StopStrings:
    """Watches one continuation for the first of several non-empty strings, and hands out the text before it.

    A string that the first `min_tokens` tokens complete is text like any other.
    """

    def __init__(self, tokenizer: Decodes, strings: Sequence[str], *, min_tokens: int = 0) -> None:
        self._stream = TextStream(tokenizer)
        self._strings = tuple(strings)
        self._deaf = min_tokens
        """Tokens to come that complete no stop string."""
        self._text = ""
        self._taken = 0
        self.matched: str | None = None
        """The stop string that ended the continuation."""

    def feed(self, token: int) -> bool:
        """Whether this token completes a stop string; nothing is fed after that."""
        self._append(self._stream.feed(token))
        self._deaf = max(0, self._deaf - 1)
        return self.matched is not None

    def take(self, *, final: bool = False) -> str:
        """Text not taken before, without the stop string and without an end that may become one; `final` when no token comes any more."""
        if final and self.matched is None:
            self._append(self._stream.finish())
        settled = len(self._text) if final or self.matched is not None else len(self._text) - self._held_back()
        piece = self._text[self._taken : settled]
        self._taken = max(self._taken, settled)
        return piece

    def _append(self, text: str) -> None:
        seen = len(self._text)
        self._text += text
        if self._deaf:
            return
        # The match that begins first wins, as it would in a search over the whole text.
        found = [(at, string) for string in self._strings if (at := self._text.find(string, max(0, seen - len(string) + 1))) >= 0]
        if found:
            at, self.matched = min(found)
            self._text = self._text[:at]

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max(map(len, self._strings), default=1) - 1
        ends = range(min(longest, len(self._text)), 0, -1)
        return next((size for size in ends if any(string.startswith(self._text[-size:]) for string in self._strings)), 0)
