"""A pass with adapters: each on its own range of rows, and products of a weight with the updates of all of them.

Shapes: R rows, I inputs, O outputs, r rank padded to a multiple of `RANK_PAD`, M members of a team, N rows of each.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bloomery.models.bank import Bank
from bloomery.models.factors import Factors, add_updates, stack
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.native import gemm, low_rank
from bloomery.models.native.low_rank import TargetPlaces
from bloomery.models.products import add_batch_product, batch_product, linear, product, rows_gradient


class AdapterRows(NamedTuple):
    """Which adapter applies to which rows: contiguous ranges that cover all rows, each start and stop a multiple of `ROW_PAD` where bits matter."""

    segments: tuple[tuple[FusedAdapter | None, int, int], ...]
    bank: Bank | None = None
    """Where stacked factors outlive a pass."""


def adapted_linear(input_RI: Tensor, weight_OI: Tensor, parameter: str, rows: AdapterRows) -> Tensor:
    """A projection of the base [R, O] with every segment's low-rank update; with an adapter anywhere the weight gets no gradient.

    `parameter` is what the decoder calls the weight.
    """
    teams, flat = _teams(rows, parameter)
    if not teams:
        return linear(input_RI, weight_OI)
    if not torch.is_grad_enabled():
        return _adapted(input_RI, weight_OI, teams, flat, parameter, rows.bank)[0]
    out_RO: Tensor = _AdaptedLinear.apply(input_RI, weight_OI, teams, *flat)  # type: ignore[no-untyped-call]
    return out_RO


class _Team(NamedTuple):
    """Neighbouring segments with as many rows and factors of the same shape: their small products are computed together."""

    start: int
    stop: int
    places: tuple[TargetPlaces, ...]
    """What is joined in the factors of each member."""

    @property
    def members(self) -> int:
        """How many they are."""
        return len(self.places)

    @property
    def rows(self) -> slice:
        """Of all its members."""
        return slice(self.start, self.stop)

    def of(self, rows_RX: Tensor) -> Tensor:
        """Its own rows [M, rows of a member, X], a view."""
        own_MNX: Tensor = rows_RX[self.start : self.stop].unflatten(0, (self.members, -1))
        return own_MNX


def _teams(rows: AdapterRows, parameter: str) -> tuple[list[_Team], list[Tensor]]:
    """The teams of a pass, and their factors, `a` and `b` of one segment after the other."""
    teams: list[_Team] = []
    flat: list[Tensor] = []
    for adapter, start, stop in rows.segments:
        if start == stop or adapter is None or (factors := adapter.get(parameter)) is None:
            continue
        if teams and _joins(teams[-1], start, stop) and factors.a.shape == flat[-2].shape:
            teams[-1] = teams[-1]._replace(stop=stop, places=(*teams[-1].places, adapter.places(parameter)))
        else:
            teams.append(_Team(start, stop, (adapter.places(parameter),)))
        flat += factors
    return teams, flat


def _joins(team: _Team, start: int, stop: int) -> bool:
    return team.stop == start and (stop - start) * team.members == team.stop - team.start


class _AdaptedLinear(torch.autograd.Function):
    """One product for all rows, and small ones added in place: autograd's own nodes would copy every activation once per segment.

    A batch of products has the bits of each alone; `kernel_probe` holds that against this machine.
    """

    @staticmethod
    def forward(ctx: Any, input_RI: Tensor, weight_OI: Tensor, teams: Sequence[_Team], *flat: Tensor) -> Tensor:
        out_RO, lows = _adapted(input_RI, weight_OI, teams, flat)
        ctx.teams = teams
        ctx.save_for_backward(input_RI, weight_OI, *lows, *flat)
        return out_RO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_RO, teams = grads[0], ctx.teams
        input_RI, weight_OI, *saved = ctx.saved_tensors
        grad_RI = rows_gradient(grad_RO, weight_OI) if ctx.needs_input_grad[0] else None
        grad_flat: list[Tensor] = []
        for team, low_Rr, members in zip(teams, saved, _members(teams, saved[len(teams) :]), strict=False):
            if gemm.multiplies(grad_RO, input_RI):
                own_grad_RI = None if grad_RI is None else grad_RI[team.rows]
                pairs = low_rank.update_gradients(grad_RO[team.rows], input_RI[team.rows], low_Rr, members, own_grad_RI, team.places)
                grad_flat += [grad for pair in pairs for grad in pair]
                continue
            (a_MrI, b_MOr), low_MNr, grad_MNO = stack(members), low_Rr.unflatten(0, (team.members, -1)), team.of(grad_RO)
            grad_low_MNr = batch_product(grad_MNO, b_MOr)
            if grad_RI is not None:
                add_batch_product(team.of(grad_RI), grad_low_MNr, a_MrI)
            grad_a_MrI = batch_product(grad_low_MNr.transpose(1, 2), team.of(input_RI))
            grad_b_MOr = batch_product(grad_MNO.transpose(1, 2), low_MNr)
            grad_flat += [grad for pair in zip(grad_a_MrI, grad_b_MOr, strict=True) for grad in pair]
        return grad_RI, None, None, *grad_flat


def _adapted(
    input_RI: Tensor, weight_OI: Tensor, teams: Sequence[_Team], flat: Sequence[Tensor], parameter: str = "", bank: Bank | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The forward, and what every team's rows are between the factors."""
    out_RO = product(input_RI, weight_OI)
    lows = []
    for place, (team, members) in enumerate(zip(teams, _members(teams, flat), strict=True)):
        stacked = None if bank is None else partial(bank.stacked, parameter, place, members)
        lows.append(add_updates(out_RO[team.rows], input_RI[team.rows], members, team.places, stacked))
    return out_RO, lows


def _members(teams: Sequence[_Team], flat: Sequence[Tensor]) -> Iterator[list[Factors]]:
    """The factors of every team, of one member after the other."""
    first = 0
    for team in teams:
        own = flat[first : first + 2 * team.members]
        first += len(own)
        yield [Factors(a, b) for a, b in zip(own[::2], own[1::2], strict=True)]
