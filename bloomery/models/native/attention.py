"""Attention of neighbouring rows over sequences in blocks or in one piece, and its gradients; on a GPU its own kernels compute it (`models.gpu`).

Shapes: R rows, N spans, H query heads, K key/value heads, E head dimension; B blocks in all, P places of each, S slots, M blocks of each slot.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from bloomery.models.gpu import attention as gpu_attention
from bloomery.models.gpu import launch
from bloomery.models.native import bindings, buffers
from bloomery.models.pads import pad_to
from bloomery.models.spans import Spans

_LANES: Final = 8
"""Values that are computed together."""


def attends(q_RHE: Tensor, *keys_and_values: Tensor) -> bool:
    """Whether `attend` takes these."""
    if launch.available(q_RHE, *keys_and_values):
        return q_RHE.shape[-1] <= gpu_attention.WIDEST
    return q_RHE.shape[-1] % _LANES == 0 and bindings.available(q_RHE, *keys_and_values)


def attends_heads(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """The same of tensors that there are not yet."""
    return attends(torch.empty(0, 0, head_dim, dtype=dtype, device=device))


def attend(
    q_RHE: Tensor, keys: Tensor, values: Tensor, spans: Spans, window: int | None = None, *, logged: bool = False
) -> tuple[Tensor, Tensor | None]:
    """What each query gathers of its sequence up to itself [R, H, E], zeros in rows outside of the spans; where `logged`, also the logarithm of the
    sum of exponentials [R, H].

    `keys` and `values` are blocks [B, K, P, E], which the tables of the spans name, or the packed rows themselves [R, K, E], where a span's slot is
    its first row.
    """
    if launch.available(q_RHE):
        return gpu_attention.attend(q_RHE, keys, values, spans, window)
    rows, heads, dim = q_RHE.shape
    out_RHE = buffers.floats(rows, heads, dim)
    logs_RH = buffers.floats(rows, heads) if logged else None
    q_RHE, keys, values = (buffers.rows(tensor) for tensor in (q_RHE, keys, values))
    threads, kv_heads = torch.get_num_threads(), keys.shape[1]
    # Torch's, because it says so where memory runs out.
    of_a_head = max(bindings.TOGETHER, heads // kv_heads) * (pad_to(spans.longest, _LANES) + dim)
    room = max(of_a_head, min(bindings.SCORES, kv_heads * of_a_head))
    scratch = buffers.floats(threads, room)
    bindings.call(
        "attend",
        *(out_RHE.data_ptr(), None if logs_RH is None else logs_RH.data_ptr(), q_RHE.data_ptr(), *q_RHE.stride()[:2]),
        *(keys.data_ptr(), _strides(keys), values.data_ptr(), _strides(values), *_of_spans(spans)),
        *(heads, kv_heads, dim, window or 0, rows, scratch.data_ptr(), room, threads),
    )
    return out_RHE, logs_RH


def attend_backward(grad_RHE: Tensor, saved: Sequence[Tensor], spans: Spans, window: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What reaches queries, keys and values of packed rows, from `saved`: these, and what `attend` gave for them with its logarithms.

    Spans are whole sequences. A sequence's numbers depend on nothing but the sequence.
    """
    if launch.available(grad_RHE):
        return gpu_attention.attend_backward(grad_RHE, saved, spans, window)
    (q_RHE, k_RKE, v_RKE), out_RHE, logs_RH = map(buffers.rows, saved[:3]), saved[3].contiguous(), saved[4].contiguous()
    grad_RHE, threads = grad_RHE.contiguous(), torch.get_num_threads()
    (rows, heads, dim), kv_heads = q_RHE.shape, k_RKE.shape[1]
    grads = [buffers.floats(rows, number, dim, zeros=spans.tokens < rows) for number in (heads, kv_heads, kv_heads)]
    room = 4 * bindings.PANEL * dim + 4 * bindings.PANEL * bindings.QUERIES + pad_to(spans.longest, _LANES) * (heads // kv_heads)
    scratch = buffers.floats(threads, room)
    bindings.call(
        "attend_backward",
        *(grad.data_ptr() for grad in grads),
        grad_RHE.data_ptr(),
        *(number for tensor in (q_RHE, k_RKE, v_RKE) for number in (tensor.data_ptr(), *tensor.stride()[:2])),
        *(out_RHE.data_ptr(), logs_RH.data_ptr(), spans.places_N4.data_ptr(), len(spans.places_N4)),
        *(heads, kv_heads, dim, window or 0, scratch.data_ptr(), room, threads),
    )
    return grads[0], grads[1], grads[2]


def keep(storage_BKPE: Tensor, x_RKE: Tensor, spans: Spans) -> None:
    """Put the rows of keys, or values, in the places of their tokens."""
    if launch.available(storage_BKPE):
        gpu_attention.keep(storage_BKPE, x_RKE, spans)
        return
    assert storage_BKPE.stride(-1) == 1
    x_RKE = buffers.rows(x_RKE)
    pointers = storage_BKPE.data_ptr(), _strides(storage_BKPE), x_RKE.data_ptr(), *x_RKE.stride()[:2]
    bindings.call("keep", *pointers, *_of_spans(spans), *x_RKE.shape[1:])


def _of_spans(spans: Spans) -> tuple[int, int, int | None, int]:
    """Where they are and how many, and the same of the blocks of a slot."""
    tables_SM = spans.tables_SM
    tables = (None, 0) if tables_SM is None else (tables_SM.data_ptr(), tables_SM.stride(0))
    return spans.places_N4.data_ptr(), len(spans.places_N4), *tables


def _strides(storage: Tensor) -> Any:
    """Floats from block to block, from head to head and from place to place; packed rows are the places of one block."""
    strides = storage.stride()
    return buffers.integers((strides[0], strides[1], strides[2] if storage.dim() == 4 else strides[0]))
