"""What tokens say, one by one."""

import asyncio
import codecs
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from bloomery.render import ChatTokenizer
from bloomery.services.engines.models import Models
from bloomery.types.errors import NotFound


class Spelled(NamedTuple):
    """A text, token by token."""

    text: str | None
    pieces: list[str] | None


class Texts(Protocol):
    """What tokens say to one model."""

    def of(self, tokens: Sequence[int]) -> Spelled:
        """Together the pieces are the text; a character that several tokens make is with the last of them."""
        ...


class TokenizerTexts:
    """What a tokenizer makes of tokens."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def of(self, tokens: Sequence[int]) -> Spelled:
        """See `Texts`."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [decoder.decode(self._of(token)) for token in tokens]
        if pieces:
            pieces[-1] += decoder.decode(b"", final=True)
        return Spelled("".join(pieces), pieces)

    def _of(self, token: int) -> bytes:
        if (known := self._bytes.get(token)) is None:
            known = self._bytes[token] = self._tokenizer.token_bytes(token)
        return known


class NoTexts:
    """Of a model whose tokenizer is not there."""

    def of(self, tokens: Sequence[int]) -> Spelled:
        """See `Texts`."""
        return Spelled(None, None)


async def texts_of(models: Models, base_hash: str) -> Texts:
    """In the tokenizer of a base model, which it may take long to load; nothing where the model is not served any more."""
    with suppress(NotFound):
        return TokenizerTexts(await asyncio.to_thread(models.tokenizer, base_hash))
    return NoTexts()
