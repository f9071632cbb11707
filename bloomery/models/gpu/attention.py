"""Attention of rows over sequences in blocks or in one piece, and its gradients; a sequence's numbers depend on nothing but the sequence.

Shapes: R rows, N spans, T tiles, H query heads, K key/value heads, E head dimension.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from bloomery.models.gpu.launch import loaded, power_of_two, tile
from bloomery.models.gpu.rows import row_sum
from bloomery.models.pads import BLOCK_PLACES
from bloomery.models.spans import Spans

WIDEST: Final = 256
"""Numbers of a head."""


class _Tiles(NamedTuple):
    """Queries, heads of a group counted each, and keys that are computed together."""

    queries: int
    keys: int


_TILES: Final = {torch.float32: _Tiles(16, 32), torch.bfloat16: _Tiles(64, 64)}
_WIDE: Final = 128
"""Numbers of a head beyond which less is read ahead, and backwards have smaller tiles: a program's memory would not hold it."""
_WIDE_BACKWARD: Final = {torch.float32: _Tiles(16, 32), torch.bfloat16: _Tiles(32, 32)}


def attend(q_RHE: Tensor, keys: Tensor, values: Tensor, spans: Spans, window: int | None) -> tuple[Tensor, Tensor]:
    """What `native.attention.attend` gives, with the logarithms."""
    (rows, heads, dim), kv_heads = q_RHE.shape, keys.shape[1]
    group = heads // kv_heads
    tiles = _tiles(_TILES[q_RHE.dtype], group)
    make = torch.zeros if spans.tokens < rows else torch.empty
    out_RHE, logs_RH = make(q_RHE.shape, dtype=q_RHE.dtype, device=q_RHE.device), make((rows, heads), device=q_RHE.device)
    q_RHE, keys, values = map(_dense, (q_RHE, keys, values))
    tiles_T4 = _copy(spans, q_RHE.device, "queries", tiles.queries // group)
    paged = spans.tables_SM is not None
    table_SM = _copy(spans, q_RHE.device, "tables") if paged else tiles_T4
    loaded().attend[(len(tiles_T4), kv_heads)](
        *(out_RHE, logs_RH, q_RHE, keys, values, tiles_T4, table_SM, heads, dim, window or 0, dim**-0.5, *q_RHE.stride()[:2]),
        *(*_strides(keys), *_strides(values), table_SM.stride(0), group, paged, BLOCK_PLACES, *tiles, tile(dim, WIDEST)),
        num_stages=_stages(dim),
    )
    return out_RHE, logs_RH


def attend_backward(grad_RHE: Tensor, saved: Sequence[Tensor], spans: Spans, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """What `native.attention.attend_backward` gives."""
    (q_RHE, k_RKE, v_RKE), out_RHE, logs_RH = map(_dense, saved[:3]), saved[3], saved[4]
    grad_RHE = grad_RHE.contiguous()
    (rows, heads, dim), kv_heads = q_RHE.shape, k_RKE.shape[1]
    group, device = heads // kv_heads, q_RHE.device
    tiles = _tiles((_TILES if dim <= _WIDE else _WIDE_BACKWARD)[q_RHE.dtype], group)
    make = torch.zeros if spans.tokens < rows else torch.empty
    grads = [make((rows, number, dim), dtype=q_RHE.dtype, device=device) for number in (heads, kv_heads, kv_heads)]
    along_RH1 = row_sum(out_RHE.float() * grad_RHE.float())
    inputs = grad_RHE, q_RHE, k_RKE, v_RKE, logs_RH, along_RH1
    strides = tuple(stride for tensor in (q_RHE, k_RKE, v_RKE) for stride in tensor.stride()[:2])
    shape = group, *tiles, tile(dim, WIDEST)
    of_queries, of_keys = _copy(spans, device, "queries", tiles.queries // group), _copy(spans, device, "keys", tiles.keys)
    rest = dim, window or 0, dim**-0.5, *strides, *shape
    loaded().attend_backward_queries[(len(of_queries), kv_heads)](grads[0], *inputs, of_queries, heads, *rest, num_stages=_stages(dim))
    loaded().attend_backward_keys[(len(of_keys), kv_heads)](*(grads[1], grads[2], *inputs, of_keys, heads, kv_heads, *rest), num_stages=_stages(dim))
    return grads[0], grads[1], grads[2]


def keep(storage_BKPE: Tensor, x_RKE: Tensor, spans: Spans) -> None:
    """Put the rows of keys, or values, in the places of their tokens."""
    rows_F, blocks_F, places_F = _copy(spans, x_RKE.device, "places")
    storage_BKPE[blocks_F, :, places_F] = x_RKE.index_select(0, rows_F)


def renew(spans: Spans, others: Spans) -> None:
    """Put what a device would be given of others, as many and as long, where it was given these."""
    for (kind, size), copy in spans.copies.items():
        copy.copy_(_MAKERS[kind](others, size))


def _stages(dim: int) -> int:
    """Tiles of keys, or queries, that are there or on their way at a time."""
    return 3 if dim <= _WIDE else 2


def _tiles(tiles: _Tiles, group: int) -> _Tiles:
    """Of which one holds at least a group."""
    return tiles._replace(queries=max(tiles.queries, power_of_two(group)))


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(storage: Tensor) -> tuple[int, int, int]:
    """From block to block, from head to head and from place to place."""
    strides = storage.stride()
    return (strides[0], strides[1], strides[2]) if storage.dim() == 4 else (0, strides[1], strides[0])


def _copy(spans: Spans, device: torch.device, kind: str, size: int = 0) -> Tensor:
    """What a device is given of the spans, once."""
    if (found := spans.copies.get((kind, size))) is None:
        found = spans.copies[kind, size] = _MAKERS[kind](spans, size).to(device)
    return found


def _query_tiles(spans: Spans, tokens: int) -> Tensor:
    """First row, slot, position of the first token, and how many of `tokens` there are."""
    lines = [
        (row + first, slot, position + first, min(tokens, count - first))
        for row, slot, position, count in spans.places_N4.tolist()
        for first in range(0, count, tokens)
    ]
    return torch.tensor(lines, dtype=torch.int32)


def _key_tiles(spans: Spans, keys: int) -> Tensor:
    """Of whole sequences: first row, first position, tokens."""
    lines = [(row, first, count, 0) for row, _, _, count in spans.places_N4.tolist() for first in range(0, count, keys)]
    return torch.tensor(lines, dtype=torch.int32)


def _tables(spans: Spans, _: int) -> Tensor:
    assert spans.tables_SM is not None
    return spans.tables_SM.int()


def _places(spans: Spans, _: int) -> Tensor:
    """Of every token [3, F]: its row, its block, and its place there."""
    assert spans.tables_SM is not None
    row_N, slot_N, position_N, count_N = spans.places_N4.unbind(1)
    within_F = torch.arange(spans.tokens) - (count_N.cumsum(0) - count_N).repeat_interleave(count_N)
    slot_F, position_F = slot_N.repeat_interleave(count_N), position_N.repeat_interleave(count_N) + within_F
    blocks_F = spans.tables_SM[slot_F, position_F // BLOCK_PLACES]
    return torch.stack([row_N.repeat_interleave(count_N) + within_F, blocks_F, position_F % BLOCK_PLACES])


_MAKERS: Final[dict[str, Callable[[Spans, int], Tensor]]] = {
    "queries": _query_tiles,
    "keys": _key_tiles,
    "tables": _tables,
    "places": _places,
}
"""What kernels are told of spans."""
