"""Products of rows with a matrix of bfloat16, plain or packed, on processors with tiles of it.

Shapes: R rows, I inputs, O outputs, P panels.
"""

from typing import Final

import torch
from torch import Tensor

from bloomery.models.memory import LargePages
from bloomery.models.native import bindings, buffers
from bloomery.models.pads import pad_to

_TILE_STEP: Final = 32
"""Inputs of a product of bfloat16 that are multiplied together."""


def multiplies(*tensors: Tensor) -> bool:
    """Whether `product` and `pack` take these rows and matrices: bfloat16 on a processor with tiles of it."""
    return (
        all(tensor.dtype is torch.bfloat16 and tensor.is_cpu and tensor.shape[-1] % _TILE_STEP == 0 for tensor in tensors)
        and bindings.tiles_are_granted()
    )


def pack(weight_OI: Tensor, pages: LargePages | None = None) -> Tensor:
    """A matrix of bfloat16 in the order in which tiles of it are multiplied [P, I / 32, 2, 16, 32], zeros behind the last output; in `pages` where
    there are some."""
    weight_OI = buffers.rows(weight_OI)
    outputs, inputs = weight_OI.shape
    shape = pad_to(outputs, bindings.PANEL) // bindings.PANEL, inputs // _TILE_STEP, 2, _TILE_STEP // 2, _TILE_STEP
    panels = buffers.lasting(pages, *shape, dtype=torch.bfloat16)
    bindings.call("half_pack", panels.data_ptr(), weight_OI.data_ptr(), weight_OI.stride(0), outputs, inputs, torch.get_num_threads())
    return panels


def unpack(panels: Tensor, outputs: int) -> Tensor:
    """The matrix [O, I] of these panels."""
    # Of a panel, a step and a side: pairs of inputs, and for each of them both numbers of every output.
    return panels.reshape(*panels.shape[:4], -1, 2).permute(0, 2, 4, 1, 3, 5).flatten(3, 5).flatten(0, 2)[:outputs]


def product(x_RI: Tensor, panels: Tensor, outputs: int) -> Tensor:
    """Rows of bfloat16 times a packed matrix [R, O], summed in float32. A row's bits depend on nothing but the row and the matrix."""
    x_RI = buffers.rows(x_RI)
    rows, inputs = x_RI.shape
    assert panels.shape[1] * _TILE_STEP == inputs
    out_RO = buffers.halves(rows, outputs)
    addresses = out_RO.data_ptr(), outputs, x_RI.data_ptr(), x_RI.stride(0), panels.data_ptr()
    bindings.call("half_product", *addresses, rows, outputs, inputs, torch.get_num_threads())
    return out_RO


def product_unpacked(x_RI: Tensor, weight_OI: Tensor) -> Tensor:
    """The same bits with a plain matrix, which is packed some panels at a time."""
    x_RI, weight_OI = buffers.rows(x_RI), buffers.rows(weight_OI)
    (rows, inputs), outputs, threads = x_RI.shape, len(weight_OI), torch.get_num_threads()
    assert weight_OI.shape[1] == inputs
    out_RO = buffers.halves(rows, outputs)
    scratch = torch.empty(bindings.number("half_product_room", outputs, inputs, threads), dtype=torch.uint8, device="cpu")
    bindings.call(
        "half_product_unpacked",
        *(out_RO.data_ptr(), outputs, x_RI.data_ptr(), x_RI.stride(0), weight_OI.data_ptr(), weight_OI.stride(0)),
        *(rows, outputs, inputs, scratch.data_ptr(), threads),
    )
    return out_RO
