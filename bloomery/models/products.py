"""Products of rows with a weight matrix, by the fastest kernel whose rows do not depend on their company.

In float32 on a CPU that is one of our own (`native`): each number is one chain of multiply-adds, so a row has the same bits alone and among others,
and few rows of a small model take half to four fifths of the time that oneDNN takes. Where it is missing, or the processor fuses no multiply-adds,
oneDNN computes, which comes with torch; it uses the widest instructions of a processor where torch's BLAS does not, and gives a row the same bits
among any number of rows from two on; `kernel_probe` holds that against this machine. Bfloat16 goes to a kernel of our own where the processor
has tiles for it: there oneDNN sums more than 512 inputs in an order that depends on the rows. Elsewhere it goes to oneDNN. On a GPU, whose
library chooses its order by the number of rows, both go to a kernel of our own (`models.gpu`).
A weight that was put into the kernel's own order once (`packed`) gives the same bits, and few rows in a half to a fifth of the time: they wait for
little else than the order that is made anew for every call. It serves products alone: nothing else reads it, and no gradient reaches it.
Shapes: R rows, I inputs, O outputs, P panels of W outputs.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.models.gpu import launch
from bloomery.models.gpu import products as gpu_products
from bloomery.models.memory import LargePages
from bloomery.models.native import gemm, half_gemm, split_gemm

PACKABLE: Final = frozenset({"qkv", "q", "kv", "o", "gate_up", "down", "latent_in", "latent_out", "gate", "projection"})
"""Parameters of a block that nothing but `product` reads: matrices, and of experts stacks of matrices."""
MATRICES: Final = PACKABLE | {"router"}
"""All that products are computed with, but for the head."""
_PLAIN: Final[tuple[None, str, list[float], str]] = (None, "none", [], "")
"""No bias, and nothing applied to the result."""
_PACKED_TYPES: Final = (torch.float32, torch.bfloat16)
_WORTH_SPLITTING: Final = 256
"""Inputs and outputs from which on a product costs more than splitting its operands."""
_WORTH_ADDING_UP: Final = 64
"""Rows from which on the same holds of what reaches a weight: an expert's may be few."""
_BLAS_IS_AS_WIDE: Final = torch.backends.cpu.get_cpu_capability() == "AVX2"
"""Whether oneDNN has no wider instructions than torch's BLAS has: then it only loses the time in which it transposes a weight."""


class Panels(nn.Parameter):
    """A weight in the order of `gemm.product`, or of `half_gemm.product`."""

    outputs: int

    def __new__(cls, weight_OI: Tensor, pages: LargePages | None = None) -> "Panels":
        """Of a plain one."""
        pack = half_gemm.pack if weight_OI.dtype == torch.bfloat16 else gemm.pack
        panels = super().__new__(cls, pack(weight_OI.detach(), pages), requires_grad=False)
        panels.outputs = len(weight_OI)
        return panels


def linear(input_RI: Tensor, weight_OI: Tensor) -> Tensor:
    """`input @ weight.T`, with gradients for whichever of the two wants one."""
    if torch.is_grad_enabled() and (input_RI.requires_grad or weight_OI.requires_grad):
        out_RO: Tensor = _Linear.apply(input_RI, weight_OI)  # type: ignore[no-untyped-call]
        return out_RO
    return product(input_RI, weight_OI)


def product(input_RI: Tensor, weight_OI: Tensor) -> Tensor:
    """`input @ weight.T` for callers that write their own backward; the weight may be packed."""
    if isinstance(weight_OI, Panels):
        multiply = half_gemm.product if weight_OI.dtype == torch.bfloat16 else gemm.product
        return multiply(input_RI, weight_OI, weight_OI.outputs)
    if not weight_OI.is_mkldnn and gemm.multiplies(input_RI, weight_OI):
        return gemm.product_unpacked(input_RI, weight_OI)
    if not weight_OI.is_mkldnn and half_gemm.multiplies(input_RI, weight_OI):
        return half_gemm.product_unpacked(input_RI, weight_OI)
    if launch.available(input_RI, weight_OI):
        return gpu_products.multiply(input_RI, weight_OI.t())
    return _library_product(input_RI, weight_OI)


def _library_product(input_RI: Tensor, weight_OI: Tensor) -> Tensor:
    # A single row, which nobody promises the bits of, is no product of matrices: torch's own reads a plain weight a tenth faster, or half as fast.
    if weight_OI.is_mkldnn or (_by_onednn(input_RI) and not (len(input_RI) == 1 and _BLAS_IS_AS_WIDE)):
        result: Tensor = torch.ops.mkldnn._linear_pointwise(input_RI, weight_OI, *_PLAIN)
        return result
    return F.linear(input_RI, weight_OI)


def rows_gradient(grad_RO: Tensor, weight_OI: Tensor) -> Tensor:
    """`grad @ weight`, what reaches the rows of a `product`. No sampler computes it, so it may come from whichever is fastest."""
    if _is_split(weight_OI.shape, grad_RO, weight_OI):
        return split_gemm.product(grad_RO, weight_OI)
    if launch.available(grad_RO, weight_OI):
        # Its rows have company too: a run's gradients are its own.
        return gpu_products.multiply(grad_RO, weight_OI)
    return grad_RO @ weight_OI if _BLAS_IS_AS_WIDE else _library_product(grad_RO, weight_OI.t())


def weight_gradient(grad_RO: Tensor, input_RI: Tensor) -> Tensor:
    """`grad.T @ input`, what reaches the weight of a `product`."""
    if len(grad_RO) >= _WORTH_ADDING_UP and _is_split((grad_RO.shape[1], input_RI.shape[1]), grad_RO, input_RI):
        return split_gemm.product(grad_RO.t(), input_RI)
    return grad_RO.t() @ input_RI


def add_weight_gradient(sum_OI: Tensor, grad_RO: Tensor, input_RI: Tensor) -> Tensor:
    """The same, added in place to a sum, which may be of float32 where the others are not."""
    if len(grad_RO) >= _WORTH_ADDING_UP and _is_split(sum_OI.shape, sum_OI, grad_RO, input_RI):
        return split_gemm.product(grad_RO.t(), input_RI, sum_OI)
    return sum_OI.addmm_(grad_RO.t(), input_RI) if sum_OI.dtype == grad_RO.dtype else sum_OI.add_(grad_RO.t() @ input_RI)


def _is_split(weight: Sequence[int], *tensors: Tensor) -> bool:
    """Whether gradients of a weight of this shape come from `split_gemm.product`: by its shape alone, for rows have company."""
    return min(weight) >= _WORTH_SPLITTING and split_gemm.multiplies(*tensors)


def batch_product(a_MRS: Tensor, b_MSC: Tensor) -> Tensor:
    """`a @ b` of each member [M, R, C], to the bits that it has alone."""
    return gpu_products.multiply(a_MRS, b_MSC) if launch.available(a_MRS, b_MSC) else torch.bmm(a_MRS, b_MSC)


def add_batch_product(out_MRC: Tensor, a_MRS: Tensor, b_MSC: Tensor) -> Tensor:
    """The same, added in place."""
    if launch.available(out_MRC, a_MRS, b_MSC):
        return gpu_products.multiply(a_MRS, b_MSC, added_to=out_MRC)
    return out_MRC.baddbmm_(a_MRS, b_MSC)


def packed(weight_OI: Tensor, pages: LargePages | None = None) -> nn.Parameter:
    """A copy for `product` alone, in its kernel's own order, and in `pages` where there are some that the kernel can use; asks for `can_pack`."""
    if gemm.multiplies(weight_OI) or half_gemm.multiplies(weight_OI):
        return Panels(weight_OI, pages)
    return nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach()), requires_grad=False)


def is_packed(weight: Tensor) -> bool:
    """Whether it lies in an order of `packed`."""
    return isinstance(weight, Panels) or weight.is_mkldnn


def unpacked(weight: Tensor) -> Tensor:
    """The plain matrix [O, I] of a packed one; another one as it is."""
    if isinstance(weight, Panels):
        unpack = half_gemm.unpack if weight.dtype == torch.bfloat16 else gemm.unpack
        return unpack(weight.detach(), weight.outputs)
    return weight.detach().to_dense() if weight.is_mkldnn else weight.detach()


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this dtype have a packed form here."""
    if gemm.multiplies(torch.empty(0, dtype=dtype, device=device)):
        return True
    if dtype not in _PACKED_TYPES or device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    # Processors without the instructions for it have no order for bfloat16.
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def library(dtype: torch.dtype, device: torch.device) -> str:
    """Which library computes `product`, for the numerics id."""
    like = torch.empty(0, dtype=dtype, device=device)
    if launch.available(like):
        return launch.identity()
    return "native" if gemm.multiplies(like) or half_gemm.multiplies(like) else "onednn" if _by_onednn(like) else "torch"


def _by_onednn(like: Tensor) -> bool:
    return like.dtype == torch.float32 and like.device.type == "cpu" and torch.backends.mkldnn.is_available()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_RI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(input_RI, weight_OI)
        return product(input_RI, weight_OI)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad_RO,), (input_RI, weight_OI) = grads, ctx.saved_tensors
        grad_input = rows_gradient(grad_RO, weight_OI) if ctx.needs_input_grad[0] else None
        return grad_input, weight_gradient(grad_RO, input_RI) if ctx.needs_input_grad[1] else None
