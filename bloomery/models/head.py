"""From hidden states to log-probabilities of tokens, in chunks of rows: the [R, V] logits of a large batch never exist at once.

Shapes: R rows, D hidden, V vocabulary, K targets per row. Trainer and sampler use the same `logits` and the same reduction, so their numbers agree.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.models.factors import Factors, add_updates
from bloomery.models.gpu import launch
from bloomery.models.gpu import rows as gpu_rows
from bloomery.models.native import bindings, softmax
from bloomery.models.products import add_weight_gradient, product, rows_gradient, weight_gradient

CHUNK_BYTES: Final = 64 << 20
"""Logits that exist at once."""
_KEPT_BYTES: Final = 64 << 20
"""Logits of so few rows are kept for the backward; more are computed a second time, to the same bits."""


class HeadRows(NamedTuple):
    """Rows `start` to `stop`, whose unembedding has these factors; both are multiples of `ROW_PAD`."""

    factors: Factors | None
    start: int
    stop: int
    temperature: float = 1.0
    """Of the distribution whose log-probabilities are wanted; logits are the model's own at any."""


def logits(hidden_RD: Tensor, head_VD: Tensor, factors: Factors | None, softcap: float | None = None) -> Tensor:
    """Float32 logits [R, V]; R must be a multiple of `ROW_PAD` for batch-independent bits."""
    return pooled_logits(hidden_RD, head_VD, [HeadRows(factors, 0, hidden_RD.shape[0])], softcap)


def pooled_logits(hidden_RD: Tensor, head_VD: Tensor, segments: Sequence[HeadRows], softcap: float | None = None) -> Tensor:
    """The same for segments that cover all rows, each with its own factors."""
    logits_RV = product(hidden_RD, head_VD)
    for factors, start, stop, _ in segments:
        if factors is not None:
            add_updates(logits_RV[start:stop], hidden_RD[start:stop], [factors])
    return capped(logits_RV.float(), softcap)


def tempered(logits_RV: Tensor, temperature: Tensor | float) -> Tensor:
    """`(logits - max) / temperature` in place: by these operations in float32 tokens are drawn, so that whoever computes with it has those bits.

    The temperature is one for all rows, or one for each [R, 1].
    """
    # A tensor on the device, in float32: by a number of the host some devices multiply with its reciprocal.
    divisor_R1 = temperature if isinstance(temperature, Tensor) else logits_RV.new_full((1, 1), temperature)
    return logits_RV.sub_(logits_RV.amax(-1, keepdim=True)).div_(divisor_R1)


def token_logprobs(hidden_RD: Tensor, head_VD: Tensor, factors: Factors | None, targets_RK: Tensor, softcap: float | None = None) -> Tensor:
    """Log-probability [R, K] float32 of each target; gradients reach hidden, head and factors."""
    return pooled_logprobs(hidden_RD, head_VD, [HeadRows(factors, 0, hidden_RD.shape[0])], targets_RK, softcap)


def pooled_logprobs(hidden_RD: Tensor, head_VD: Tensor, segments: Sequence[HeadRows], targets_RK: Tensor, softcap: float | None = None) -> Tensor:
    """The same for segments that cover all rows, each with its own factors and temperature: one product for all, and every segment's own bits."""
    flat = [tensor for segment in segments if segment.factors is not None for tensor in segment.factors]
    spans = tuple(_Span(segment.start, segment.stop, segment.factors is not None, segment.temperature) for segment in segments)
    layout = _Layout(spans, torch.is_grad_enabled(), softcap)
    result: Tensor = _TokenLogprobs.apply(hidden_RD, head_VD, targets_RK, layout, *flat)  # type: ignore[no-untyped-call]
    return result


class _Span(NamedTuple):
    start: int
    stop: int
    adapted: bool
    temperature: float


class _Layout(NamedTuple):
    segments: tuple[_Span, ...]
    differentiable: bool
    softcap: float | None


class _Piece(NamedTuple):
    """Rows of one segment; `number` counts the segments with factors."""

    start: int
    stop: int
    number: int | None
    temperature: float

    def of(self, rows: Tensor, first: int) -> Tensor:
        """Its part of rows of which `first` is the first."""
        return rows[self.start - first : self.stop - first]


def _chunks(layout: _Layout, chunk_rows: int) -> Iterator[list[_Piece]]:
    """Pieces that are computed together. A segment is cut by its own rows, so that sums over its pieces do not depend on its company."""
    chunk: list[_Piece] = []
    number = -1
    for start, stop, adapted, temperature in layout.segments:
        number += adapted
        for first in range(start, stop, chunk_rows):
            piece = _Piece(first, min(first + chunk_rows, stop), number if adapted else None, temperature)
            if chunk and piece.stop - chunk[0].start > chunk_rows:
                yield chunk
                chunk = []
            chunk.append(piece)
    if chunk:
        yield chunk


def _chunk_rows(vocab_size: int) -> int:
    return max(64, CHUNK_BYTES // (4 * vocab_size) // 4 * 4)


def logsumexp(logits_RV: Tensor) -> Tensor:
    """Of every row [R], by the one reduction that training and sampling share."""
    if launch.available(logits_RV):
        return gpu_rows.logsumexp(logits_RV)
    return softmax.logsumexp(logits_RV) if bindings.available(logits_RV) else torch.logsumexp(logits_RV, -1)


def capped(logits_RV: Tensor, softcap: float | None) -> Tensor:
    """`cap * tanh(logits / cap)`, in place; without a cap the logits as they are."""
    return logits_RV if softcap is None else logits_RV.div_(softcap).tanh_().mul_(softcap)


def _chunk_logits(hidden_RD: Tensor, head_VD: Tensor, chunk: Sequence[_Piece], flat: Sequence[Tensor], softcap: float | None) -> Tensor:
    first = chunk[0].start
    factors = [None if piece.number is None else Factors(*flat[2 * piece.number : 2 * piece.number + 2]) for piece in chunk]
    segments = [HeadRows(own, piece.start - first, piece.stop - first) for own, piece in zip(factors, chunk, strict=True)]
    return pooled_logits(hidden_RD[first : chunk[-1].stop], head_VD, segments, softcap)


def _tempered(logits_RV: Tensor, chunk: Sequence[_Piece], softcap: float | None) -> Tensor:
    """Each piece at its temperature, in place but where the gradient of a cap needs what was capped. At 1 the logits are as they are, to the bit."""
    if all(piece.temperature == 1 for piece in chunk):
        return logits_RV
    scaled_RV = logits_RV if softcap is None else logits_RV.clone()
    for piece in chunk:
        if piece.temperature != 1:
            tempered(piece.of(scaled_RV, chunk[0].start), piece.temperature)
    return scaled_RV


def _untempered(grad_RK: Tensor, chunk: Sequence[_Piece]) -> Tensor:
    """The gradient with respect to logits that are not divided yet: what is taken off a row, its largest, moves all of it and changes nothing."""
    if all(piece.temperature == 1 for piece in chunk):
        return grad_RK
    divided_RK = grad_RK.clone()
    for piece in chunk:
        piece.of(divided_RK, chunk[0].start).div_(piece.temperature)
    return divided_RK


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, head_VD: Tensor, targets_RK: Tensor, layout: _Layout, *flat: Tensor) -> Tensor:
        out_RK = torch.empty(targets_RK.shape, dtype=torch.float32, device=hidden_RD.device)
        copied = layout.softcap is not None and any(span.temperature != 1 for span in layout.segments)
        keep = layout.differentiable and not copied and hidden_RD.shape[0] * head_VD.shape[0] * 4 <= _KEPT_BYTES
        ctx.layout, ctx.kept = layout, []
        for chunk in _chunks(layout, _chunk_rows(head_VD.shape[0])):
            rows = slice(chunk[0].start, chunk[-1].stop)
            logits_RV = _chunk_logits(hidden_RD, head_VD, chunk, flat, layout.softcap)
            scaled_RV = _tempered(logits_RV, chunk, layout.softcap)
            out_RK[rows] = scaled_RV.gather(1, targets_RK[rows]) - logsumexp(scaled_RV)[:, None]
            ctx.kept.append(scaled_RV if keep else None)
        ctx.save_for_backward(hidden_RD, head_VD, targets_RK, *flat)
        return out_RK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RD, head_VD, targets_RK, *flat = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden_RD)
        grad_head: Tensor | None = None
        grad_flat = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in flat]
        for chunk, kept in zip(_chunks(ctx.layout, _chunk_rows(head_VD.shape[0])), ctx.kept, strict=True):
            rows = slice(chunk[0].start, chunk[-1].stop)
            grad_RK = _untempered(grads[0][rows], chunk)
            logits_RV = _chunk_logits(hidden_RD, head_VD, chunk, flat, ctx.layout.softcap) if kept is None else kept
            scaled_RV = _tempered(logits_RV, chunk, ctx.layout.softcap) if kept is None else kept
            # d logp[t] / d logits = (onehot(t) - softmax) / temperature
            grad_RV = _softmax_gradient(scaled_RV, grad_RK.sum(1))
            # Where it is a copy nobody needs it any more.
            del scaled_RV
            grad_RV = _uncapped(grad_RV.scatter_add_(1, targets_RK[rows], grad_RK), logits_RV, ctx.layout.softcap).to(hidden_RD.dtype)
            grad_hidden[rows] = rows_gradient(grad_RV, head_VD)
            for piece in chunk:
                if piece.number is not None:
                    _add_factor_gradients(piece, grad_RV[piece.start - rows.start : piece.stop - rows.start], hidden_RD, flat, grad_hidden, grad_flat)
            if ctx.needs_input_grad[1]:
                own = grad_RV, hidden_RD[rows]
                grad_head = weight_gradient(*own).float() if grad_head is None else add_weight_gradient(grad_head, *own)
        casts = (grad.to(like.dtype) for grad, like in zip(grad_flat, flat, strict=True))
        return grad_hidden, None if grad_head is None else grad_head.to(head_VD.dtype), None, None, *casts


def _softmax_gradient(logits_RV: Tensor, mass_R: Tensor) -> Tensor:
    """`-softmax(logits) * mass`."""
    if bindings.available(logits_RV):
        return softmax.gradient(logits_RV, mass_R)
    return torch.softmax(logits_RV, -1).mul_(-mass_R[:, None])


def _uncapped(grad_RV: Tensor, logits_RV: Tensor, softcap: float | None) -> Tensor:
    """The gradient before the cap: d capped / d logits = 1 - (capped / cap)^2."""
    return grad_RV if softcap is None else grad_RV.mul_(1 - (logits_RV / softcap).square_())


def _add_factor_gradients(
    piece: _Piece, grad_RV: Tensor, hidden_RD: Tensor, flat: Sequence[Tensor], grad_hidden_RD: Tensor, grad_flat: Sequence[Tensor]
) -> None:
    assert piece.number is not None
    rows, a, b = slice(piece.start, piece.stop), 2 * piece.number, 2 * piece.number + 1
    grad_low = grad_RV @ flat[b]
    grad_hidden_RD[rows].addmm_(grad_low, flat[a])
    grad_flat[b].add_((grad_RV.t() @ F.linear(hidden_RD[rows], flat[a])).float())
    grad_flat[a].add_((grad_low.t() @ hidden_RD[rows]).float())
