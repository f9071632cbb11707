"""The pointwise parts of a block, with backward passes that write each gradient once; `native` computes what it can of them.

Autograd's own backward of `chunk` and `cat` fills and copies whole tensors; at the widths of small models that costs as much as a matrix product.
Shapes: R rows, N heads, E head dimension, I intermediate.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.models.gpu import launch
from bloomery.models.gpu import rows as gpu_rows
from bloomery.models.native import bindings
from bloomery.models.native import pointwise as native_pointwise


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension; half precision is normalised in float32 and rounded before the weight, as the families do."""
    if torch.is_grad_enabled():
        normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return normed
    if bindings.available(x, weight):
        return native_pointwise.rms_norm(x, weight, eps)[0]
    if launch.available(x, weight):
        return gpu_rows.rms_norm(x, weight, eps)[0]
    # One call where there is one, for steps of a few rows: the same formula, and the same bits.
    return F.rms_norm(x, (x.shape[-1],), weight, eps) if x.dtype == torch.float32 else _normed(x, _scale(x.float(), eps), weight)


def centred_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of families that store a weight's distance from 1; rounded once, behind the weight."""
    return rms_norm(x.float(), 1.0 + weight.float(), eps).to(x.dtype)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """The same without a weight, with autograd's own backward."""
    wide = x.float()
    return (wide * _scale(wide, eps)).to(x.dtype)


def row_sum(x: Tensor) -> Tensor:
    """Of every row [..., 1], to bits that do not depend on their number."""
    if not launch.available(x):
        return x.sum(-1, keepdim=True)
    summed: Tensor = _RowSum.apply(x.float())  # type: ignore[no-untyped-call]
    return summed.to(x.dtype)


def row_mean(x: Tensor) -> Tensor:
    """The same, divided by their length."""
    return row_sum(x) / x.shape[-1] if launch.available(x) else x.mean(-1, keepdim=True)


def add(x_RX: Tensor, y: Tensor) -> Tensor:
    """The sum of rows, or of all of them and one."""
    return native_pointwise.add(x_RX, y) if not torch.is_grad_enabled() and bindings.available(x_RX, y) else x_RX + y


def rotate(x_RNE: Tensor, cos_R1H: Tensor, sin_R1H: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout of the Llama-like families; cosines and sines cover half the head (H = E / 2)."""
    if torch.is_grad_enabled():
        rotated: Tensor = _Rotate.apply(x_RNE, cos_R1H, sin_R1H)  # type: ignore[no-untyped-call]
        return rotated
    return _rotated(x_RNE, cos_R1H, sin_R1H)


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of the two halves of the last dimension."""
    if torch.is_grad_enabled():
        inner: Tensor = _SwiGlu.apply(gate_up)  # type: ignore[no-untyped-call]
        return inner
    return _gated(gate_up)


def geglu(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` of the two halves of the last dimension, with the tanh approximation."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def relu_squared(up: Tensor) -> Tensor:
    """`relu(up)` squared, with autograd's own backward."""
    return F.relu(up).square()


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if bindings.available(x, weight):
            out, scale = native_pointwise.rms_norm(x, weight, eps, scaled=True)
        elif launch.available(x, weight):
            out, scale = gpu_rows.rms_norm(x, weight, eps)
        else:
            scale = _scale(x.float(), eps)
            out = _normed(x, scale, weight)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        wide, grad = x.float(), grads[0].float()
        if bindings.available(x, weight):
            grad_weight = native_pointwise.rms_norm_weight_gradient(grad, x, scale) if ctx.needs_input_grad[1] else None
            return native_pointwise.rms_norm_backward(grad, x, weight, scale), grad_weight, None
        grad_weight = (wide * scale).mul_(grad).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_x = grad * weight.float()
        # d/dx of x * scale(x), with d scale / dx = -scale^3 * x / D.
        along = row_mean(grad_x * wide).mul_(scale.pow(3))
        grad_x = grad_x.mul_(scale).addcmul_(wide, along, value=-1.0)
        return grad_x.to(x.dtype), grad_weight, None


def _scale(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(row_mean(wide.pow(2)) + eps)


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return gpu_rows.row_sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].expand(ctx.shape)


def _normed(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * scale).to(x.dtype).mul_(weight)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RNE: Tensor, cos_R1H: Tensor, sin_R1H: Tensor) -> Tensor:
        ctx.save_for_backward(cos_R1H, sin_R1H)
        return _rotated(x_RNE, cos_R1H, sin_R1H)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_R1H, sin_R1H = ctx.saved_tensors
        return _rotated(grads[0], cos_R1H, sin_R1H, back=True), None, None


def _rotated(x_RNE: Tensor, cos_R1H: Tensor, sin_R1H: Tensor, *, back: bool = False) -> Tensor:
    if bindings.available(x_RNE, cos_R1H):
        return native_pointwise.rotate(x_RNE, cos_R1H, sin_R1H, back=back)
    if back:
        sin_R1H = -sin_R1H
    first, second = x_RNE.chunk(2, -1)
    out = torch.empty_like(x_RNE, memory_format=torch.contiguous_format)
    out_first, out_second = out.chunk(2, -1)
    # Not `addcmul_`, which rounds once where its vectors reach and may round twice behind them.
    torch.mul(first, cos_R1H, out=out_first).sub_(second * sin_R1H)
    torch.mul(second, cos_R1H, out=out_second).add_(first * sin_R1H)
    return out


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _gated(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor]:
        (gate_up,) = ctx.saved_tensors
        if bindings.available(gate_up):
            return (native_pointwise.swiglu_backward(grads[0], gate_up),)
        gate, up = gate_up.chunk(2, -1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, -1)
        torch.ops.aten.silu.out(gate, out=grad_up).mul_(grads[0])
        torch.mul(grads[0], up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return (grad,)


def _gated(gate_up: Tensor) -> Tensor:
    if bindings.available(gate_up):
        return native_pointwise.swiglu(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
