"""Products of bfloat16 by our own tiles: summed in float32, rounded once, and a row's bits depend on the row and the matrix alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.models.native import half_gemm
from bloomery.models.products import Panels, packed, product, unpacked

pytestmark = pytest.mark.skipif(not half_gemm.multiplies(torch.empty(0, dtype=torch.bfloat16)), reason="no tiles of bfloat16 here")
SIZES = st.integers(1, 140)
STEPS = st.integers(1, 20).map(lambda count: 32 * count)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, STEPS)
def test_a_number_is_the_exact_sum_rounded_once(rows, outputs, inputs):
    x_RI, w_OI = noise(rows, inputs), noise(outputs, inputs, seed=1)
    exact_RO = x_RI.double() @ w_OI.double().t()
    # Half a unit of the last of eight digits, and what float32 loses on the way.
    lost_RO = x_RI.double().abs() @ w_OI.double().abs().t() * inputs * 2.0**-24
    assert ((product(x_RI, w_OI).double() - exact_RO).abs() <= exact_RO.abs() * 2.0**-8 + lost_RO).all()


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, STEPS)
def test_a_packed_matrix_gives_the_same_bits_and_comes_back_whole(rows, outputs, inputs):
    x_RI, w_OI = noise(rows, inputs), noise(outputs, inputs, seed=1)
    order = packed(w_OI)
    assert isinstance(order, Panels)
    assert torch.equal(product(x_RI, order), product(x_RI, w_OI))
    assert torch.equal(unpacked(order), w_OI)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neither_rows_beside_it_nor_threads_change_a_row(threads):
    x_RI, w_OI = noise(700, 1056), noise(200, 1056, seed=1)
    order = packed(w_OI)
    whole_RO = product(x_RI, order)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for start, stop in ((0, 1), (5, 8), (7, 20), (100, 113), (0, 699), (699, 700), (200, 264), (31, 64)):
            for weight in (order, w_OI):
                assert torch.equal(product(x_RI[start:stop], weight), whole_RO[start:stop])
    finally:
        torch.set_num_threads(before)


def test_rows_and_matrices_that_do_not_lie_in_one_piece_are_read_where_they_lie():
    wide_RI, tall_OI = noise(9, 80), noise(40, 90, seed=1)
    plain = product(wide_RI[:, 8:72].contiguous(), tall_OI[:, 13:77].contiguous())
    assert torch.equal(product(wide_RI[:, 8:72], tall_OI[:, 13:77]), plain)
    turned_IO = tall_OI[:, 13:77].t().contiguous()
    assert torch.equal(product(wide_RI[:, 8:72], turned_IO.t()), plain)


def test_inputs_that_are_no_whole_steps_go_to_the_library():
    x_RI, w_OI = noise(9, 40), noise(24, 40, seed=1)
    assert not half_gemm.multiplies(x_RI, w_OI)
    torch.testing.assert_close(product(x_RI, w_OI).float(), x_RI.float() @ w_OI.float().t(), rtol=2e-2, atol=2e-2)
    assert torch.equal(unpacked(packed(w_OI)), w_OI)


def test_what_is_not_finite_stays_in_its_row():
    x_RI, w_OI = noise(40, 64), noise(40, 64, seed=1)
    x_RI[3, 5] = torch.inf
    x_RI[20, 0] = torch.nan
    found_RO = product(x_RI, w_OI)
    assert set((~found_RO.isfinite()).any(1).nonzero().flatten().tolist()) == {3, 20}
