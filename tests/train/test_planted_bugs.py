"""Bugs planted on purpose, of kinds that let a run's bits depend on its company: the comparison of `test_passes` must see each of them.

With the kernels that are served, but for the last, whose pads only torch's need. Padding ranks less is not among them: it changes no bit in company.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from bloomery.models import adapters, attention, pads
from bloomery.models.adapters import AdapterRows
from bloomery.models.factors import Factors
from bloomery.models.native import attention as native_attention
from bloomery.models.native import bindings, gemm
from bloomery.models.pads import KEY_PAD, ROW_PAD, pad_to
from bloomery.models.spans import Spans
from bloomery.train import passes
from tests.train import builders
from tests.train.company import EVERY_KIND, apart, random_company

Plant = Callable[[pytest.MonkeyPatch], None]
needs_products = pytest.mark.skipif(not gemm.multiplies(torch.empty(0)), reason="no native products here")
needs_kernels = pytest.mark.skipif(not bindings.present(), reason="no native kernels here")


def rows_begin_a_pad_late(patch: pytest.MonkeyPatch) -> None:
    """The last pad row of each adapter goes to the next, as does the first of what follows to the one before."""
    segments = passes._segments

    def late(places: Sequence[Any]) -> AdapterRows:
        own = segments(places).segments
        return AdapterRows(tuple((adapter, start and start + ROW_PAD, stop + ROW_PAD * (stop != own[-1][2])) for adapter, start, stop in own))

    patch.setattr(passes, "_segments", late)


def sequences_see_the_row_before_them(patch: pytest.MonkeyPatch) -> None:
    """A span runs into its neighbour."""
    spans_of = Spans.of

    def early(spans: Sequence[tuple[int, int, int, int]]) -> Spans:
        return spans_of([(row, max(slot - 1, 0), place + (slot > 0), count) for row, slot, place, count in spans])

    patch.setattr(Spans, "of", early)


def the_last_row_of_a_tile_is_rounded_otherwise(patch: pytest.MonkeyPatch) -> None:
    """A row's number depends on where it lies among all."""
    multiply, tile = gemm.product_unpacked, 12

    def uneven(x_RI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        out_RO = multiply(x_RI, weight_OI)
        out_RO[tile - 1 :: tile] = (x_RI[tile - 1 :: tile].double() @ weight_OI.double().t()).float()
        return out_RO

    patch.setattr(gemm, "product_unpacked", uneven)


def products_depend_on_the_number_of_rows(patch: pytest.MonkeyPatch) -> None:
    """Many rows are computed by another kernel than few."""
    multiply = gemm.product_unpacked
    patch.setattr(gemm, "product_unpacked", lambda x_RI, weight_OI: multiply(x_RI, weight_OI) * (1 + 2**-20 * (len(x_RI) > 100)))


def neighbours_are_a_team_whatever_their_rows(patch: pytest.MonkeyPatch) -> None:
    """Each gets as many rows as the other."""

    def joins(team: Any, start: int, stop: int) -> bool:
        return team.stop == start and (stop - team.start) % (ROW_PAD * (team.members + 1)) == 0

    patch.setattr(adapters, "_joins", joins)


def pads_of_ranks_hold_what_a_wider_neighbour_has_there(patch: pytest.MonkeyPatch) -> None:
    """Factors are computed at the widest rank of the pass."""
    adapted = adapters._adapted

    def widened(input_RI: torch.Tensor, weight_OI: torch.Tensor, teams: Sequence[Any], flat: Sequence[torch.Tensor], *more: Any) -> Any:
        out_RO, lows = adapted(input_RI, weight_OI, teams, flat, *more)
        groups = list(adapters._members(teams, flat))
        widest: Factors = max((members[0] for members in groups), key=lambda factors: len(factors.a))
        for team, members in zip(teams, groups, strict=True):
            rank = len(members[0].a)
            out_RO[team.rows] += input_RI[team.rows] @ widest.a[rank:].t() @ widest.b[:, rank:].t()
        return out_RO, lows

    patch.setattr(adapters, "_adapted", widened)


def what_reaches_keys_runs_into_the_next_sequence(patch: pytest.MonkeyPatch) -> None:
    """A row of gradients holds a little of the one before."""
    backward = native_attention.attend_backward

    def run_on(*given: Any) -> tuple[torch.Tensor, ...]:
        grad_q_RHE, grad_k_RKE, grad_v_RKE = backward(*given)
        return grad_q_RHE, grad_k_RKE + grad_k_RKE.roll(1, 0) * 2**-10, grad_v_RKE

    patch.setattr(native_attention, "attend_backward", run_on)


def pads_of_keys_are_those_of_the_longest_and_are_seen_behind_the_border(patch: pytest.MonkeyPatch) -> None:
    """A sequence of less than `KEY_PAD` beside one of more."""
    lay_out, causal_mask = attention._lay_out, attention.causal_mask

    def widened(*given: Any) -> Any:
        groups, order = lay_out(*given)
        keys = pad_to(max(group.length for group in groups), KEY_PAD)
        return [group._replace(keys=keys) if group.exact else group for group in groups], order

    def seen(positions_L: torch.Tensor, *more: Any) -> torch.Tensor:
        mask_LS = causal_mask(positions_L, *more)
        mask_LS[:, max(KEY_PAD, len(positions_L)) :] = 0
        return mask_LS

    patch.setattr(attention, "_lay_out", widened)
    patch.setattr(attention, "causal_mask", seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        rows_begin_a_pad_late,
        pads_of_ranks_hold_what_a_wider_neighbour_has_there,
        neighbours_are_a_team_whatever_their_rows,
        pytest.param(what_reaches_keys_runs_into_the_next_sequence, marks=needs_kernels),
        pytest.param(sequences_see_the_row_before_them, marks=needs_kernels),
        pytest.param(the_last_row_of_a_tile_is_rounded_otherwise, marks=needs_products),
        pytest.param(products_depend_on_the_number_of_rows, marks=needs_products),
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_bug_in_what_is_served_is_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert apart(random_company(builders.decoder(), count=EVERY_KIND, seed=11)) != []


@pytest.mark.slow
def test_a_wrong_pad_of_keys_is_noticed_where_keys_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    pads_of_keys_are_those_of_the_longest_and_are_seen_behind_the_border(monkeypatch)
    # In half precision, which torch's attention serves.
    assert apart(random_company(builders.decoder(dtype=torch.bfloat16), count=EVERY_KIND, seed=11)) != []


@pytest.mark.slow
def test_a_pad_of_rows_that_is_too_small_is_noticed_where_rows_need_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # With torch's kernels, which compute a single row otherwise than several.
    monkeypatch.setattr(bindings, "available", lambda *tensors: False)
    for module in (pads, attention, passes):
        monkeypatch.setattr(module, "ROW_PAD", 1)
    assert apart(random_company(builders.decoder(), count=32, seed=11)) != []
