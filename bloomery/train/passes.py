"""One forward, and one backward, over micro-batches of several runs.

A pass computes the base model once for the rows of all its shares. Each run keeps the numbers that it has alone: rows are padded by their own
sequence, an adapter applies to its own range of rows, and terms and factors of a run are reduced over its own rows in their own order.
Shapes: R packed rows, D hidden, K soft targets per row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bloomery.models.adapters import UNEMBED, AdapterRows, FusedAdapter
from bloomery.models.attention import ROW_PAD, PackedAttention, pad_to
from bloomery.models.decoder import Decoder
from bloomery.models.head import token_logprobs
from bloomery.train.batch import MicroBatch
from bloomery.train.lora import Lora
from bloomery.train.losses import Loss


class Share(NamedTuple):
    """One run's part of a pass: a micro-batch, and what to do with it."""

    weights: Lora
    packed: MicroBatch
    loss: Loss
    backward: bool

    @property
    def rows(self) -> int:
        """Packed rows, padding included."""
        return len(self.packed.tokens_R)


def goes_with(share: Share, other: Share) -> bool:
    """Whether both can be in one pass: it has one decoder, and a backward for all or for none."""
    return share.weights.decoder is other.weights.decoder and share.backward == other.backward


def compute(shares: Sequence[Share]) -> list[Tensor]:
    """Log-probabilities [R, K] of each share's rows; with `backward` the gradients of its loss are left at the run's copies, not yet gathered."""
    decoder, backward = shares[0].weights.decoder, shares[0].backward
    for share in shares:
        share.weights.discard_ungathered()
    placed = [share.packed.to(decoder.device) for share in shares]
    with torch.set_grad_enabled(backward):
        adapters = [share.weights.fused() for share in shares]
        hidden = _hidden(decoder, shares, placed, adapters)
        parts = [
            _score(decoder, share, packed, adapter, hidden_RD)
            for share, packed, adapter, hidden_RD in zip(shares, placed, adapters, hidden, strict=True)
        ]
        terms = [part.terms for part in parts if part.terms is not None]
        if terms:
            torch.autograd.backward(terms, [torch.ones_like(term) for term in terms])
    return [part.logprobs_RK.cpu() for part in parts]


class _Scored(NamedTuple):
    logprobs_RK: Tensor
    terms: Tensor | None
    """Differentiable; None where nothing is learned."""


def _hidden(decoder: Decoder, shares: Sequence[Share], placed: Sequence[MicroBatch], adapters: Sequence[FusedAdapter]) -> Sequence[Tensor]:
    lengths = [length for packed in placed for length in packed.lengths]
    exact = [share.loss.exact or not share.backward for share in shares for _ in share.packed.lengths]
    segments, start = [], 0
    for share, adapter in zip(shares, adapters, strict=True):
        segments.append((adapter, start, start + share.rows))
        start += share.rows
    tokens_R, positions_R = (torch.cat(parts) for parts in zip(*((packed.tokens_R, packed.positions_R) for packed in placed), strict=True))
    attention = PackedAttention(lengths, exact=exact, device=decoder.device)
    hidden_RD = decoder.hidden(tokens_R, positions_R, attention, AdapterRows(tuple(segments)))
    parts: Sequence[Tensor] = hidden_RD.split([share.rows for share in shares])
    return parts


def _score(decoder: Decoder, share: Share, packed: MicroBatch, adapter: FusedAdapter, hidden_RD: Tensor) -> _Scored:
    loss = share.loss
    learns_R = loss.learns(packed.inputs) & packed.real_R & share.backward
    logprobs_RK = torch.zeros(packed.targets_RK.shape, device=hidden_RD.device)
    with torch.no_grad():
        others = torch.where(packed.real_R & ~learns_R)[0]
        logprobs_RK[others] = _logprobs(decoder, hidden_RD, packed, others, adapter)
    learning = torch.where(learns_R)[0]
    if not len(learning):
        return _Scored(logprobs_RK, None)
    learned = _logprobs(decoder, hidden_RD, packed, learning, adapter)
    terms = loss.terms(learned, {name: values[learning] for name, values in packed.inputs.items()}, packed.sequence_R[learning])
    logprobs_RK[learning] = learned.detach()
    return _Scored(logprobs_RK, terms)


def _logprobs(decoder: Decoder, hidden_RD: Tensor, packed: MicroBatch, rows: Tensor, adapter: FusedAdapter) -> Tensor:
    if not len(rows):
        return packed.targets_RK.new_zeros((0, packed.targets_RK.shape[1]), dtype=torch.float32)
    padded = torch.cat([rows, rows[:1].expand(pad_to(len(rows), ROW_PAD) - len(rows))])
    chosen_RD = hidden_RD.index_select(0, padded)
    return token_logprobs(chosen_RD, decoder.head_weight, adapter.get(UNEMBED), packed.targets_RK[padded])[: len(rows)]
