"""Causal attention over packed rows, with pads that depend on a sequence's own length and nothing else; layers with a state are given their chunks.

Shapes: R packed rows, P places (rows regrouped by padded length), H query heads, K key/value heads, E head dimension, B sequences of a group,
L padded length, S keys; X numbers of a row that a state's chunk holds, I numbers that a row reads of it.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.models.native import attention as native_attention
from bloomery.models.pads import KEY_PAD, LENGTH_PAD, ROW_PAD, packed_starts, pad_to
from bloomery.models.recurrent import Chunks, Recurrence, SequenceRows, packed_scan
from bloomery.models.spans import Spans

_LENGTH_LADDER = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512)


class Attention(Protocol):
    """What the decoder calls once per layer: how rows learn of those before them in their sequence.

    `place` counts the layers that have keys and values, or those that have a state.
    """

    def __call__(self, place: int, q_RHE: Tensor, k_RKE: Tensor, v_RKE: Tensor, window: int | None) -> Tensor:
        """Attend, after the rotary embedding, and return [R, H, E]."""
        ...

    def recur(self, place: int, mixer: Recurrence, rows_RX: Tensor) -> Tensor:
        """What every row reads of its own chunk and of the state before it [R, I]."""
        ...


class _Group(NamedTuple):
    """Sequences of one padded length, attended together."""

    places: int
    """How many of all places are the group's, sequence after sequence."""
    length: int
    keys: int
    exact: bool


class PackedAttention:
    """Each sequence of the packed rows attends to itself, causally.

    Where there are native kernels a query has the bits of a cached decode step. Elsewhere `exact` (of all sequences, or of each) pads keys to
    `KEY_PAD` under an explicit mask, the form in which a decode step of torch's gives the same bits; without it a sequence is faster and still
    independent of the others.
    """

    def __init__(self, lengths: Sequence[int], *, exact: bool | Sequence[bool], device: torch.device | str = "cpu") -> None:
        self._groups, self._order = _lay_out(lengths, [exact] * len(lengths) if isinstance(exact, bool) else exact, device)
        self._places = [group.places for group in self._groups]
        starts = packed_starts(lengths)
        self._spans = Spans.of([(start, start, 0, stop - start) for start, stop in pairwise(starts)])
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}
        self._lengths = lengths
        self._chunks: Chunks | None = None

    def __call__(self, place: int, q_RHE: Tensor, k_RKE: Tensor, v_RKE: Tensor, window: int | None) -> Tensor:
        """Attend within each sequence."""
        if native_attention.attends(q_RHE, k_RKE, v_RKE):
            if not torch.is_grad_enabled():
                return native_attention.attend(q_RHE, k_RKE, v_RKE, self._spans, window)[0]
            attended_RHE: Tensor = _NativeAttend.apply(q_RHE, k_RKE, v_RKE, self._spans, window)  # type: ignore[no-untyped-call]
            return attended_RHE
        placed = (_ToPlaces.apply(tensor, self._order) for tensor in (q_RHE, k_RKE, v_RKE))  # type: ignore[no-untyped-call]
        # Split, whose backward writes every gradient once, where that of a slice fills the whole with zeros first.
        by_group = zip(*(tensor_PNE.split(self._places) for tensor_PNE in placed), strict=True)
        parts = [self._attend(group, q_PHE, k_PKE, v_PKE, window) for group, (q_PHE, k_PKE, v_PKE) in zip(self._groups, by_group, strict=True)]
        out_PHE = parts[0] if len(parts) == 1 else torch.cat(parts)
        out_RHE: Tensor = _ToRows.apply(out_PHE, self._order)  # type: ignore[no-untyped-call]
        return out_RHE

    def recur(self, place: int, mixer: Recurrence, rows_RX: Tensor) -> Tensor:
        """Each sequence from its first row on."""
        if self._chunks is None:
            starts = packed_starts(self._lengths)
            sequences = [SequenceRows(start, pad_to(length, ROW_PAD)) for start, length in zip(starts, self._lengths, strict=False)]
            self._chunks = Chunks(sequences, starts[-1], mixer.config, rows_RX.device, tails=False)
        return packed_scan(mixer, rows_RX, self._chunks)

    def _attend(self, group: _Group, q_PHE: Tensor, k_PKE: Tensor, v_PKE: Tensor, window: int | None) -> Tensor:
        q_BHLE, k_BKLE, v_BKLE = (tensor.unflatten(0, (-1, group.length)).transpose(1, 2) for tensor in (q_PHE, k_PKE, v_PKE))
        if not group.exact and (window is None or window >= group.length):
            out_BHLE = F.scaled_dot_product_attention(q_BHLE, k_BKLE, v_BKLE, is_causal=True, enable_gqa=True)
            return out_BHLE.transpose(1, 2).flatten(0, 1)
        extra = group.keys - group.length
        k_BKSE, v_BKSE = F.pad(k_BKLE, (0, 0, 0, extra)), F.pad(v_BKLE, (0, 0, 0, extra))
        mask_LS = self._mask(group.length, group.keys, window, q_PHE)
        out_BHLE = F.scaled_dot_product_attention(q_BHLE, k_BKSE, v_BKSE, attn_mask=mask_LS, enable_gqa=True)
        return out_BHLE.transpose(1, 2).flatten(0, 1)

    def _mask(self, length: int, keys: int, window: int | None, like: Tensor) -> Tensor:
        name = (length, keys, window)
        if name not in self._masks:
            self._masks[name] = causal_mask(torch.arange(length, device=like.device), keys, window, like.dtype)
        return self._masks[name]


class _NativeAttend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_RHE: Tensor, k_RKE: Tensor, v_RKE: Tensor, spans: Spans, window: int | None) -> Tensor:
        out_RHE, logs_RH = native_attention.attend(q_RHE, k_RKE, v_RKE, spans, window, logged=True)
        assert logs_RH is not None
        ctx.spans, ctx.window = spans, window
        ctx.save_for_backward(q_RHE, k_RKE, v_RKE, out_RHE, logs_RH)
        return out_RHE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *native_attention.attend_backward(grads[0], ctx.saved_tensors, ctx.spans, ctx.window), None, None


class _Order(NamedTuple):
    """The way from packed rows to places (P) and back. Every row has one place; the other places are pads that repeat a row."""

    row_of_place_P: Tensor
    place_of_row_R: Tensor
    pads: Tensor


def _lay_out(lengths: Sequence[int], exact: Sequence[bool], device: torch.device | str) -> tuple[list[_Group], _Order]:
    starts = packed_starts(lengths)
    by_form: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for index, length in enumerate(lengths):
        by_form[_ladder(length), exact[index]].append(index)
    groups, rows, real = [], [], []
    offset = 0
    for (padded, is_exact), members in sorted(by_form.items()):
        firsts_B1 = torch.tensor([starts[i] for i in members])[:, None]
        sizes_B1 = torch.tensor([starts[i + 1] - starts[i] for i in members])[:, None]
        places_1L = torch.arange(padded)[None]
        rows.append((firsts_B1 + torch.minimum(places_1L, sizes_B1 - 1)).flatten())
        real.append((places_1L < sizes_B1).flatten())
        places = padded * len(members)
        groups.append(_Group(places, padded, pad_to(padded, KEY_PAD) if is_exact else padded, is_exact))
        offset += places
    row_of_place, is_real = torch.cat(rows), torch.cat(real)
    place_of_row = torch.empty(starts[-1], dtype=torch.long)
    place_of_row[row_of_place[is_real]] = torch.arange(offset)[is_real]
    return groups, _Order(row_of_place.to(device), place_of_row.to(device), torch.arange(offset)[~is_real].to(device))


class _ToPlaces(torch.autograd.Function):
    """Rows to places. Pads are behind every query that counts, so their gradient is exactly zero and a gather replaces the scatter-add."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: _Order) -> Tensor:
        ctx.order = order
        return tensor.index_select(0, order.row_of_place_P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.order.place_of_row_R), None


class _ToRows(torch.autograd.Function):
    """Places back to rows; pads are dropped."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: _Order) -> Tensor:
        ctx.order = order
        return tensor.index_select(0, order.place_of_row_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.order.row_of_place_P).index_fill_(0, ctx.order.pads, 0.0), None


def causal_mask(positions_L: Tensor, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive mask [L, keys]: 0 where the query at `positions` may look, -inf elsewhere."""
    places = torch.arange(keys, device=positions_L.device)[None]
    hidden = places > positions_L[:, None]
    if window is not None:
        hidden |= places <= positions_L[:, None] - window
    return torch.zeros(hidden.shape, dtype=dtype, device=positions_L.device).masked_fill_(hidden, float("-inf"))


def _ladder(length: int) -> int:
    """Padded length: a function of the length alone, within a third of it."""
    if length > _LENGTH_LADDER[-1]:
        return pad_to(length, LENGTH_PAD)
    return _LENGTH_LADDER[bisect_left(_LENGTH_LADDER, length)]
