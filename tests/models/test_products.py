"""Products with weights: the right numbers, the right gradients, and the same bits of a row in any company."""

import pytest
import torch
import torch.nn.functional as F

from bloomery.models.factors import RANK_PAD, Factors, add_updates
from bloomery.models.native import half_gemm
from bloomery.models.pads import ROW_PAD
from bloomery.models.products import can_pack, library, linear, packed, product, rows_gradient

SHAPES = [(64, 128), (256, 1536), (768, 256), (33, 7)]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("compute", [product, rows_gradient])
def test_a_row_has_the_same_bits_among_any_padded_number_of_rows(inputs, outputs, compute):
    rows, weight = noise(700, inputs), noise(outputs, inputs, seed=1) if compute is product else noise(inputs, outputs, seed=1)
    whole = compute(rows, weight)
    for start, count in ((0, ROW_PAD), (8, 12), (100, 36), (4, 132), (60, 512), (96, 604)):
        assert torch.equal(compute(rows[start : start + count], weight), whole[start : start + count])


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_values_and_gradients_are_those_of_float64(inputs, outputs):
    rows, weight = noise(24, inputs).requires_grad_(), noise(outputs, inputs, seed=1).requires_grad_()
    upstream = noise(24, outputs, seed=2)
    linear(rows, weight).backward(upstream)
    exact_rows, exact_weight = rows.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = F.linear(exact_rows, exact_weight)
    exact.backward(upstream.double())
    # float32 sums of up to 1,536 products of about 1: 2**-24 * sqrt(1536) * a few.
    for ours, theirs in ((linear(rows, weight), exact), (rows.grad, exact_rows.grad), (weight.grad, exact_weight.grad)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-4)


def test_nothing_is_computed_for_what_wants_no_gradient():
    weight = noise(8, 4, seed=1)
    rows = noise(4, 4).requires_grad_()
    linear(rows, weight).sum().backward()
    torch.testing.assert_close(rows.grad, weight.sum(0).expand(4, 4))
    assert weight.grad is None
    assert not linear(noise(4, 4), weight).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_without_a_kernel_of_ours_is_torchs_own_product(dtype):
    # No whole step of inputs.
    rows, weight = noise(8, 16, dtype=dtype), noise(4, 16, seed=1, dtype=dtype)
    assert torch.equal(product(rows, weight), F.linear(rows, weight))


def test_the_library_of_a_dtype_is_told():
    tiles = half_gemm.multiplies(torch.empty(0, dtype=torch.bfloat16))
    assert library(torch.bfloat16, torch.device("cpu")) == ("native" if tiles else "torch")
    assert library(torch.float16, torch.device("cpu")) == "torch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_packed_weight_gives_the_bits_of_the_plain_one_for_any_padded_number_of_rows(inputs, outputs, dtype):
    if not can_pack(dtype, torch.device("cpu")):
        pytest.skip("nothing packs it here")
    rows, weight = noise(132, inputs, dtype=dtype), noise(outputs, inputs, seed=1, dtype=dtype)
    order = packed(weight)
    for count in (ROW_PAD, 8, 36, 132):
        assert torch.equal(product(rows[:count], order), product(rows[:count], weight))


def test_what_no_library_packs_is_not_packed():
    assert not can_pack(torch.float64, torch.device("cpu"))
    assert not can_pack(torch.float32, torch.device("meta"))


@pytest.mark.parametrize("rows", [4, 8, 12])
def test_few_rows_have_the_bits_of_an_update_that_they_have_among_many(rows: int) -> None:
    """In bfloat16, where one number in some ten thousands may differ."""
    for seed in range(24):
        generator = torch.Generator().manual_seed(seed)
        rows_RI, base_RO, a_rI, b_Or = (
            torch.randn(shape, generator=generator).bfloat16() for shape in ((960, 64), (960, 96), (RANK_PAD, 64), (96, RANK_PAD))
        )
        whole_RO, factors = base_RO.clone(), Factors(a_rI, b_Or)
        add_updates(whole_RO, rows_RI, [factors])
        for start in range(0, 960, rows):
            part_RO = base_RO[start : start + rows].clone()
            add_updates(part_RO, rows_RI[start : start + rows], [factors])
            assert torch.equal(part_RO, whole_RO[start : start + rows])
