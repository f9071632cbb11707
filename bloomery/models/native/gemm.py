"""Products of rows with a matrix of float32, plain or packed in panels.

Shapes: R rows, I inputs, O outputs, P panels of W outputs.
"""

from typing import Final

import torch
from torch import Tensor

from bloomery.models.memory import LargePages
from bloomery.models.native import bindings, buffers
from bloomery.models.pads import pad_to
from bloomery.obs.machine import processor_flags

FUSES: Final = "fma" in processor_flags()
"""Whether the processor has fused multiply-adds; without them other libraries are faster."""


def multiplies(*tensors: Tensor) -> bool:
    """Whether `product` and `pack` take these, and are worth it."""
    return FUSES and bindings.available(*tensors)


def pack(weight_OI: Tensor, pages: LargePages | None = None) -> Tensor:
    """A matrix in the order in which it is multiplied with [P, I, W], zeros behind the last output; in `pages` where there are some."""
    weight_OI = buffers.rows(weight_OI)
    outputs, inputs = weight_OI.shape
    panels_PIW = buffers.lasting(pages, pad_to(outputs, bindings.PANEL) // bindings.PANEL, inputs, bindings.PANEL, dtype=torch.float32)
    bindings.call("pack", panels_PIW.data_ptr(), weight_OI.data_ptr(), weight_OI.stride(0), outputs, inputs, torch.get_num_threads())
    return panels_PIW


def unpack(panels_PIW: Tensor, outputs: int) -> Tensor:
    """The matrix [O, I] of these panels."""
    return panels_PIW.transpose(1, 2).flatten(0, 1)[:outputs]


def product(x_RI: Tensor, panels_PIW: Tensor, outputs: int) -> Tensor:
    """Rows times a packed matrix [R, O]. A row's bits depend on nothing but the row and the matrix."""
    x_RI = buffers.rows(x_RI)
    rows, inputs = x_RI.shape
    assert panels_PIW.shape[1] == inputs
    out_RO = buffers.floats(rows, outputs)
    bindings.call(
        "product",
        *(out_RO.data_ptr(), outputs, x_RI.data_ptr(), x_RI.stride(0), panels_PIW.data_ptr(), bindings.PANEL * inputs, bindings.PANEL),
        *(rows, outputs, inputs, torch.get_num_threads()),
    )
    return out_RO


def product_unpacked(x_RI: Tensor, weight_OI: Tensor) -> Tensor:
    """The same bits with a plain matrix, which is packed a panel at a time."""
    x_RI, weight_OI = buffers.rows(x_RI), buffers.rows(weight_OI)
    (rows, inputs), outputs, threads = x_RI.shape, len(weight_OI), torch.get_num_threads()
    assert weight_OI.shape[1] == inputs
    out_RO, scratch = buffers.floats(rows, outputs), buffers.floats(threads, bindings.PANEL * inputs)
    bindings.call(
        "product_unpacked",
        *(out_RO.data_ptr(), outputs, x_RI.data_ptr(), x_RI.stride(0), weight_OI.data_ptr(), weight_OI.stride(0)),
        *(rows, outputs, inputs, scratch.data_ptr(), threads),
    )
    return out_RO
