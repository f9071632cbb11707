"""Causal attention over packed rows, with pads that depend on a sequence's own length and nothing else.

Shapes: R packed rows, H query heads, K key/value heads, E head dimension, B sequences of a group, L padded length.
A sequence of n tokens occupies `pad_to(n, ROW_PAD)` rows, so every sequence starts at a multiple of `ROW_PAD`.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_PAD = 4
"""Matrix products give a row the same bits for any number of rows that is a multiple of this."""
KEY_PAD = 512
"""Attention gives a query the same bits for any number of keys that is a multiple of this (the CPU kernel's key block)."""

_LENGTH_LADDER = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512)


class Attention(Protocol):
    """What the decoder calls once per layer, after the rotary embedding."""

    def __call__(self, layer: int, q_RHE: Tensor, k_RKE: Tensor, v_RKE: Tensor, window: int | None) -> Tensor:
        """Attend and return [R, H, E]."""
        ...


def pad_to(count: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def packed_starts(lengths: Sequence[int]) -> list[int]:
    """First row of each sequence, and the total number of rows at the end."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + pad_to(length, ROW_PAD))
    return starts


def packed_positions(lengths: Sequence[int]) -> Tensor:
    """Position of every packed row in its sequence [R]; pad rows count on."""
    return torch.cat([torch.arange(pad_to(length, ROW_PAD)) for length in lengths])


class _Group(NamedTuple):
    """Sequences of one padded length, attended together."""

    rows_BL: Tensor
    """Packed row behind each place; places past a sequence's rows repeat its last one."""
    keys: int


class PackedAttention:
    """Each sequence of the packed rows attends to itself, causally.

    `exact=True` pads keys to `KEY_PAD` under an explicit mask, the form in which a cached decode step gives the same bits; `exact=False` is
    faster and still independent of the other sequences.
    """

    def __init__(self, lengths: Sequence[int], *, exact: bool, device: torch.device | str = "cpu") -> None:
        self._exact = exact
        starts = packed_starts(lengths)
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, length in enumerate(lengths):
            by_length[_ladder(length)].append(index)
        self._groups: list[_Group] = []
        inverse = torch.empty(starts[-1], dtype=torch.long)
        offset = 0
        for padded, members in sorted(by_length.items()):
            sizes = torch.tensor([starts[i + 1] - starts[i] for i in members])
            firsts = torch.tensor([starts[i] for i in members])
            places = torch.arange(padded)
            rows = firsts[:, None] + torch.minimum(places[None], sizes[:, None] - 1)
            real = places[None] < sizes[:, None]
            inverse[rows[real]] = offset + torch.arange(rows.numel()).view_as(rows)[real]
            offset += rows.numel()
            self._groups.append(_Group(rows.to(device), pad_to(padded, KEY_PAD) if exact else padded))
        self._inverse_R = inverse.to(device)
        self._masks: dict[tuple[int, int, int | None, torch.dtype], Tensor] = {}

    def __call__(self, layer: int, q_RHE: Tensor, k_RKE: Tensor, v_RKE: Tensor, window: int | None) -> Tensor:
        """Attend within each sequence."""
        parts = [self._attend(group, q_RHE, k_RKE, v_RKE, window).flatten(0, 1) for group in self._groups]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.index_select(0, self._inverse_R)

    def _attend(self, group: _Group, q_RHE: Tensor, k_RKE: Tensor, v_RKE: Tensor, window: int | None) -> Tensor:
        q_BHLE, k_BKLE, v_BKLE = (_gather(tensor, group.rows_BL) for tensor in (q_RHE, k_RKE, v_RKE))
        length = group.rows_BL.shape[1]
        if not self._exact and (window is None or window >= length):
            out_BHLE = F.scaled_dot_product_attention(q_BHLE, k_BKLE, v_BKLE, is_causal=True, enable_gqa=True)
            return out_BHLE.transpose(1, 2)
        extra = group.keys - length
        k_BKLE, v_BKLE = F.pad(k_BKLE, (0, 0, 0, extra)), F.pad(v_BKLE, (0, 0, 0, extra))
        mask = self._mask(length, group.keys, window, q_RHE.dtype, q_RHE.device)
        return F.scaled_dot_product_attention(q_BHLE, k_BKLE, v_BKLE, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    def _mask(self, length: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        name = (length, keys, window, dtype)
        if name not in self._masks:
            self._masks[name] = causal_mask(torch.arange(length, device=device), keys, window, dtype)
        return self._masks[name]


def causal_mask(positions_L: Tensor, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive mask [L, keys]: 0 where the query at `positions` may look, -inf elsewhere."""
    places = torch.arange(keys, device=positions_L.device)[None]
    hidden = places > positions_L[:, None]
    if window is not None:
        hidden |= places <= positions_L[:, None] - window
    return torch.zeros(hidden.shape, dtype=dtype, device=positions_L.device).masked_fill_(hidden, float("-inf"))


def _gather(tensor_RNE: Tensor, rows_BL: Tensor) -> Tensor:
    return tensor_RNE.index_select(0, rows_BL.flatten()).view(*rows_BL.shape, *tensor_RNE.shape[1:]).transpose(1, 2)


def _ladder(length: int) -> int:
    """Padded length: a function of the length alone, within a third of it."""
    if length > _LENGTH_LADDER[-1]:
        return pad_to(length, 128)
    return _LENGTH_LADDER[bisect_left(_LENGTH_LADDER, length)]
