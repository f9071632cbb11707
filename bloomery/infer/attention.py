"""The sampler's two implementations of `Attention`: each writes new keys and values to the cache and reads all of a sequence's from there.

Both give a query the same bits as the trainer's exact attention: query rows are a multiple of `ROW_PAD`, keys one of `KEY_PAD`, masked explicitly.
Shapes: R packed rows, B slots in use, H query heads, K key/value heads, G query heads per key head, P the same padded, L keys, E head dimension.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.infer.cache import KeyValueCache
from bloomery.models.attention import KEY_PAD, ROW_PAD, causal_mask, pad_to


class Span(NamedTuple):
    """Rows `row` and on hold the tokens `start` to `stop` of the sequence in `slot`."""

    row: int
    slot: int
    start: int
    stop: int


class _Masks:
    """One additive mask per attention window, made when a layer first asks for it."""

    def __init__(self, make: Callable[[int | None], Tensor]) -> None:
        self._make = make
        self._made: dict[int | None, Tensor] = {}

    def __getitem__(self, window: int | None) -> Tensor:
        if window not in self._made:
            self._made[window] = self._make(window)
        return self._made[window]


class ChunkAttention:
    """Prefill: each span attends to its own sequence, up to itself."""

    def __init__(self, cache: KeyValueCache, spans: Sequence[Span]) -> None:
        self._cache = cache
        self._spans = [(span, _Masks(partial(self._mask, span))) for span in spans]

    def __call__(self, layer: int, q_RHE: Tensor, k_RKE: Tensor, v_RKE: Tensor, window: int | None) -> Tensor:
        """Attend span by span; rows between spans come out as zeros."""
        out_RHE = torch.zeros_like(q_RHE)
        for span, masks in self._spans:
            rows = slice(span.row, span.row + pad_to(span.stop - span.start, ROW_PAD))
            fed = slice(span.row, span.row + span.stop - span.start)
            keys_KLE, values_KLE = (storage[layer, span.slot] for storage in (self._cache.keys_NSKLE, self._cache.values_NSKLE))
            keys_KLE[:, span.start : span.stop] = k_RKE[fed].transpose(0, 1)
            values_KLE[:, span.start : span.stop] = v_RKE[fed].transpose(0, 1)
            length = pad_to(span.stop, KEY_PAD)
            q_1HRE, k_1KLE, v_1KLE = q_RHE[rows].transpose(0, 1)[None], keys_KLE[None, :, :length], values_KLE[None, :, :length]
            out_1HRE = F.scaled_dot_product_attention(q_1HRE, k_1KLE, v_1KLE, attn_mask=masks[window], enable_gqa=True)
            out_RHE[rows] = out_1HRE[0].transpose(0, 1)
        return out_RHE

    def _mask(self, span: Span, window: int | None) -> Tensor:
        storage = self._cache.keys_NSKLE
        positions = torch.arange(span.start, span.start + pad_to(span.stop - span.start, ROW_PAD), device=storage.device)
        return causal_mask(positions, pad_to(span.stop, KEY_PAD), window, storage.dtype)


class StepAttention:
    """Decode: one query row per slot in use, all slots in one call, the query heads of a group in the rows of their key head."""

    def __init__(self, cache: KeyValueCache, spans: Sequence[Span], rows: int) -> None:
        self._cache, self._slots_in_use = cache, len(cache.samples)
        device = cache.keys_NSKLE.device
        self._length = pad_to(max(span.stop for span in spans), KEY_PAD)
        self._rows, self._slots, self._positions = (
            torch.tensor(column, device=device) for column in zip(*((span.row, span.slot, span.start) for span in spans), strict=True)
        )
        # Slots that are not fed (their prompt is half cached) and pad rows take part with someone's numbers; nobody reads the answers.
        self._row_by_slot_B = torch.zeros(self._slots_in_use, dtype=torch.long, device=device).index_copy_(0, self._slots, self._rows)
        self._slot_by_row_R = torch.zeros(rows, dtype=torch.long, device=device).index_copy_(0, self._rows, self._slots)
        self._position_by_slot_B = torch.zeros(self._slots_in_use, dtype=torch.long, device=device).index_copy_(0, self._slots, self._positions)
        self._masks = _Masks(self._mask)

    def __call__(self, layer: int, q_RHE: Tensor, k_RKE: Tensor, v_RKE: Tensor, window: int | None) -> Tensor:
        """Attend all slots at once."""
        keys_SKLE, values_SKLE = self._cache.keys_NSKLE[layer], self._cache.values_NSKLE[layer]
        keys_SKLE[self._slots, :, self._positions] = k_RKE.index_select(0, self._rows)
        values_SKLE[self._slots, :, self._positions] = v_RKE.index_select(0, self._rows)
        heads, kv_heads = q_RHE.shape[1], k_RKE.shape[1]
        group = heads // kv_heads
        padded = pad_to(group, ROW_PAD)
        q_BKGE = q_RHE.index_select(0, self._row_by_slot_B).unflatten(1, (kv_heads, group))
        q_BKPE = F.pad(q_BKGE, (0, 0, 0, padded - group))
        mask_BKPL = self._masks[window].expand(-1, -1, padded, -1)
        k_BKLE, v_BKLE = (storage[: self._slots_in_use, :, : self._length] for storage in (keys_SKLE, values_SKLE))
        out_BKPE = F.scaled_dot_product_attention(q_BKPE, k_BKLE, v_BKLE, attn_mask=mask_BKPL)
        return out_BKPE[:, :, :group].flatten(1, 2).index_select(0, self._slot_by_row_R)

    def _mask(self, window: int | None) -> Tensor:
        return causal_mask(self._position_by_slot_B, self._length, window, self._cache.keys_NSKLE.dtype)[:, None, None]
