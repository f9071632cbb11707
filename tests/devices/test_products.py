"""Products of a GPU's own kernels: the right numbers, and the bits of a row whatever is beside it, with whichever tiles."""

import itertools

import pytest
import torch

from bloomery.models.gpu import products
from bloomery.models.gpu.products import multiply

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
DTYPES = [torch.float32, torch.bfloat16]
# Whole tiles, whole vectors alone, and neither; a rank.
SIZES = [(256, 384), (272, 208), (261, 77), (320, 16)]
LAYOUTS = {"forward": (False, True), "rows_gradient": (False, False), "weight_gradient": (True, False)}
ROWS = 304


def noise(*shape: int, dtype: torch.dtype, in_columns: bool, seed: int) -> torch.Tensor:
    found = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)
    return found.mT.contiguous().mT if in_columns else found


def operands(dtype: torch.dtype, layout: str, summed: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three members."""
    a_turned, b_turned = LAYOUTS[layout]
    a_MRS = noise(3, ROWS, summed, dtype=dtype, in_columns=a_turned, seed=0)
    return a_MRS, noise(3, summed, columns, dtype=dtype, in_columns=b_turned, seed=1)


@pytest.mark.parametrize(("summed", "columns"), SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company_and_the_right_ones(dtype: torch.dtype, layout: str, summed: int, columns: int) -> None:
    a_MRS, b_MSC = operands(dtype, layout, summed, columns)
    whole_MRC = multiply(a_MRS, b_MSC)
    exact_MRC = a_MRS.double() @ b_MSC.double()
    # Sums of up to 320 products of about 1, rounded to 24 bits each, and once to those of the dtype.
    torch.testing.assert_close(whole_MRC.double(), exact_MRC, rtol=torch.finfo(dtype).eps, atol=1e-4)
    for member, (first, count) in itertools.product(range(3), ((0, 1), (7, 1), (5, 2), (3, 32), (1, 65), (0, 200), (0, ROWS))):
        rows = slice(first, first + count)
        assert torch.equal(multiply(a_MRS[member, rows], b_MSC[member]), whole_MRC[member, rows]), (member, rows)
        assert torch.equal(multiply(a_MRS[:, rows].clone(), b_MSC), whole_MRC[:, rows]), rows


@pytest.mark.parametrize(("summed", "columns"), SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_tiles_agree_here(dtype: torch.dtype, layout: str, summed: int, columns: int) -> None:
    alike = products._like(ROWS), products._like(summed), products._like(columns)
    assert products._tiles_agree(dtype, torch.device("cuda", 0), alike, LAYOUTS[layout])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_and_columns_of_one_row_have_the_bits_of_plain_rows(dtype: torch.dtype) -> None:
    wide = noise(ROWS, 272, dtype=dtype, in_columns=False, seed=0)
    for summed in (256, 255):
        weight = noise(summed, 96, dtype=dtype, in_columns=True, seed=1)
        rows = wide[:, 3 : 3 + summed]
        wanted = multiply(rows.clone(), weight)
        assert torch.equal(multiply(rows, weight), wanted)
        assert torch.equal(multiply(rows[4:5], weight), wanted[4:5])
        assert torch.equal(multiply(rows[4].clone()[:, None].t(), weight), wanted[4:5])
        assert torch.equal(multiply(rows[:, None].transpose(0, 1).expand(2, -1, -1), weight.expand(2, -1, -1))[1], wanted)


@pytest.mark.parametrize("rows", [1, 40, 70, ROWS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_added_to_is_added_before_it_is_rounded(dtype: torch.dtype, rows: int) -> None:
    a, b = noise(rows, 48, dtype=dtype, in_columns=False, seed=0), noise(48, 80, dtype=dtype, in_columns=True, seed=1)
    base = noise(rows, 80, dtype=dtype, in_columns=False, seed=2)
    wanted = base.double() + a.double() @ b.double()
    assert multiply(a, b, added_to=base) is base
    torch.testing.assert_close(base.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)
