"""The forward of a step: the trainer's decoder over rows that are laid out so that a row's bits do not depend on its company.

Prefill packs chunks of prompts as the trainer packs sequences; decode has one row per sample. Rows are sorted by weights, and every adapter's
segment is padded to `ROW_PAD` rows.
Shapes: R packed rows, B fed samples, D hidden, V vocabulary, T tokens of a chunk.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from bloomery.infer.attention import ChunkAttention, Span, StepAttention
from bloomery.infer.cache import KeyValueCache
from bloomery.infer.plan import Sample
from bloomery.models.adapters import UNEMBED, AdapterRows, FusedAdapter
from bloomery.models.attention import ROW_PAD, pad_to
from bloomery.models.decoder import Decoder
from bloomery.models.head import logits, token_logprobs

_TOP_ROWS = 64
"""Rows whose logits exist at once when the likeliest tokens of a prompt are asked for."""


class Model(NamedTuple):
    """The weights of some rows; equal versions are equal adapters."""

    version: str
    adapter: FusedAdapter | None


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


class PromptScores(NamedTuple):
    """Log-probability of each given next token [T], and where asked the k likeliest next tokens with theirs [T, k]."""

    logprobs_T: Tensor
    top_ids_Tk: Tensor | None = None
    top_logprobs_Tk: Tensor | None = None

    def without(self, count: int) -> "PromptScores":
        """All but the first `count` tokens."""
        if self.top_ids_Tk is None or self.top_logprobs_Tk is None:
            return PromptScores(self.logprobs_T[count:])
        return PromptScores(self.logprobs_T[count:], self.top_ids_Tk[count:], self.top_logprobs_Tk[count:])


class Runner:
    """Feeds tokens through the decoder and keeps the cache in step."""

    def __init__(self, decoder: Decoder, cache: KeyValueCache) -> None:
        self._decoder, self._cache = decoder, cache

    @torch.no_grad()
    def prefill(self, feeds: Sequence[Feed]) -> list[Tensor]:
        """Cache the keys and values of all fed tokens; returns each feed's hidden states, its pad rows included."""
        layout = _layout(feeds, lambda feed: pad_to(len(feed.tokens), ROW_PAD))
        attention = ChunkAttention(self._cache, self._spans(feeds, layout))
        hidden_RD = self._hidden(feeds, layout, attention)
        return [hidden_RD[row : row + pad_to(len(feed.tokens), ROW_PAD)] for row, feed in zip(layout.first_rows, feeds, strict=True)]

    @torch.no_grad()
    def decode(self, feeds: Sequence[Feed]) -> NextTokens:
        """Feed one token per sample."""
        layout = _layout(feeds, lambda feed: 1)
        attention = StepAttention(self._cache, self._spans(feeds, layout), layout.rows)
        hidden_RD = self._hidden(feeds, layout, attention)
        logits_RV = torch.cat([self._logits(hidden_RD[start:stop], adapter) for adapter, start, stop in layout.adapters.segments])
        # Reduced before the pad rows go, so that the reduction too sees a multiple of `ROW_PAD` rows, as in the trainer.
        logsumexp_R = torch.logsumexp(logits_RV, -1)
        order = torch.tensor(layout.first_rows, device=logits_RV.device)
        return NextTokens(logits_RV.index_select(0, order).cpu(), logsumexp_R.index_select(0, order).cpu())

    @torch.no_grad()
    def score(self, hidden_RD: Tensor, adapter: FusedAdapter | None, next_tokens: Sequence[int], top_k: int) -> PromptScores:
        """Log-probabilities of what follows each token of a prefilled feed, by the trainer's own function."""
        count = len(next_tokens)
        targets_R1 = torch.zeros(len(hidden_RD), 1, dtype=torch.long, device=hidden_RD.device)
        targets_R1[:count, 0] = torch.tensor(next_tokens, device=hidden_RD.device)
        factors = adapter.get(UNEMBED) if adapter is not None else None
        logprobs_T = token_logprobs(hidden_RD, self._decoder.head_weight, factors, targets_R1)[:count, 0].cpu()
        if not top_k:
            return PromptScores(logprobs_T)
        parts = [_top(self._logits(rows_RD, adapter), top_k) for rows_RD in hidden_RD.split(_TOP_ROWS)]
        ids_Rk, values_Rk = (torch.cat(part) for part in zip(*parts, strict=True))
        return PromptScores(logprobs_T, ids_Rk[:count].cpu(), values_Rk[:count].cpu())

    def _hidden(self, feeds: Sequence[Feed], layout: "_Layout", attention: ChunkAttention | StepAttention) -> Tensor:
        tokens, positions = [0] * layout.rows, [0] * layout.rows
        for row, feed in zip(layout.first_rows, feeds, strict=True):
            tokens[row : row + len(feed.tokens)] = feed.tokens
            positions[row : row + len(feed.tokens)] = range(feed.start, feed.stop)
        tokens_R, positions_R = torch.tensor([tokens, positions], device=self._decoder.device)
        hidden_RD = self._decoder.hidden(tokens_R, positions_R, attention, layout.adapters)
        for feed in feeds:
            feed.sample.cached = feed.stop
        return hidden_RD

    def _spans(self, feeds: Sequence[Feed], layout: "_Layout") -> list[Span]:
        slots = {sample: slot for slot, sample in enumerate(self._cache.samples)}
        return [Span(row, slots[feed.sample], feed.start, feed.stop) for row, feed in zip(layout.first_rows, feeds, strict=True)]

    def _logits(self, hidden_RD: Tensor, adapter: FusedAdapter | None) -> Tensor:
        return logits(hidden_RD, self._decoder.head_weight, adapter.get(UNEMBED) if adapter is not None else None)


def _top(logits_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    top = logits_RV.topk(count, dim=-1)
    return top.indices, top.values - torch.logsumexp(logits_RV, -1, keepdim=True)


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
