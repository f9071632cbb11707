"""Products of our own: each number is one chain of multiply-adds in the order of the inputs, whatever else is computed, however the matrix lies."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.models.native import gemm, low_rank
from bloomery.models.native.low_rank import TargetPlace
from bloomery.models.products import Panels, packed, product, unpacked

pytestmark = pytest.mark.skipif(not gemm.multiplies(torch.empty(0)), reason="no native products here")
SIZES = st.integers(1, 70)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chain(x_RI: torch.Tensor, w_OI: torch.Tensor, begin_RO: torch.Tensor | None = None) -> torch.Tensor:
    """The oracle: one input after the other, each step exact in float64 but for the rounding to float32."""
    out_RO = np.zeros((len(x_RI), len(w_OI)), np.float32) if begin_RO is None else begin_RO.numpy().copy()
    for x_R, w_O in zip(x_RI.numpy().T.astype(np.float64), w_OI.numpy().T.astype(np.float64), strict=True):
        # A product of two float32 is exact in float64. The sum is rounded there first, which changes the last bit once in many millions of steps.
        out_RO = (x_R[:, None] * w_O[None] + out_RO).astype(np.float32)
    return torch.from_numpy(out_RO)


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, SIZES)
def test_a_product_is_one_chain_of_fused_multiply_adds(rows, outputs, inputs):
    x_RI, w_OI = noise(rows, inputs), noise(outputs, inputs, seed=1)
    found_RO = product(x_RI, w_OI)
    assert torch.equal(found_RO, chain(x_RI, w_OI))
    torch.testing.assert_close(found_RO.double(), x_RI.double() @ w_OI.double().t(), rtol=0, atol=2e-5)


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, SIZES)
def test_a_packed_matrix_gives_the_same_bits_and_comes_back_whole(rows, outputs, inputs):
    x_RI, w_OI = noise(rows, inputs), noise(outputs, inputs, seed=1)
    order = packed(w_OI)
    assert isinstance(order, Panels)
    assert torch.equal(product(x_RI, order), product(x_RI, w_OI))
    assert torch.equal(unpacked(order), w_OI)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neither_rows_beside_it_nor_threads_change_a_row(threads):
    x_RI, order = noise(300, 96), packed(noise(200, 96, seed=1))
    whole_RO = product(x_RI, order)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for start, stop in ((0, 1), (5, 8), (7, 20), (100, 113), (0, 299), (299, 300)):
            assert torch.equal(product(x_RI[start:stop], order), whole_RO[start:stop])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [8, 9, 13, 50, 96, 97, 200])
@pytest.mark.parametrize("inputs", [1023, 1024, 2500])
@pytest.mark.parametrize("threads", [1, 2])
def test_inputs_that_are_taken_in_pieces_make_the_chain_of_those_that_are_not(rows, inputs, threads):
    # Rows a page apart, which the nearest cache does not hold together.
    x_RI, w_OI = noise(rows, 3072, seed=rows)[:, 17 : 17 + inputs], noise(72, inputs, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(product(x_RI, packed(w_OI)), product(x_RI, w_OI))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_a_sum_of_no_inputs_is_zero(rows):
    assert torch.equal(gemm.product(torch.empty(rows, 0), torch.empty(3, 0, 32), 70), torch.zeros(rows, 70))


def test_rows_and_matrices_that_do_not_lie_in_one_piece_are_read_where_they_lie():
    wide_RI, tall_OI = noise(9, 80), noise(40, 90, seed=1)
    assert torch.equal(product(wide_RI[:, 8:72], tall_OI[:, 13:77]), chain(wide_RI[:, 8:72], tall_OI[:, 13:77]))
    turned_IO = noise(64, 40, seed=2)
    assert torch.equal(product(wide_RI[:, 8:72], turned_IO.t()), chain(wide_RI[:, 8:72], turned_IO.t()))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 48), SIZES, SIZES)
def test_updates_go_on_with_the_chain_of_the_product(rows, members, rank, outputs, inputs):
    x_RI, base_RO = noise(rows * members, inputs), noise(rows * members, outputs, seed=1)
    factors = [(noise(rank, inputs, seed=2 + each), noise(outputs, rank, seed=20 + each)) for each in range(members)]
    out_RO = base_RO.clone()
    low_Rr = low_rank.add_updates(out_RO, x_RI, factors)
    for each, (a_rI, b_Or) in enumerate(factors):
        own = slice(each * rows, (each + 1) * rows)
        assert torch.equal(low_Rr[own], chain(x_RI[own], a_rI))
        assert torch.equal(out_RO[own], chain(low_Rr[own], b_Or, base_RO[own]))


@pytest.mark.parametrize("columns_in_one_piece", [True, False])
@pytest.mark.parametrize(
    ("members", "rows", "rank", "outputs", "inputs"), [(1, 300, 48, 200, 96), (3, 12, 16, 70, 33), (2, 4, 130, 64, 40), (1, 1, 1, 1, 1)]
)
def test_gradients_of_updates_are_those_of_float64_and_each_members_own(members, rows, rank, outputs, inputs, columns_in_one_piece):
    x_RI, grad_RO, low_Rr, base_RI = (noise(rows * members, width, seed=width) for width in (inputs, outputs, rank, inputs))
    factors = [(noise(rank, inputs, seed=2 + each), noise(outputs, rank, seed=20 + each)) for each in range(members)]
    if columns_in_one_piece:
        factors = [(a_rI.t().contiguous().t(), b_Or.t().contiguous().t()) for a_rI, b_Or in factors]
    grad_RI = base_RI.clone()
    found = low_rank.update_gradients(grad_RO, x_RI, low_Rr, factors, grad_RI)
    threads = torch.get_num_threads()
    for each, ((a_rI, b_Or), (grad_a_rI, grad_b_Or)) in enumerate(zip(factors, found, strict=True)):
        own = slice(each * rows, (each + 1) * rows)
        grad_low_Rr = grad_RO[own].double() @ b_Or.double()
        tolerances = {"rtol": 1e-4, "atol": 1e-4 * (rows + outputs) ** 0.5}
        torch.testing.assert_close(grad_RI[own].double(), base_RI[own].double() + grad_low_Rr @ a_rI.double(), **tolerances)
        torch.testing.assert_close(grad_a_rI.double(), grad_low_Rr.t() @ x_RI[own].double(), **tolerances)
        torch.testing.assert_close(grad_b_Or.double(), grad_RO[own].double().t() @ low_Rr[own].double(), **tolerances)
        for number in (1, 3):
            torch.set_num_threads(number)
            try:
                alone_RI = base_RI[own].clone()
                alone = low_rank.update_gradients(grad_RO[own], x_RI[own], low_Rr[own], [(a_rI, b_Or)], alone_RI)
            finally:
                torch.set_num_threads(threads)
            assert torch.equal(alone_RI, grad_RI[own])
            assert torch.equal(alone[0][0], grad_a_rI)
            assert torch.equal(alone[0][1], grad_b_Or)


def joined(ranks, outputs, inputs, seed):
    """Factors of several targets in one pair, with zeros between them, a gap of outputs behind the first, and where each lies."""
    width, height = 16 * -(-sum(ranks) // 16), sum(outputs) + 5
    a_rI, b_Or, places, rank, output = torch.zeros(width, inputs), torch.zeros(height, width), [], 0, 0
    for number, (own_ranks, own_outputs) in enumerate(zip(ranks, outputs, strict=True)):
        a_rI[rank : rank + own_ranks] = noise(own_ranks, inputs, seed=seed + number)
        b_Or[output : output + own_outputs, rank : rank + own_ranks] = noise(own_outputs, own_ranks, seed=seed + 10 + number)
        places.append(TargetPlace(rank, own_ranks, output, own_outputs))
        rank, output = rank + own_ranks, output + own_outputs + 5 * (number == 0)
    return a_rI, b_Or, places


@pytest.mark.parametrize(
    ("ranks", "outputs"), [((8, 8, 8), (64, 32, 32)), ((1, 1, 1), (40, 7, 33)), ((32, 32), (70, 70)), ((5,), (90,)), ((33, 33, 33), (48, 16, 16))]
)
def test_zeros_between_joined_targets_are_left_out_and_change_nothing(ranks, outputs):
    rows, inputs, members = 29, 75, [joined(ranks, outputs, 75, seed) for seed in (1, 50)]
    factors, places = [(a_rI, b_Or) for a_rI, b_Or, _ in members], [own for *_, own in members]
    # A member may have other targets than its neighbour, and factors of the same shape all the same.
    fewer = len(ranks) % 2
    places[fewer] = places[fewer][:1]
    factors[fewer][1][:, places[fewer][0].ranks :] = 0.0
    x_RI, base_RO, grad_RO, base_RI = (noise(2 * rows, width, seed=width) for width in (inputs, sum(outputs) + 5, sum(outputs) + 5, inputs))
    whole_RO, out_RO, whole_RI, grad_RI = base_RO.clone(), base_RO.clone(), base_RI.clone(), base_RI.clone()
    low_Rr = low_rank.add_updates(whole_RO, x_RI, factors)
    assert torch.equal(low_rank.add_updates(out_RO, x_RI, factors, places), low_Rr)
    assert torch.equal(out_RO, whole_RO)
    whole = low_rank.update_gradients(grad_RO, x_RI, low_Rr, factors, whole_RI)
    found = low_rank.update_gradients(grad_RO, x_RI, low_Rr, factors, grad_RI, places)
    assert torch.equal(grad_RI, whole_RI)
    for (grad_a_rI, grad_b_Or), (whole_a_rI, whole_b_Or), own in zip(found, whole, places, strict=True):
        between = torch.ones_like(grad_b_Or, dtype=torch.bool)
        for rank, number, output, count in own:
            block = slice(output, output + count), slice(rank, rank + number)
            between[block] = False
            assert torch.equal(grad_b_Or[block], whole_b_Or[block])
            assert torch.equal(grad_a_rI[rank : rank + number], whole_a_rI[rank : rank + number])
        assert not bool(grad_b_Or[between].any())


def test_what_is_not_finite_in_one_joined_target_stays_out_of_the_others():
    a_rI, b_Or, places = joined((8, 8, 8), (64, 32, 32), 40, 1)
    x_RI, grad_RO = noise(20, 40), noise(20, b_Or.shape[0], seed=2)
    low_Rr = low_rank.add_updates(torch.zeros(20, b_Or.shape[0]), x_RI, [(a_rI, b_Or)], [places])
    clean = low_rank.update_gradients(grad_RO, x_RI, low_Rr, [(a_rI, b_Or)], None, [places])[0]
    second = slice(places[1].first_output, places[1].first_output + places[1].outputs)
    grad_RO[3, second] = float("nan")
    found = low_rank.update_gradients(grad_RO, x_RI, low_Rr, [(a_rI, b_Or)], None, [places])[0]
    assert bool(found[0][8:16].isnan().all())
    for kept in (slice(0, 8), slice(16, 24)):
        assert torch.equal(found[0][kept], clean[0][kept])
        assert torch.equal(found[1][:, kept], clean[1][:, kept])


def test_a_gradient_of_the_factors_alone_is_the_same():
    x_RI, grad_RO, low_Rr, factors = noise(8, 40), noise(8, 50), noise(8, 16), [(noise(16, 40, seed=1), noise(50, 16, seed=2))]
    with_rows, without = (low_rank.update_gradients(grad_RO, x_RI, low_Rr, factors, grad_RI) for grad_RI in (noise(8, 40), None))
    assert all(torch.equal(*pair) for pair in zip(with_rows[0], without[0], strict=True))


def test_an_update_writes_nothing_outside_of_its_rows_and_outputs():
    around_RO = torch.full((8, 90), 7.0)
    low_rank.add_updates(around_RO[2:6, 5:76], noise(4, 16), [(noise(16, 16, seed=1), noise(71, 16, seed=2))])
    around_RO[2:6, 5:76] = 7.0
    assert bool((around_RO == 7.0).all())


def test_what_is_not_finite_stays_in_its_row():
    x_RI, order = noise(13, 64), packed(noise(70, 64, seed=1))
    clean_RO = product(x_RI, order)
    x_RI[4, 3] = float("nan")
    found_RO = product(x_RI, order)
    assert bool(found_RO[4].isnan().all())
    assert torch.equal(found_RO[[*range(4), *range(5, 13)]], clean_RO[[*range(4), *range(5, 13)]])
