"""Rows in the tokens of a base model: how they are rendered, how long they are, and what epochs over them take.

Everything goes through `render.rows`, as training does. Tokens are made on threads, few at a time.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np

from bloomery.render import ChatTokenizer, Rendered
from bloomery.render.rows import row_examples, row_pair, row_prompt
from bloomery.services.access.principal import Principal
from bloomery.services.data.datasets import Datasets
from bloomery.services.data.reading import Labels
from bloomery.services.data.stored_rows import Blob
from bloomery.services.engines.models import Models
from bloomery.types.datasets import AnyRow, PreferenceRow, PromptRow, RenderedRow, RenderedTokens, TokenStatistics
from bloomery.types.errors import InvalidInput
from bloomery.types.histograms import Histogram
from bloomery.types.resources import Page, Split

MEASURED: Final = 2_000
"""Rows whose tokens are counted unless more are asked for; the lengths of so many say those of the others within a few percent."""
_THREADS: Final = 2
_REMEMBERED: Final = 256
PERCENTILES: Final = (50, 90, 95, 99)

T = TypeVar("T")


class _Length(NamedTuple):
    """Of one row: all tokens that go through the model, the longest sequence, and what carries loss within a context."""

    tokens: int
    longest: int
    trained: int
    truncated: bool
    learns: bool


class RowTokens:
    """Previews and measures what `datasets` holds, for the base models of this server."""

    def __init__(self, datasets: Datasets, models: Models) -> None:
        self._datasets, self._models = datasets, models
        self._turns = asyncio.Semaphore(_THREADS)
        self._measured: OrderedDict[tuple[object, ...], TokenStatistics] = OrderedDict()

    async def preview(
        self, p: Principal, name: str, version: str, *, model: str, split: Split, limit: int, offset: int, context: int | None
    ) -> Page[RenderedRow]:
        """Rows of a split as the model is trained on them, cut at a context."""
        p.require("read", "train")
        blob = (await self._datasets.stored(p, name, version)).blob
        tokenizer, context = self._tokenizer(model), self._context(model, context)

        def render() -> list[RenderedRow]:
            rows = blob.page(split, limit=limit, offset=offset)
            return [_rendered(tokenizer, row.resource(), offset + place, context) for place, row in enumerate(rows)]

        data = await self._on_thread(render)
        return Page(data=data, offset=offset, has_more=offset + limit < blob.stored.count(split))

    async def statistics(
        self, p: Principal, name: str, version: str, *, model: str, split: Split, context: int | None = None, measure: int = MEASURED
    ) -> TokenStatistics:
        """How long the rows of a split are; of more than `measure` that many, evenly spread, stand for all."""
        p.require("read", "train")
        blob = (await self._datasets.stored(p, name, version)).blob
        tokenizer, context = self._tokenizer(model), self._context(model, context)
        key = (blob.key, self._models.resolve(model).base_hash, split, context, measure)
        if (known := self._measured.get(key)) is None:
            known = await self._on_thread(lambda: _measure(tokenizer, blob, model, split, context, measure))
            # The key says the content, so what is remembered cannot be out of date.
            self._measured[key] = known
            while len(self._measured) > _REMEMBERED:
                self._measured.popitem(last=False)
        return known.model_copy(update={"model": model})

    def _tokenizer(self, model: str) -> ChatTokenizer:
        return self._models.tokenizer(self._models.resolve(model).base_hash)

    def _context(self, model: str, wanted: int | None) -> int:
        most = self._models.resolve(model).context
        if wanted is not None and wanted > most:
            raise InvalidInput(f"`context` is {wanted}, and `{model}` reads at most {most} tokens", field="context")
        return wanted or most

    async def _on_thread(self, work: Callable[[], T]) -> T:
        async with self._turns:
            return await asyncio.to_thread(work)


def _rendered(tokenizer: ChatTokenizer, row: AnyRow, place: int, context: int) -> RenderedRow:
    try:
        sequences = _sequences(tokenizer, row)
    except InvalidInput as refused:
        return RenderedRow(row=place, problem=refused.message)
    truncated = any(len(rendered.tokens) > context for rendered in sequences)
    shown = [_shown(tokenizer, rendered.cut(context)) for rendered in sequences]
    if isinstance(row, PreferenceRow):
        return RenderedRow(row=place, preferred=shown[0], rejected=shown[1], truncated=truncated)
    return RenderedRow(row=place, examples=shown, truncated=truncated)


def _sequences(tokenizer: ChatTokenizer, row: AnyRow) -> Sequence[Rendered]:
    if isinstance(row, PreferenceRow):
        return row_pair(tokenizer, row)
    if isinstance(row, PromptRow):
        tokens = row_prompt(tokenizer, row)
        return [Rendered(tokens, [0.0] * len(tokens))]
    return row_examples(tokenizer, row)


def _shown(tokenizer: ChatTokenizer, rendered: Rendered) -> RenderedTokens:
    texts = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in rendered.tokens]
    return RenderedTokens(tokens=rendered.tokens, texts=texts, weights=rendered.weights)


def _measure(tokenizer: ChatTokenizer, blob: Blob, model: str, split: Split, context: int, measure: int) -> TokenStatistics:
    lengths: list[_Length] = []
    refused, first_refused, labels = 0, None, Labels()
    for place, row in blob.stored.spread(split, measure):
        labels.add(row)
        try:
            lengths.append(_length(tokenizer, row.resource(), context))
        except InvalidInput as problem:
            refused += 1
            first_refused = first_refused or f"row {place}: {problem.message}"
    rows, longest = blob.stored.count(split), np.array([length.longest for length in lengths] or [0])
    scale = rows / measured if (measured := len(lengths) + refused) else 0.0

    def scaled(counts: Iterator[int]) -> int:
        return round(scale * sum(counts))

    return TokenStatistics(
        model=model,
        split=split,
        rows=rows,
        measured=measured,
        context=context,
        tokens=scaled(length.tokens for length in lengths),
        trained_tokens=scaled(length.trained for length in lengths),
        mean=float(longest.mean()),
        longest=int(longest.max()),
        percentiles={f"p{percent}": int(np.percentile(longest, percent, method="inverted_cdf")) for percent in PERCENTILES},
        lengths=Histogram.of([length.longest for length in lengths]),
        truncated=scaled(length.truncated for length in lengths),
        without_loss=scaled(not length.learns for length in lengths),
        refused=round(scale * refused),
        first_refused=first_refused,
        labels=labels.most_common(),
    )


def _length(tokenizer: ChatTokenizer, row: AnyRow, context: int) -> _Length:
    sequences = _sequences(tokenizer, row)
    cut = [rendered.cut(context) for rendered in sequences]
    longest = max(len(rendered.tokens) for rendered in sequences)
    # A prompt as long as the context leaves no room for an answer; a pair of which one side is cut to nothing prefers nothing.
    learns = longest < context if isinstance(row, PromptRow) else all(rendered.trained for rendered in cut)
    tokens, trained = sum(len(rendered.tokens) for rendered in cut), sum(rendered.trained for rendered in cut)
    return _Length(tokens, longest, trained, longest > context, learns)
