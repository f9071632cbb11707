"""Products whose rows do not depend on their company, of matrices and of as many pairs of them.

Shapes: M members, R rows, S summed, C columns.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from bloomery.models.gpu.launch import aligned, loaded


class _Tiles(NamedTuple):
    """Rows, summed and columns of a tile; the same for any number of rows, because instructions for other tiles sum in another order."""

    rows: int
    summed: int
    columns: int


_TILES: Final = {torch.float32: _Tiles(32, 32, 32), torch.bfloat16: _Tiles(64, 64, 64)}


def multiply(a: Tensor, b: Tensor, *, added_to: Tensor | None = None) -> Tensor:
    """`a @ b` of [R, S] and [S, C], or of [M, R, S] and [M, S, C]; sums run in float32, and are rounded once. `added_to` gets it added in place."""
    a_MRS, b_MSC = (aligned(each if each.dim() == 3 else each[None]) for each in (a, b))
    (members, rows, summed), columns = a_MRS.shape, b_MSC.shape[2]
    out = a.new_empty((*a.shape[:-1], columns)) if added_to is None else added_to
    out_MRC = out if out.dim() == 3 else out[None]
    tiles = _TILES[a.dtype]
    if rows and columns:
        grid = -(-rows // tiles.rows), -(-columns // tiles.columns), members
        strides = *out_MRC.stride(), *a_MRS.stride(), *b_MSC.stride()
        loaded().multiply[grid](out_MRC, a_MRS, b_MSC, rows, summed, columns, *strides, added_to is not None, *tiles)
    return out
