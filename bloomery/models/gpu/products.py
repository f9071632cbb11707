"""Products whose rows do not depend on their company, of matrices and of as many pairs of them.

Which code computes depends on what is summed, on the columns, the dtype and the layout, and among sizes of tiles that were seen to give the same bits
on the rows. What lies in columns has rows of its own, such as the outputs of a weight: for those code is chosen by their number too.

Shapes: M members, R rows, S summed, C columns; X, Y any of them.
"""

from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from bloomery.models.gpu.launch import aligned, loaded

_VECTOR: Final = 16
"""Numbers: of strides and bounds that are multiples of it the compiler knows so, and lets vectors be read."""


class _Tiles(NamedTuple):
    """Rows, summed and columns of a tile, the warps that compute it, and the tiles that are there or on their way at a time."""

    rows: int
    summed: int
    columns: int
    warps: int
    stages: int
    turned: bool = False
    """Whether `b.T @ a.T` is computed: instructions take 64 rows at least, and 8 columns, so that few rows are better off as columns."""


class _Sizes(NamedTuple):
    """Tiles by the number of rows. Those for few serve up to twice as many as they have themselves."""

    few: _Tiles
    some: _Tiles
    many: _Tiles


_HALF: Final = _Sizes(_Tiles(32, 128, 64, 4, 4, turned=True), _Tiles(64, 64, 64, 4, 4), _Tiles(128, 64, 128, 8, 3))
_SINGLE: Final = _Sizes(_Tiles(16, 32, 64, 4, 4), _Tiles(64, 16, 64, 4, 3), _Tiles(128, 16, 128, 4, 3))
_SIZES: Final = {
    (torch.bfloat16, False): _HALF,
    (torch.bfloat16, True): _HALF,
    (torch.float32, False): _SINGLE._replace(many=_SINGLE.some),
    (torch.float32, True): _SINGLE,
}
"""By the dtype, and whether `b` lies in columns, as weights do for products, or in rows, as they do for gradients."""
_MANY_ROWS: Final = 256
"""From which on tiles for many are faster."""
_TRIED: Final = 300
"""Rows that all tiles are tried with, in three members: no whole tiles."""


def multiply(a: Tensor, b: Tensor, *, added_to: Tensor | None = None) -> Tensor:
    """`a @ b` of [R, S] and [S, C], or of [M, R, S] and [M, S, C]; sums run in float32, and are rounded once. `added_to` gets it added in place."""
    a_MRS, b_MSC = (_laid_out(each if each.dim() == 3 else each[None]) for each in (a, b))
    out = a.new_empty((*a.shape[:-1], b.shape[-1])) if added_to is None else added_to
    if a_MRS.shape[1] and b_MSC.shape[2]:
        _launch(out if out.dim() == 3 else out[None], a_MRS, b_MSC, _tiles(a_MRS, b_MSC), adds=added_to is not None)
    return out


def _laid_out(x_MXY: Tensor) -> Tensor:
    """It, or a copy whose lines, and members, lie so far apart that their length alone says how they are read."""
    member, x, y = _strides(x_MXY)
    line, length = (x, x_MXY.shape[2]) if y == 1 else (y, x_MXY.shape[1])
    as_length_says = 1 in (x, y) and (line - length) % _VECTOR == 0 and member % _known(length) == 0
    return aligned(x_MXY) if as_length_says else x_MXY.contiguous()


def _known(size: int) -> int:
    """What a size is known to be a multiple of."""
    return _VECTOR if size % _VECTOR == 0 else 1


def _strides(x_MXY: Tensor) -> tuple[int, int, int]:
    """From member to member, row to row and column to column; where there is one of them, what it would be of several in one piece."""
    (members, rows, columns), (m, x, y) = x_MXY.shape, x_MXY.stride()
    y = 1 if columns == 1 else y
    return 0 if members == 1 else m, columns if rows == 1 and y == 1 else x, y


def _in_columns(x_MXY: Tensor) -> bool:
    return _strides(x_MXY)[2] != 1


def _tiles(a_MRS: Tensor, b_MSC: Tensor) -> _Tiles:
    (_, rows, summed), columns = a_MRS.shape, b_MSC.shape[2]
    turned = _in_columns(a_MRS), _in_columns(b_MSC)
    sizes = _SIZES[a_MRS.dtype, turned[1]]
    if rows <= 2 * sizes.few.rows:
        return sizes.few
    alike = _like(rows) if turned[0] else _TRIED, _like(summed), _like(columns)
    if not _tiles_agree(a_MRS.dtype, a_MRS.device, alike, turned):
        return sizes.few
    return sizes.many if rows >= _MANY_ROWS and columns > sizes.some.columns else sizes.some


def _like(size: int) -> int:
    """A small size that has the same code: every tile divides what lies between them."""
    return 256 + size % 128


@cache
def _tiles_agree(dtype: torch.dtype, device: torch.device, shape: tuple[int, int, int], turned: tuple[bool, bool]) -> bool:
    """Whether all tiles give the bits of those for few rows here, to a row alone and in several members: their instructions may sum in another order,
    and then nobody uses them. `turned`: whether `a` and `b` lie in columns."""
    rows, summed, columns = shape
    generator = torch.Generator(device).manual_seed(0)
    noise = (torch.randn(3, *size, generator=generator, device=device).to(dtype) for size in ((rows, summed), (summed, columns)))
    a_MRS, b_MSC = (each.mT.contiguous().mT if lies else each for each, lies in zip(noise, turned, strict=True))
    whole: list[Tensor] = []
    alone: list[Tensor] = []
    for tiles in _SIZES[dtype, turned[1]]:
        for found, a, b in ((whole, a_MRS, b_MSC), (alone, _laid_out(a_MRS[2:, 5:6]), _laid_out(b_MSC[2:]))):
            found.append(a.new_empty(*a.shape[:2], columns))
            _launch(found[-1], a, b, tiles, adds=False)
    return all(torch.equal(each, whole[0]) for each in whole) and all(torch.equal(each, whole[0][2:, 5:6]) for each in alone)


def _launch(out_MRC: Tensor, a_MRS: Tensor, b_MSC: Tensor, tiles: _Tiles, *, adds: bool) -> None:
    (members, rows, columns), summed = out_MRC.shape, a_MRS.shape[2]
    # Rows are company, of whose number nothing may be known, but where they are the lines of what lies in columns.
    multiples = _known(rows) if _in_columns(a_MRS) else 1, _known(columns)
    operands, lengths, tile = (out_MRC, a_MRS, b_MSC), (rows, summed, columns), tiles[:3]
    strides = [_strides(each) for each in operands]
    if tiles.turned:
        operands, lengths, tile, multiples = (out_MRC, b_MSC, a_MRS), lengths[::-1], tile[::-1], multiples[::-1]
        strides = [(m, y, x) for m, x, y in (strides[0], strides[2], strides[1])]
    grid = -(-lengths[0] // tile[0]), -(-lengths[2] // tile[2]), members
    constants = adds, summed % tiles.summed == 0, *multiples, *tile
    loaded().multiply[grid](*operands, *lengths, *sum(strides, ()), *constants, num_warps=tiles.warps, num_stages=tiles.stages)
