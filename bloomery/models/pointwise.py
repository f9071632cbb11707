"""The pointwise parts of a block, with backward passes that write each gradient once.

Autograd's own backward of `chunk` and `cat` fills and copies whole tensors; at the widths of small models that costs as much as a matrix product.
Shapes: R rows, N heads, E head dimension, I intermediate.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension; half precision is normalised in float32 and rounded before the weight, as the families do."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    normed = x.float()
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotate(x_RNE: Tensor, cos_R1H: Tensor, sin_R1H: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout of the Llama-like families; cosines and sines cover half the head (H = E / 2)."""
    rotated: Tensor = _Rotate.apply(x_RNE, cos_R1H, sin_R1H)  # type: ignore[no-untyped-call]
    return rotated


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of the two halves of the last dimension."""
    inner: Tensor = _SwiGlu.apply(gate_up)  # type: ignore[no-untyped-call]
    return inner


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RNE: Tensor, cos_R1H: Tensor, sin_R1H: Tensor) -> Tensor:
        ctx.save_for_backward(cos_R1H, sin_R1H)
        return _rotated(x_RNE, cos_R1H, sin_R1H)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_R1H, sin_R1H = ctx.saved_tensors
        return _rotated(grads[0], cos_R1H, -sin_R1H), None, None


def _rotated(x_RNE: Tensor, cos_R1H: Tensor, sin_R1H: Tensor) -> Tensor:
    first, second = x_RNE.chunk(2, -1)
    out = torch.empty_like(x_RNE, memory_format=torch.contiguous_format)
    out_first, out_second = out.chunk(2, -1)
    torch.sub(first * cos_R1H, second * sin_R1H, out=out_first)
    torch.add(second * cos_R1H, first * sin_R1H, out=out_second)
    return out


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, -1)
        torch.ops.aten.silu.out(gate, out=grad_up).mul_(grads[0])
        torch.mul(grads[0], up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return (grad,)
