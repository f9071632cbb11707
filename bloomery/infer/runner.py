"""The forward of a step: the trainer's decoder over rows that are laid out so that a row's bits do not depend on its company.

Prefill packs chunks of prompts as the trainer packs sequences; decode has one row per sample. Rows are sorted by weights, and every adapter's
segment is padded to `ROW_PAD` rows.
Shapes: R packed rows, B fed samples, D hidden, V vocabulary, T tokens of a chunk; of a routing L sparse layers, T experts per token.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from bloomery.infer.attention import ChunkAttention, Span, StepAttention
from bloomery.infer.cache import KeyValueCache
from bloomery.infer.plan import Sample
from bloomery.infer.scoring import PromptScores, Question, answer, chunk_rows, joined
from bloomery.infer.versions import Model
from bloomery.models.adapters import UNEMBED, AdapterRows, Factors, FusedAdapter
from bloomery.models.attention import ROW_PAD, pad_to
from bloomery.models.decoder import Decoder
from bloomery.models.experts import Routing
from bloomery.models.head import logits


class Feed(NamedTuple):
    """Tokens of one sample, at positions from `start`."""

    sample: Sample
    model: Model
    tokens: Sequence[int]
    start: int

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)


class NextTokens(NamedTuple):
    """What a decode step says about each sample's next token."""

    logits_BV: Tensor
    logsumexp_B: Tensor

    def logprobs(self, tokens_B: Tensor) -> Tensor:
        """Log-probability of each row's chosen token [B]."""
        return self.logits_BV.gather(1, tokens_B[:, None])[:, 0] - self.logsumexp_B

    def top(self, row: int, count: int) -> tuple[tuple[int, float], ...]:
        """The likeliest tokens of one row with their log-probabilities, best first."""
        if not count:
            return ()
        top = self.logits_BV[row].topk(count)
        return tuple(zip(top.indices.tolist(), (top.values - self.logsumexp_B[row]).tolist(), strict=True))


class Runner:
    """Feeds tokens through decoders and keeps the cache in step. What goes through different decoders goes one after the other."""

    def __init__(self, cache: KeyValueCache) -> None:
        self._cache = cache

    @torch.no_grad()
    def prefill(self, feeds: Sequence[Feed]) -> list[Tensor]:
        """Cache the keys and values of all fed tokens; returns each feed's hidden states, its pad rows included."""
        hidden: dict[int, Tensor] = {}
        for members in _by_decoder(feeds):
            hidden |= zip(members, self._prefill([feeds[index] for index in members]), strict=True)
        return [hidden[index] for index in range(len(feeds))]

    @torch.no_grad()
    def decode(self, feeds: Sequence[Feed]) -> NextTokens:
        """Feed one token per sample."""
        teams = _by_decoder(feeds)
        parts = [self._decode([feeds[index] for index in members]) for members in teams]
        if len(parts) == 1:
            return parts[0]
        order = torch.tensor([index for members in teams for index in members]).argsort()
        return NextTokens(*(torch.cat(tensors).index_select(0, order) for tensors in zip(*parts, strict=True)))

    @torch.no_grad()
    def after(self, feeds: Sequence[Feed], hidden: Sequence[Tensor]) -> NextTokens:
        """What comes after the last token of each prefilled feed, without a decode step."""
        last = [len(feed.tokens) - 1 for feed in feeds]
        blocks = zip(feeds, hidden, last, strict=True)
        logits_RV = torch.cat([_logits(rows_RD[_block(row)], feed.model.decoder, feed.model.adapter) for feed, rows_RD, row in blocks])
        return _next_tokens(logits_RV, [index * ROW_PAD + row % ROW_PAD for index, row in enumerate(last)])

    @torch.no_grad()
    def score(self, hidden_RD: Tensor, feed: Feed, question: Question) -> PromptScores:
        """Answer a question about rows of a prefilled feed, from the logits that the trainer computes."""
        skip, step = question.start - feed.start, chunk_rows(feed.model.decoder.config.vocab_size)
        parts = []
        for start in range(_block(skip).start, len(hidden_RD), step):
            first, last = max(0, start - skip), min(len(question.next_T), start + step - skip)
            if first < last:
                logits_RV = _logits(hidden_RD[start : start + step], feed.model.decoder, feed.model.adapter)
                parts.append(answer(logits_RV, max(0, skip - start), question.part(first, last)))
        return joined(parts)

    def _prefill(self, feeds: Sequence[Feed]) -> list[Tensor]:
        layout = _layout(feeds, lambda feed: pad_to(len(feed.tokens), ROW_PAD))
        spans = self._spans(feeds, layout)
        hidden_RD = self._hidden(feeds, layout, spans, ChunkAttention(self._cache, spans))
        return [hidden_RD[row : row + pad_to(len(feed.tokens), ROW_PAD)] for row, feed in zip(layout.first_rows, feeds, strict=True)]

    def _decode(self, feeds: Sequence[Feed]) -> NextTokens:
        layout = _layout(feeds, lambda feed: 1)
        spans = self._spans(feeds, layout)
        hidden_RD = self._hidden(feeds, layout, spans, StepAttention(self._cache, spans, layout.rows))
        decoder = feeds[0].model.decoder
        logits_RV = torch.cat([_logits(hidden_RD[start:stop], decoder, adapter) for adapter, start, stop in layout.adapters.segments])
        return _next_tokens(logits_RV, layout.first_rows)

    def _hidden(self, feeds: Sequence[Feed], layout: "_Layout", spans: Sequence[Span], attention: ChunkAttention | StepAttention) -> Tensor:
        tokens, positions = [0] * layout.rows, [0] * layout.rows
        for row, feed in zip(layout.first_rows, feeds, strict=True):
            tokens[row : row + len(feed.tokens)] = feed.tokens
            positions[row : row + len(feed.tokens)] = range(feed.start, feed.stop)
        decoder = feeds[0].model.decoder
        tokens_R, positions_R = torch.tensor([tokens, positions], device=decoder.device)
        routing = Routing()
        hidden_RD = decoder.hidden(tokens_R, positions_R, attention, layout.adapters, routing)
        if decoder.config.experts is not None:
            self._remember(spans, routing.chosen_RLT)
        for feed in feeds:
            feed.sample.cached = feed.stop
        return hidden_RD

    def _remember(self, spans: Sequence[Span], chosen_RLT: Tensor) -> None:
        """Put the experts of all fed tokens beside their keys and values."""
        fed = [(span.row + token, span.slot, span.start + token) for span in spans for token in range(span.stop - span.start)]
        rows, slots, places = torch.tensor(fed, device=chosen_RLT.device).unbind(1)
        storage = self._cache.experts_NSKLE
        storage[:, slots, 0, places] = chosen_RLT.index_select(0, rows).transpose(0, 1).to(storage.dtype)

    def _spans(self, feeds: Sequence[Feed], layout: "_Layout") -> list[Span]:
        slots = {sample: slot for slot, sample in enumerate(self._cache.samples)}
        return [Span(row, slots[feed.sample], feed.start, feed.stop) for row, feed in zip(layout.first_rows, feeds, strict=True)]


def _by_decoder(feeds: Sequence[Feed]) -> list[list[int]]:
    """Feeds that go through one decoder together, by index."""
    teams: dict[int, list[int]] = {}
    for index, feed in enumerate(feeds):
        teams.setdefault(id(feed.model.decoder), []).append(index)
    return list(teams.values())


def _logits(hidden_RD: Tensor, decoder: Decoder, adapter: FusedAdapter | None) -> Tensor:
    return logits(hidden_RD, decoder.head_weight, _head_factors(adapter))


def _head_factors(adapter: FusedAdapter | None) -> Factors | None:
    return None if adapter is None else adapter.get(UNEMBED)


def _next_tokens(logits_RV: Tensor, rows_B: Sequence[int]) -> NextTokens:
    # Reduced before the pad rows go, so that the reduction too sees a multiple of `ROW_PAD` rows, as in the trainer.
    logsumexp_R = torch.logsumexp(logits_RV, -1)
    order_B = torch.tensor(rows_B, device=logits_RV.device)
    return NextTokens(logits_RV.index_select(0, order_B).cpu(), logsumexp_R.index_select(0, order_B).cpu())


def _block(row: int) -> slice:
    """The rows, a whole pad of them, that a row is computed with."""
    start = row // ROW_PAD * ROW_PAD
    return slice(start, start + ROW_PAD)


class _Layout(NamedTuple):
    """First row of each feed, the number of rows, and whose weights apply to which."""

    first_rows: list[int]
    rows: int
    adapters: AdapterRows


def _layout(feeds: Sequence[Feed], rows_of: Callable[[Feed], int]) -> _Layout:
    first_rows = [0] * len(feeds)
    segments: list[tuple[FusedAdapter | None, int, int]] = []
    row = 0
    order = sorted(range(len(feeds)), key=lambda index: feeds[index].model.version)
    for _, same in groupby(order, key=lambda index: feeds[index].model.version):
        start, members = row, list(same)
        for index in members:
            first_rows[index] = row
            row += rows_of(feeds[index])
        row = pad_to(row, ROW_PAD)
        segments.append((feeds[members[0]].model.adapter, start, row))
    return _Layout(first_rows, row, AdapterRows(tuple(segments)))
