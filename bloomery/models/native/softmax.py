"""The reduction of the head: the logarithm of a row's sum of exponentials, and its gradient.

Shapes: R rows, V vocabulary.
"""

from torch import Tensor

from bloomery.models.native import bindings, buffers


def logsumexp(x_RV: Tensor) -> Tensor:
    """Of every row [R]."""
    x_RV = x_RV.contiguous()
    out_R = buffers.floats(len(x_RV))
    bindings.call("logsumexp", out_R.data_ptr(), x_RV.data_ptr(), *x_RV.shape)
    return out_R


def gradient(x_RV: Tensor, mass_R: Tensor) -> Tensor:
    """`-softmax(x) * mass`."""
    x_RV, mass_R = x_RV.contiguous(), mass_R.contiguous()
    out_RV = buffers.floats(*x_RV.shape)
    bindings.call("softmax_gradient", out_RV.data_ptr(), x_RV.data_ptr(), mass_R.data_ptr(), *x_RV.shape)
    return out_RV
