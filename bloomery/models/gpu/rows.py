"""Sums over the numbers of a row, one row at a time.

Shapes: R rows, X numbers of a row; R may stand for several dimensions.
"""

from typing import Final

import torch
from torch import Tensor

from bloomery.models.gpu.launch import aligned, loaded, tile

_MOST: Final = 4096
"""Numbers that are read at a time."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x * scale` rounded to its dtype, times the weight; and the scale, one for each row and head [..., 1]. `x` is [R, X] or [R, H, X]."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    x = aligned(x)
    out, scale = torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    heads = x.shape[1] if x.dim() == 3 else 1
    if count := scale.numel():
        # How strides are aligned chooses the code, and of a single row, or head, they may be anything.
        strides = x.stride(0) if len(x) > 1 else max(x.stride(0), x.numel()), x.stride(1) if heads > 1 else 0
        loaded().rms_norm[(count,)](out, scale, x, weight, x.shape[-1], heads, *strides, eps, tile(x.shape[-1], _MOST))
    return out, scale


def row_sum(x: Tensor) -> Tensor:
    """Of float32 rows [..., 1]."""
    return _reduced("row_sum", x)[..., None]


def logsumexp(x: Tensor) -> Tensor:
    """Of float32 rows [...]."""
    return _reduced("logsumexp", x)


def _reduced(kernel: str, x: Tensor) -> Tensor:
    x = aligned(x.contiguous())
    out = x.new_empty(x.shape[:-1])
    if count := out.numel():
        getattr(loaded(), kernel)[(count,)](out, x, x.shape[-1], tile(x.shape[-1], _MOST))
    return out
