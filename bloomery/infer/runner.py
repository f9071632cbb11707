"""The forward of a step: the trainer's decoder over rows that are laid out so that a row's bits do not depend on its company.

Prefill packs chunks of prompts as the trainer packs sequences; decode has one row per sample. Rows are sorted by weights, and by slot; the rows
of every adapter are padded to a multiple of what the form says, those of a prefill to `ROW_PAD`.
Shapes: R packed rows, B fed samples, D hidden, V vocabulary, T tokens of a chunk; of a routing L sparse layers, T experts per token.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bloomery.infer.attention import ChunkAttention, Fed, Span, StepAttention
from bloomery.infer.cache import KeyValueCache
from bloomery.infer.plan import Sample
from bloomery.infer.recorded import FEW_ROWS, RecordedSteps
from bloomery.infer.sampling import divisors
from bloomery.infer.scoring import PromptScores, Question, answer, chunk_rows, joined
from bloomery.infer.versions import Model
from bloomery.models.adapters import AdapterRows
from bloomery.models.bank import Bank
from bloomery.models.decoder import Decoder, Wanted
from bloomery.models.experts import Routing
from bloomery.models.factors import Factors
from bloomery.models.form import Form
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.head import HeadRows, logits, logsumexp, pooled_logits, tempered
from bloomery.models.pads import ROW_PAD, pad_to
from bloomery.models.targets import UNEMBED


class Feed(NamedTuple):
    """Tokens of one sample, at positions from `start`."""

    sample: Sample
    model: Model
    tokens: Sequence[int]
    start: int
    wanted: int | None = None
    """The first position whose hidden state is of use behind the prefill; None: keys and values alone are."""
    temperature: float = 1.0
    """At which what follows its tokens is drawn; 0 takes the likeliest."""

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    @property
    def last_row(self) -> int:
        """Where the last token stands among the rows that prefill gives, from their end."""
        return (len(self.tokens) - 1) % ROW_PAD - ROW_PAD

    @property
    def wanted_rows(self) -> range:
        """Those of its rows, in whole pads, that are of use."""
        rows = pad_to(len(self.tokens), ROW_PAD)
        return range(rows if self.wanted is None else (self.wanted - self.start) // ROW_PAD * ROW_PAD, rows)


class NextTokens(NamedTuple):
    """What a decode step says about each sample's next token."""

    logits_BV: Tensor
    logsumexp_B: Tensor
    drawn_logsumexp_B: Tensor
    """Of the logits at the temperature at which they are drawn from, as `head.tempered` has them; the other one where that is 1 or 0."""

    def logprobs(self, tokens_B: Tensor) -> Tensor:
        """Log-probability of each row's chosen token [B]."""
        return self.logits_BV.gather(1, tokens_B[:, None])[:, 0] - self.logsumexp_B

    def part(self, start: int, stop: int) -> "NextTokens":
        """The same of rows `start` to `stop` alone."""
        return NextTokens(self.logits_BV[start:stop], self.logsumexp_B[start:stop], self.drawn_logsumexp_B[start:stop])

    def top(self, row: int, count: int) -> tuple[tuple[int, float], ...]:
        """The likeliest tokens of one row with their log-probabilities, best first."""
        if not count:
            return ()
        top = self.logits_BV[row].topk(count)
        return tuple(zip(top.indices.tolist(), (top.values - self.logsumexp_B[row]).tolist(), strict=True))


class Runner:
    """Feeds tokens through decoders and keeps the cache in step. What goes through different decoders goes one after the other."""

    def __init__(self, cache: KeyValueCache, form: Form, twin: Callable[[Decoder], Decoder]) -> None:
        self._cache, self._form, self._twin = cache, form, twin
        self._bank = Bank()
        self._recorded = RecordedSteps()

    def forget(self) -> None:
        """Let go of what outlives a step."""
        self._bank.clear()
        self._recorded.forget()

    @torch.inference_mode()
    def prefill(self, feeds: Sequence[Feed]) -> list[Tensor]:
        """Cache the keys and values of all fed tokens; returns the hidden states of each feed's `wanted_rows`."""
        hidden: dict[int, Tensor] = {}
        for members in _by_decoder(feeds):
            hidden |= zip(members, self._prefill([feeds[index] for index in members]), strict=True)
        return [hidden[index] for index in range(len(feeds))]

    @torch.inference_mode()
    def decode(self, feeds: Sequence[Feed]) -> NextTokens:
        """Feed one token per sample."""
        teams = _by_decoder(feeds)
        parts = [self._decode([feeds[index] for index in members]) for members in teams]
        if len(parts) == 1:
            return parts[0]
        order = torch.tensor([index for members in teams for index in members]).argsort()
        return NextTokens(*(torch.cat(tensors).index_select(0, order) for tensors in zip(*parts, strict=True)))

    @torch.inference_mode()
    def after(self, feeds: Sequence[Feed], hidden: Sequence[Tensor]) -> NextTokens:
        """What comes after the last token of each prefilled feed, without a decode step."""
        logits_RV = torch.cat([self._logits(rows_RD[-ROW_PAD:], feed.model) for feed, rows_RD in zip(feeds, hidden, strict=True)])
        rows = [index * ROW_PAD + feed.last_row for index, feed in enumerate(feeds, 1)]
        return _next_tokens(logits_RV, rows, [feed.temperature for feed in feeds])

    @torch.inference_mode()
    def after_each(self, hidden_RD: Tensor, feed: Feed, first: int, count: int) -> NextTokens:
        """What comes after each of the tokens at so many positions of a prefilled feed that is wanted from the first of them or before."""
        logits_RV, rows = self._logits_of_each(hidden_RD, feed, first, count)
        return _next_tokens(logits_RV, rows, [feed.temperature] * count)

    @torch.inference_mode()
    def logits_after_each(self, hidden_RD: Tensor, feed: Feed, first: int, count: int) -> Tensor:
        """The logits of that alone [B, V], for whoever reduces them by himself: native kernels take rows one by one."""
        logits_RV, rows = self._logits_of_each(hidden_RD, feed, first, count)
        return logits_RV[rows.start : rows.stop]

    @torch.inference_mode()
    def score(self, hidden_RD: Tensor, feed: Feed, question: Question) -> PromptScores:
        """Answer a question about a prefilled feed that is wanted from the question's start on, from the logits that the trainer computes."""
        skip, step = (question.start - feed.start) % ROW_PAD, chunk_rows(feed.model.decoder.config.vocab_size)
        parts = []
        for start in range(0, len(hidden_RD), step):
            first, last = max(0, start - skip), min(len(question.next_T), start + step - skip)
            if first < last:
                logits_RV = self._logits(hidden_RD[start : start + step], feed.model)
                parts.append(answer(logits_RV, max(0, skip - start), question.part(first, last)))
        return joined(parts)

    def _prefill(self, feeds: Sequence[Feed]) -> list[Tensor]:
        layout, spans = self._laid_out(feeds, lambda feed: pad_to(len(feed.tokens), ROW_PAD), ROW_PAD)
        rows, places = _wanted(feeds, layout)
        segments = ((adapter, bisect_left(rows, start), bisect_left(rows, stop)) for adapter, start, stop in layout.adapters.segments)
        stretch = slice(rows[0], rows[-1] + 1) if rows else slice(0, 0)
        among = stretch if stretch.stop - stretch.start == len(rows) else torch.tensor(rows, device=self._cache.device)
        wanted = Wanted(among, AdapterRows(tuple(segments), self._bank))
        hidden_CD = self._hidden(feeds, layout, spans, ChunkAttention(self._cache, spans, self._form), wanted)
        return [hidden_CD[place] for place in places]

    def _decode(self, feeds: Sequence[Feed]) -> NextTokens:
        layout, spans = self._laid_out(feeds, lambda feed: 1, self._form.row_pad)
        hidden_RD = self._hidden(feeds, layout, spans, StepAttention(self._cache, spans, layout.rows, self._form))
        decoder = self._twin(feeds[0].model.decoder)
        segments = [HeadRows(_head_factors(adapter), start, stop) for adapter, start, stop in layout.adapters.segments]
        logits_RV = pooled_logits(hidden_RD, decoder.head_weight, segments, decoder.config.logit_softcap)
        return _next_tokens(logits_RV, layout.first_rows, [feed.temperature for feed in feeds])

    def _hidden(
        self,
        feeds: Sequence[Feed],
        layout: "_Layout",
        spans: Sequence[Span],
        attention: ChunkAttention | StepAttention,
        wanted: Wanted | None = None,
    ) -> Tensor:
        tokens, positions = [0] * layout.rows, [0] * layout.rows
        for row, feed in zip(layout.first_rows, feeds, strict=True):
            tokens[row : row + len(feed.tokens)] = feed.tokens
            positions[row : row + len(feed.tokens)] = range(feed.start, feed.stop)
        decoder = self._twin(feeds[0].model.decoder)
        tokens_R, positions_R = torch.tensor([tokens, positions], device=decoder.device)
        routing = Routing()
        self._bank.begin_pass()
        if decoder.config.experts is None and (isinstance(attention, StepAttention) or layout.rows <= FEW_ROWS):
            hidden_RD = self._recorded.hidden(decoder, tokens_R, positions_R, attention, layout.adapters, wanted)
            if wanted is not None:
                # Others may be prefilled before what this gives is looked at.
                hidden_RD = hidden_RD.clone()
        else:
            hidden_RD = decoder.hidden(tokens_R, positions_R, attention, layout.adapters, routing, wanted)
            if decoder.config.experts is not None:
                self._remember(spans, routing)
        for feed in feeds:
            feed.sample.cached = feed.stop
        return hidden_RD

    def _logits_of_each(self, hidden_RD: Tensor, feed: Feed, first: int, count: int) -> tuple[Tensor, range]:
        """In whole pads, and the rows that are asked for."""
        skipped = first - feed.start - feed.wanted_rows.start
        start = skipped // ROW_PAD * ROW_PAD
        logits_RV = self._logits(hidden_RD[start : pad_to(skipped + count, ROW_PAD)], feed.model)
        return logits_RV, range(skipped - start, skipped - start + count)

    def _logits(self, hidden_RD: Tensor, model: Model) -> Tensor:
        return logits(hidden_RD, self._twin(model.decoder).head_weight, _head_factors(model.adapter), model.decoder.config.logit_softcap)

    def _remember(self, spans: Sequence[Span], routing: Routing) -> None:
        """Put the experts of all fed tokens, and their weights, beside their keys and values."""
        rows_F, _, blocks_F, places_F, _ = Fed.of(spans, self._cache)
        for storage, told_RLT in ((self._cache.experts_NBKPE, routing.chosen_RLT), (self._cache.expert_weights_NBKPE, routing.weights_RLT)):
            storage[:, blocks_F, 0, places_F] = told_RLT.index_select(0, rows_F).transpose(0, 1).to(storage.dtype)

    def _laid_out(self, feeds: Sequence[Feed], rows_of: Callable[[Feed], int], row_pad: int) -> tuple["_Layout", list[Span]]:
        """Rows of the feeds, `row_pad` of them or a multiple for each adapter, and where they stand; the cache has room for their tokens then."""
        for feed in feeds:
            self._cache.advance(feed.sample, feed.stop)
        slots = {sample: slot for slot, sample in enumerate(self._cache.samples)}
        order = sorted(range(len(feeds)), key=lambda index: (feeds[index].model.version, slots[feeds[index].sample]))
        first_rows = [0] * len(feeds)
        segments: list[tuple[FusedAdapter | None, int, int]] = []
        row = 0
        for _, same in groupby(order, key=lambda index: feeds[index].model.version):
            start, members = row, list(same)
            for index in members:
                first_rows[index] = row
                row += rows_of(feeds[index])
            row = pad_to(row, row_pad)
            segments.append((feeds[members[0]].model.adapter, start, row))
        layout = _Layout(first_rows, row, AdapterRows(tuple(segments), self._bank))
        return layout, [Span(row, slots[feed.sample], feed.start, feed.stop) for row, feed in zip(first_rows, feeds, strict=True)]


def _by_decoder(feeds: Sequence[Feed]) -> list[list[int]]:
    """Feeds that go through one decoder together, by index."""
    teams: dict[int, list[int]] = {}
    for index, feed in enumerate(feeds):
        teams.setdefault(id(feed.model.decoder), []).append(index)
    return list(teams.values())


def _head_factors(adapter: FusedAdapter | None) -> Factors | None:
    return None if adapter is None else adapter.get(UNEMBED)


def _next_tokens(logits_RV: Tensor, rows_B: Sequence[int], temperatures_B: Sequence[float]) -> NextTokens:
    # Reduced before the pad rows go, so that the reduction too sees a multiple of `ROW_PAD` rows, as in the trainer.
    logsumexp_R = logsumexp(logits_RV)
    drawn_logsumexp_R = logsumexp_R if set(temperatures_B) <= {0, 1} else _drawn_logsumexp(logits_RV, rows_B, temperatures_B)
    if list(rows_B) == list(range(len(logits_RV))):
        return NextTokens(logits_RV.cpu(), logsumexp_R.cpu(), drawn_logsumexp_R.cpu())
    order_B = torch.tensor(rows_B, device=logits_RV.device)
    return NextTokens(*(rows.index_select(0, order_B).cpu() for rows in (logits_RV, logsumexp_R, drawn_logsumexp_R)))


def _drawn_logsumexp(logits_RV: Tensor, rows_B: Sequence[int], temperatures_B: Sequence[float]) -> Tensor:
    """Of all rows [R], pad rows too, where the trainer computes it; at a temperature of 0 or 1 nobody asks for it."""
    divisor_R1 = np.ones((len(logits_RV), 1), np.float32)
    divisor_R1[list(rows_B)] = divisors(temperatures_B)
    return logsumexp(tempered(logits_RV.clone(), torch.from_numpy(divisor_R1).to(logits_RV.device)))


def _wanted(feeds: Sequence[Feed], layout: "_Layout") -> tuple[list[int], list[slice]]:
    """The rows that are wanted, ascending, and where each feed's are among them."""
    rows: list[int] = []
    places = [slice(0)] * len(feeds)
    for index in sorted(range(len(feeds)), key=layout.first_rows.__getitem__):
        own = [layout.first_rows[index] + row for row in feeds[index].wanted_rows]
        places[index] = slice(len(rows), len(rows) + len(own))
        rows += own
    return rows, places


class _Layout(NamedTuple):
    """First row of each feed, the number of rows, and whose weights apply to which."""

    first_rows: list[int]
    rows: int
    adapters: AdapterRows
