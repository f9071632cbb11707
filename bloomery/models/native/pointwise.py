"""The pointwise parts of a block, forward and backward: norms, rotations, activations, sums.

Shapes: R rows, N heads, E head dimension, H half of it, X anything.
"""

from torch import Tensor

from bloomery.models.native import bindings, buffers


def add(x_RX: Tensor, y: Tensor) -> Tensor:
    """The sum of rows, or of all of them and one [X]."""
    x_RX, y = x_RX.contiguous(), y.contiguous()
    out_RX = buffers.floats(*x_RX.shape)
    rows, width = x_RX.shape
    bindings.call("add", out_RX.data_ptr(), x_RX.data_ptr(), y.data_ptr(), width if y.dim() == 2 else 0, rows, width)
    return out_RX


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, scaled: bool = False) -> tuple[Tensor, Tensor | None]:
    """`x * scale * weight` of vectors in the last dimension, and where `scaled` their scales [..., 1], which the backward takes."""
    x, weight = _vectors(x), weight.contiguous()
    out = buffers.floats(*x.shape)
    scale = buffers.floats(*x.shape[:-1], 1) if scaled else None
    rows, heads, *strides = _layout(x)
    pointer = None if scale is None else scale.data_ptr()
    bindings.call("rms_norm", out.data_ptr(), pointer, x.data_ptr(), *strides, weight.data_ptr(), rows, heads, x.shape[-1], eps)
    return out, scale


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """What reaches `x`."""
    x, grad, weight = _vectors(x), grad.contiguous(), weight.contiguous()
    grad_x = buffers.floats(*x.shape)
    rows, heads, *strides = _layout(x)
    pointers = grad_x.data_ptr(), grad.data_ptr(), x.data_ptr(), *strides, weight.data_ptr(), scale.data_ptr()
    bindings.call("rms_norm_backward", *pointers, rows, heads, x.shape[-1])
    return grad_x


def rms_norm_weight_gradient(grad: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """What reaches the weight."""
    x, grad = _vectors(x), grad.contiguous()
    grad_weight = buffers.floats(x.shape[-1])
    rows, heads, *strides = _layout(x)
    bindings.call(
        "rms_norm_weight_gradient", grad_weight.data_ptr(), grad.data_ptr(), x.data_ptr(), *strides, scale.data_ptr(), rows, heads, x.shape[-1]
    )
    return grad_weight


def rotate(x_RNE: Tensor, cos_R1H: Tensor, sin_R1H: Tensor, *, back: bool = False) -> Tensor:
    """The halves of every head, turned; a cosine and a sine for each row and pair."""
    assert x_RNE.dim() == 3
    assert cos_R1H.numel() == sin_R1H.numel() == len(x_RNE) * x_RNE.shape[-1] // 2
    x_RNE, cos_R1H, sin_R1H = _vectors(x_RNE), cos_R1H.contiguous(), sin_R1H.contiguous()
    out_RNE = buffers.floats(*x_RNE.shape)
    rows, heads, *strides = _layout(x_RNE)
    pointers = out_RNE.data_ptr(), x_RNE.data_ptr(), *strides, cos_R1H.data_ptr(), sin_R1H.data_ptr()
    bindings.call("rotate", *pointers, -1.0 if back else 1.0, rows, heads, x_RNE.shape[-1])
    return out_RNE


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of the halves of the last dimension."""
    gate_up = gate_up.contiguous()
    out = buffers.floats(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    bindings.call("swiglu", out.data_ptr(), gate_up.data_ptr(), _count(out), out.shape[-1])
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """What reaches `gate_up`."""
    grad, gate_up = grad.contiguous(), gate_up.contiguous()
    grad_gate_up = buffers.floats(*gate_up.shape)
    bindings.call("swiglu_backward", grad_gate_up.data_ptr(), grad.data_ptr(), gate_up.data_ptr(), _count(grad), grad.shape[-1])
    return grad_gate_up


def _vectors(x: Tensor) -> Tensor:
    """In a layout that `_layout` can tell."""
    return x if x.dim() in (2, 3) and x.stride(-1) == 1 else x.contiguous()


def _layout(x: Tensor) -> tuple[int, int, int, int]:
    """Rows, heads, floats from row to row and from head to head."""
    if x.dim() == 3:
        return x.shape[0], x.shape[1], x.stride(0), x.stride(1)
    if x.dim() == 2:
        return x.shape[0], 1, x.stride(0), 0
    return _count(x), 1, x.shape[-1], 0


def _count(x: Tensor) -> int:
    """Vectors in the last dimension."""
    return x.numel() // x.shape[-1] if x.shape[-1] else 0
