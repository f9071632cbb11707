"""Low-rank updates in bfloat16 against chains of float32 that are rounded at their ends, and against torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.models.factors import Factors, add_updates
from bloomery.models.native import bindings, low_rank
from bloomery.models.threads import one_thread
from tests.models.test_native_products import SIZES, chain, joined, noise

pytestmark = pytest.mark.skipif(not low_rank.adds(torch.empty(0, dtype=torch.bfloat16)), reason="no kernels here")


def halves(rows, columns, seed=0):
    return noise(rows, columns, seed=seed).bfloat16()


def rounded_chain(x, w, base=None):
    return chain(x.float(), w.float(), *(() if base is None else (base.float(),))).bfloat16()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 80), SIZES, SIZES)
def test_both_sums_are_chains_of_float32_that_are_rounded_once(rows, members, rank, outputs, inputs):
    x_RI, base_RO = halves(rows * members, inputs), halves(rows * members, outputs, seed=1)
    factors = [(halves(rank, inputs, seed=2 + each), halves(outputs, rank, seed=20 + each)) for each in range(members)]
    out_RO = base_RO.clone()
    low_Rr = low_rank.add_updates(out_RO, x_RI, factors)
    for each, (a_rI, b_Or) in enumerate(factors):
        own = slice(each * rows, (each + 1) * rows)
        assert torch.equal(low_Rr[own], rounded_chain(x_RI[own], a_rI))
        assert torch.equal(out_RO[own], rounded_chain(low_Rr[own], b_Or, base_RO[own]))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_same_bits_in_any_company(threads):
    x_RI, base_RO, pair = halves(301, 96), halves(301, 150, seed=1), Factors(halves(32, 96, seed=2), halves(150, 32, seed=3))
    whole_RO = base_RO.clone()
    with one_thread():
        whole_low_Rr = add_updates(whole_RO, x_RI, [pair])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for start, stop in ((0, 1), (5, 8), (7, 20), (100, 113), (0, 301), (300, 301)):
            part_RO = base_RO[start:stop].clone()
            assert torch.equal(add_updates(part_RO, x_RI[start:stop], [pair]), whole_low_Rr[start:stop])
            assert torch.equal(part_RO, whole_RO[start:stop])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("columns_in_one_piece", [True, False])
def test_torch_says_nearly_the_same(columns_in_one_piece):
    x_RI, base_RO = halves(40, 700), halves(40, 210, seed=1)
    a_rI, b_Or = (halves(16, 700, seed=2) * 0.05), halves(210, 16, seed=3)
    if columns_in_one_piece:
        a_rI, b_Or = a_rI.t().contiguous().t(), b_Or.t().contiguous().t()
    out_RO = base_RO.clone()
    low_Rr = low_rank.add_updates(out_RO, x_RI, [(a_rI, b_Or)])
    low_64 = x_RI.double() @ a_rI.double().t()
    torch.testing.assert_close(low_Rr.double(), low_64, rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(out_RO.double(), base_RO.double() + low_Rr.double() @ b_Or.double().t(), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(("ranks", "outputs"), [((8, 8, 8), (64, 32, 32)), ((1, 1, 1), (40, 7, 33)), ((33, 33, 33), (48, 16, 16))])
def test_zeros_between_joined_targets_are_left_out_and_change_nothing(ranks, outputs):
    members = [joined(ranks, outputs, 75, seed) for seed in (1, 50)]
    factors, places = [(a_rI.bfloat16(), b_Or.bfloat16()) for a_rI, b_Or, _ in members], [own for *_, own in members]
    x_RI, base_RO = halves(58, 75), halves(58, sum(outputs) + 5, seed=1)
    whole_RO, out_RO = base_RO.clone(), base_RO.clone()
    low_Rr = low_rank.add_updates(whole_RO, x_RI, factors)
    assert torch.equal(low_rank.add_updates(out_RO, x_RI, factors, places), low_Rr)
    assert torch.equal(out_RO, whole_RO)


def test_an_update_writes_nothing_outside_of_its_rows_and_outputs():
    around_RO = torch.full((8, 90), 7.0, dtype=torch.bfloat16)
    low_rank.add_updates(around_RO[2:6, 5:76], halves(4, 17), [(halves(16, 17, seed=1), halves(71, 16, seed=2))])
    around_RO[2:6, 5:76] = 7.0
    assert bool((around_RO == 7.0).all())


def test_what_is_not_finite_stays_so_in_its_row_and_nowhere_else():
    x_RI, pair = halves(9, 32), [(halves(16, 32, seed=1), halves(40, 16, seed=2))]
    clean_RO, out_RO = torch.zeros(9, 40, dtype=torch.bfloat16), torch.zeros(9, 40, dtype=torch.bfloat16)
    low_rank.add_updates(clean_RO, x_RI, pair)
    x_RI[4, 7] = float("nan")
    low_rank.add_updates(out_RO, x_RI, pair)
    assert bool(out_RO[4].isnan().all())
    rest = [row for row in range(9) if row != 4]
    assert torch.equal(out_RO[rest], clean_RO[rest])


def test_rounding_is_torchs_for_every_number_of_float32_that_is_tried():
    bits = torch.cat([torch.randint(-(2**31), 2**31 - 1, (4096,), generator=torch.Generator().manual_seed(0)), torch.arange(-70_000, 70_000, 35)])
    numbers = bits.to(torch.int32).view(torch.float32)
    numbers = numbers[numbers.isfinite()]
    highs = numbers.bfloat16()
    # A number of float32 is the sum of three of bfloat16, which a chain adds up exactly when the largest comes last.
    middle = (numbers - highs.float()).bfloat16()
    rest = (numbers - highs.float() - middle.float()).bfloat16()
    keep = (highs.float().isfinite()) & (rest.float() + middle.float() + highs.float() == numbers)
    parts_R3 = torch.stack([rest, middle, highs], 1)[keep]
    a_rI = torch.zeros(16, 3, dtype=torch.bfloat16)
    a_rI[0] = 1.0
    low_Rr = low_rank.add_updates(torch.zeros(len(parts_R3), 1, dtype=torch.bfloat16), parts_R3, [(a_rI, torch.zeros(1, 16, dtype=torch.bfloat16))])
    assert len(parts_R3) > 3000
    assert torch.equal(low_Rr[:, 0], parts_R3.float()[:, 0].add(parts_R3.float()[:, 1]).add(parts_R3.float()[:, 2]).bfloat16())


def test_kernels_are_told_from_torch():
    assert bindings.present()
    assert not low_rank.adds(torch.empty(0, dtype=torch.bfloat16), torch.empty(0))
    assert not low_rank.adds(torch.empty(0, dtype=torch.float16))
