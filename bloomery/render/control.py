"""Control tokens come from the template alone: the same characters inside a message are ordinary text.

Without this, a user who writes the end of a turn and the start of a system message would be obeyed as the system. Occurrences in messages are
masked before the template runs, and put back as plain text when what it wrote is encoded. Messages without any are encoded in one piece, exactly as
`transformers` does.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer

_OPEN: Final = "\ufdd0"
_CLOSE: Final = "\ufdd1"
"""Noncharacters of Unicode, which no text that is exchanged contains."""
_MASKED: Final = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


class Encoded(NamedTuple):
    """Tokens, and where each begins in the unmasked text."""

    tokens: list[int]
    starts: list[int]


class ControlTokens:
    """The special tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._ids: Mapping[str, int] = special
        # Of two that begin alike the longer one is meant; without any, nothing matches.
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest_first) or r"(?!)")

    def mask(self, value: Any) -> Any:
        """The same JSON value with every control token in its strings replaced by a mark."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: f"{_OPEN}{self._ids[match[0]]}{_CLOSE}", value)
        if isinstance(value, Mapping):
            return {key: self.mask(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mask(item) for item in value]
        return value

    def unmask(self, text: str) -> str:
        """The text as its authors wrote it."""
        return _MASKED.sub(self._spell, text)

    def encode(self, text: str) -> Encoded:
        """The tokens of a rendered conversation."""
        if _MASKED.search(text) is None:
            # Of a batch, because the interpreter's lock is let go of meanwhile.
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
            return Encoded(encoding.ids, [start for start, _ in encoding.offsets])
        pairs = list(self._encode_pieces(text))
        return Encoded([token for token, _ in pairs], [start for _, start in pairs])

    def tokens(self, text: str) -> list[int]:
        """The same without where they begin, which takes half as long."""
        if _MASKED.search(text) is not None:
            return self.encode(text).tokens
        tokens: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return tokens

    def _encode_pieces(self, text: str) -> Iterator[tuple[int, int]]:
        parts = re.split(f"({self._pattern.pattern})", text)
        pieces, start = [self.unmask(piece) for piece in parts[::2]], 0
        for piece, encoding, control in zip(pieces, self._plain.encode_batch(pieces, add_special_tokens=False), [*parts[1::2], ""], strict=True):
            yield from ((token, start + offset) for token, (offset, _) in zip(encoding.ids, encoding.offsets, strict=True))
            start += len(piece)
            if control:
                yield self._ids[control], start
            start += len(control)

    @cached_property
    def _plain(self) -> Tokenizer:
        # A copy, because the switch would change what other threads encode meanwhile.
        plain = Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    def _spell(self, match: re.Match[str]) -> str:
        text = self._tokenizer.id_to_token(int(match[1]))
        return match[0] if text is None else text
