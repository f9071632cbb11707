"""Products whose rows do not depend on their company, of matrices and of as many pairs of them.

Shapes: M members, R rows, S summed, C columns.
"""

from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from bloomery.models.gpu.launch import aligned, loaded


class _Tiles(NamedTuple):
    """Rows, summed and columns of a tile, and the warps that compute it."""

    rows: int
    summed: int
    columns: int
    warps: int


_FEW: Final = {torch.float32: _Tiles(32, 32, 32, 4), torch.bfloat16: _Tiles(64, 64, 64, 4)}
_MANY: Final = {torch.float32: _Tiles(64, 32, 64, 4), torch.bfloat16: _Tiles(128, 64, 128, 8)}
_MANY_ROWS: Final = 256
"""From which on larger tiles are faster."""
_TRIED: Final = (300, 456, 200)
"""Rows, summed and columns of what both tiles are tried with: none of them whole tiles."""


def multiply(a: Tensor, b: Tensor, *, added_to: Tensor | None = None) -> Tensor:
    """`a @ b` of [R, S] and [S, C], or of [M, R, S] and [M, S, C]; sums run in float32, and are rounded once. `added_to` gets it added in place."""
    a_MRS, b_MSC = (aligned(each if each.dim() == 3 else each[None]) for each in (a, b))
    rows, columns = a_MRS.shape[1], b_MSC.shape[2]
    out = a.new_empty((*a.shape[:-1], columns)) if added_to is None else added_to
    out_MRC = out if out.dim() == 3 else out[None]
    if rows and columns:
        many = rows >= _MANY_ROWS and _tiles_agree(a.dtype, a.device)
        _launch(out_MRC, a_MRS, b_MSC, (_MANY if many else _FEW)[a.dtype], adds=added_to is not None)
    return out


@cache
def _tiles_agree(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether large tiles give the bits of small ones here: their instructions may sum in another order, and then nobody uses them."""
    rows, summed, columns = _TRIED
    generator = torch.Generator().manual_seed(0)
    a_1RS, b_1SC = (torch.randn(1, *shape, generator=generator).to(device, dtype) for shape in ((rows, summed), (summed, columns)))
    found = []
    # As it lies for gradients, and the other way round as for products: what reads it has an instruction for each.
    for laid_out in (b_1SC, b_1SC.mT.contiguous().mT):
        for tiles in (_FEW[dtype], _MANY[dtype]):
            found.append(a_1RS.new_empty(1, rows, columns))
            _launch(found[-1], a_1RS, laid_out, tiles, adds=False)
    return all(torch.equal(found[0], other) for other in found[1:])


def _launch(out_MRC: Tensor, a_MRS: Tensor, b_MSC: Tensor, tiles: _Tiles, *, adds: bool) -> None:
    (members, rows, summed), columns = a_MRS.shape, b_MSC.shape[2]
    grid = -(-rows // tiles.rows), -(-columns // tiles.columns), members
    strides = *out_MRC.stride(), *a_MRS.stride(), *b_MSC.stride()
    loaded().multiply[grid](out_MRC, a_MRS, b_MSC, rows, summed, columns, *strides, adds, *tiles[:3], num_warps=tiles.warps)
