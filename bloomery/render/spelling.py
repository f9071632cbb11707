"""The bytes that a token stands for: half a character has bytes, but no text."""

import json
import re
from typing import Any, Final

from tokenizers import Tokenizer

_FALLBACK: Final = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write a printable byte as itself, and the n-th of the others as the character 256 + n."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_LEVEL_ALPHABET: Final = _byte_level_alphabet()
"""The byte that each character stands for."""


class Spelling:
    """Bytes of the tokens of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        self._byte_level = tokenizer.decoder is not None and "ByteLevel" in _kinds(json.loads(tokenizer.decoder.__getstate__()))

    def of(self, token: int) -> bytes:
        """The bytes of a token; none for an id without a token."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            return bytes(BYTE_LEVEL_ALPHABET[character] for character in piece if character in BYTE_LEVEL_ALPHABET)
        if match := _FALLBACK.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode()


def _kinds(decoder: Any) -> set[str]:
    """Names of a decoder and of those it is made of."""
    parts = decoder.get("decoders", [])
    return {decoder["type"]}.union(*map(_kinds, parts))
