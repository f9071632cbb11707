"""How few tokens a text can have, told from its length: what no context holds is refused without encoding it, which takes seconds for megabytes."""

import json
import unicodedata
from typing import Any, Final

from tokenizers import Tokenizer, models

from bloomery.render.spelling import BYTE_LEVEL_ALPHABET

_KEEP_ALL: Final = ("ByteLevel", "Digits", "Split")
"""Pre-tokenizers that only cut a text."""


class Lengths:
    """Of texts in the tokens of one tokenizer; nothing is certain where it may drop or rewrite parts of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        normalizer = None if tokenizer.normalizer is None else _state(tokenizer.normalizer)["type"]
        self._composes = normalizer == "NFC"
        self._longest_bytes = _longest_bytes(tokenizer) if normalizer in (None, "NFC") and _keeps_all(tokenizer) else None

    def least(self, text: str) -> int:
        """No way of writing the text takes fewer; 0 where nothing is certain."""
        if self._longest_bytes is None or (self._composes and not unicodedata.is_normalized("NFC", text)):
            return 0
        # Half of a surrogate pair is no text, and whoever encodes it says so.
        return -(-len(text.encode("utf-8", "replace")) // self._longest_bytes)


def _keeps_all(tokenizer: Tokenizer) -> bool:
    """Whether every byte of a text is part of some token: a byte-level vocabulary with all bytes, and nobody who leaves any out."""
    model, cutter = tokenizer.model, tokenizer.pre_tokenizer
    if not isinstance(model, models.BPE) or cutter is None or not set(BYTE_LEVEL_ALPHABET) <= tokenizer.get_vocab(with_added_tokens=False).keys():
        return False
    cutters = _cutters(_state(cutter))
    spares = all(each["type"] in _KEEP_ALL and each.get("behavior") != "Removed" for each in cutters)
    swallows = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    return spares and not swallows and any(each["type"] == "ByteLevel" for each in cutters)


def _longest_bytes(tokenizer: Tokenizer) -> int:
    """Every character of a byte-level token is a byte of a text; added tokens are written as they are."""
    pieces = tokenizer.get_vocab(with_added_tokens=False)
    added = (len(token.content.encode()) for token in tokenizer.get_added_tokens_decoder().values())
    return max(max(map(len, pieces)), *added, 1)


def _cutters(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for part in state["pretokenizers"] for each in _cutters(part)] if state["type"] == "Sequence" else [state]


def _state(part: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(part.__getstate__())
    return found
