"""What the tokens that a recorded request keeps say."""

import asyncio
from typing import Any

from bloomery.services.engines.models import Models
from bloomery.services.engines.texts import Texts, texts_of
from bloomery.types.resources import SpanTexts


class Spelling:
    """Spells tokens of bodies in the tokenizer of their model."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def of(self, base_hash: str, body: dict[str, Any] | None) -> SpanTexts | None:
        """None where the body has no tokens, or nothing is there any more that could spell them."""
        tokens: dict[str, Any] | None = body and body.get("tokens")
        if not tokens:
            return None
        texts = await texts_of(self._models, base_hash)
        return await asyncio.to_thread(_spelled, tokens, texts)


def _spelled(tokens: dict[str, Any], texts: Texts) -> SpanTexts | None:
    prompt = texts.of(tokens["prompt"]).pieces
    samples = [texts.of(sample["tokens"]).pieces for sample in tokens["samples"]]
    return None if prompt is None else SpanTexts(prompt=prompt, samples=[pieces or [] for pieces in samples])
