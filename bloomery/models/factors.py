"""The factors of a low-rank update, and the small products that add it to rows.

Shapes: R rows, I inputs, O outputs, r rank padded to a multiple of `RANK_PAD`, M members whose rows are neighbours.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.models.gpu import launch
from bloomery.models.gpu import products as gpu_products
from bloomery.models.native import low_rank
from bloomery.models.native.low_rank import TargetPlaces
from bloomery.models.pads import pad_to
from bloomery.models.products import add_batch_product, batch_product, linear

RANK_PAD: Final = 16
"""The forward computes with ranks padded to this multiple: narrower ones change the bits of a row with the width."""
_HALF_ROWS: Final = 8
"""Of fewer rows oneDNN sums bfloat16 in another order where the processor has AVX-512 and no tiles: one number in some ten thousands differs."""


class Factors(NamedTuple):
    """A matrix's update `scale * B @ A`: `a` [r, I] and `b` [O, r]; experts carry a leading dimension."""

    a: Tensor
    b: Tensor


def padded_rank(rank: int) -> int:
    """The rank that is computed with: the next multiple of `RANK_PAD`."""
    return pad_to(rank, RANK_PAD)


def low_rank_add(base_RO: Tensor, input_RI: Tensor, factors: Factors) -> Tensor:
    """`base + (input @ a.T) @ b.T` in the one order of operations that training and sampling share."""
    low_Rr = _low(input_RI, factors.a)
    if launch.available(base_RO, low_Rr, factors.b):
        return base_RO + linear(low_Rr, factors.b)
    return torch.addmm(base_RO, low_Rr, factors.b.t())


def add_updates(
    out_RO: Tensor,
    input_RI: Tensor,
    members: Sequence[Factors],
    places: Sequence[TargetPlaces] | None = None,
    stacked: Callable[[], Factors] | None = None,
) -> Tensor:
    """`out += (input @ a.T) @ b.T` in place, for as many neighbouring rows with each member's factors; returns `input @ a.T` [R, r].

    A member's rows have the same bits whatever is beside them. `places` of the targets that are joined in each member, for kernels that leave out the
    zeros between them; `stacked` gives the factors in one piece, for kernels that take them so.
    """
    if low_rank.adds(out_RO, input_RI, *members[0]):
        return low_rank.add_updates(out_RO, input_RI, members, places)
    if len(members) == 1:
        # The fewest calls, which is what a step of few rows waits for.
        low_Rr = _low(input_RI, members[0].a)
        _add_product(out_RO, low_Rr, members[0].b)
        return low_Rr
    a_MrI, b_MOr = stack(members) if stacked is None else stacked()
    low_MNr = batch_product(input_RI.unflatten(0, (len(members), -1)), a_MrI.transpose(1, 2))
    add_batch_product(out_RO.unflatten(0, (len(members), -1)), low_MNr, b_MOr.transpose(1, 2))
    return low_MNr.flatten(0, 1)


def _add_product(out_RO: Tensor, low_Rr: Tensor, b_Or: Tensor) -> None:
    if launch.available(out_RO, low_Rr, b_Or):
        gpu_products.multiply(low_Rr, b_Or.t(), added_to=out_RO)
    else:
        out_RO.addmm_(low_Rr, b_Or.t())


def _low(input_RI: Tensor, a_rI: Tensor) -> Tensor:
    """`input @ a.T` [R, r], to the same bits for few rows as for many."""
    if launch.available(input_RI, a_rI):
        return linear(input_RI, a_rI)
    missing = _HALF_ROWS - len(input_RI)
    if missing <= 0 or input_RI.dtype != torch.bfloat16 or input_RI.device.type != "cpu":
        return F.linear(input_RI, a_rI)
    return F.linear(F.pad(input_RI, (0, 0, 0, missing)), a_rI)[: len(input_RI)]


def stack(members: Sequence[Factors]) -> Factors:
    """`a` [M, r, I] and `b` [M, O, r], each matrix in the layout that it has alone: libraries have another kernel for another layout."""
    if len(members) == 1:
        return Factors(members[0].a[None], members[0].b[None])
    return Factors(*map(_stack_matrices, zip(*members, strict=True)))


def _stack_matrices(matrices: Sequence[Tensor]) -> Tensor:
    if matrices[0].is_contiguous():
        return torch.stack(list(matrices))
    return torch.stack([matrix.t() for matrix in matrices]).transpose(1, 2)
