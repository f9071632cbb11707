"""Products of float32 by tiles of bfloat16: as exact as the library's, and a number's bits depend on its own row and column alone."""

import ctypes
import mmap
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.models import products
from bloomery.models.native import bindings, split_gemm

with_tiles = pytest.mark.skipif(not split_gemm.multiplies(torch.empty(0)), reason="no tiles of bfloat16 here")
ODD_SIZES = ((1, 1, 1), (33, 70, 45), (16, 32, 16), (17, 1100, 31), (300, 513, 64), (65, 31, 130))


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands(rows, steps, columns, *, turned=(False, False)):
    """Each with neighbouring steps, or with neighbouring rows or columns."""
    a_RS = noise(steps, rows).t() if turned[0] else noise(rows, steps)
    return a_RS, noise(columns, steps, seed=1).t() if turned[1] else noise(steps, columns, seed=1)


def worst(found, a_RS, b_SC):
    """Largest error, relative to the sum of what was added up."""
    exact = a_RS.double() @ b_SC.double()
    return float(((found.double() - exact).abs() / (a_RS.double().abs() @ b_SC.double().abs()).clamp_min(1e-30)).max())


def before_a_wall(values):
    """The same numbers at the very end of what may be read or written."""
    page = mmap.PAGESIZE
    room = -(-values.nbytes // page) * page
    memory = mmap.mmap(-1, room + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + room), page, 0) == 0
    array = np.frombuffer(memory, np.float32, values.numel(), room - values.nbytes).reshape(values.shape)
    array[...] = values.numpy()
    return torch.from_numpy(array)


@with_tiles
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("rows", "steps", "columns"), ODD_SIZES)
def test_every_number_is_as_near_to_float64_as_a_float32_can_be_expected_to_be(rows, steps, columns, turned):
    a_RS, b_SC = operands(rows, steps, columns, turned=turned)
    found = split_gemm.product(a_RS, b_SC)
    # A unit in the last place of each product and of some sums of 512 steps: half of the digits would be at 2**-12, two parts of three at 2**-17.
    assert worst(found, a_RS, b_SC) < 4 * 2.0**-24


@with_tiles
def test_its_errors_are_not_larger_than_the_librarys():
    errors = {"split": [], "library": []}
    for seed in range(6):
        a_RS, b_SC = noise(96, 700, seed=seed), noise(700, 160, seed=90 + seed)
        exact = a_RS.double() @ b_SC.double()
        for name, found in (("split", split_gemm.product(a_RS, b_SC)), ("library", a_RS @ b_SC)):
            errors[name].append(float((found - exact).square().mean().sqrt()))
    assert sum(errors["split"]) <= sum(errors["library"])


@with_tiles
@settings(max_examples=30, deadline=None)
@given(st.floats(1e-18, 1e15), st.integers(1, 40), st.integers(1, 80), st.integers(1, 40))
def test_small_and_large_numbers_keep_their_digits(scale, rows, steps, columns):
    a_RS, b_SC = noise(rows, steps) * scale, noise(steps, columns, seed=1)
    assert worst(split_gemm.product(a_RS, b_SC), a_RS, b_SC) < 4 * 2.0**-24


@with_tiles
@pytest.mark.parametrize("threads", [1, 2, 3, 4, 6])
def test_neither_company_nor_threads_change_a_number(threads):
    a_RS, b_SC = operands(300, 600, 200)
    whole = split_gemm.product(a_RS, b_SC)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(split_gemm.product(a_RS, b_SC), whole)
        for start, stop in ((0, 1), (5, 8), (31, 33), (100, 229), (299, 300)):
            assert torch.equal(split_gemm.product(a_RS[start:stop], b_SC), whole[start:stop])
        for start, stop in ((0, 1), (15, 49), (64, 200)):
            assert torch.equal(split_gemm.product(a_RS, b_SC[:, start:stop]), whole[:, start:stop])
    finally:
        torch.set_num_threads(before)


@with_tiles
def test_a_sum_goes_on_from_what_there_is_and_nothing_else_is_written():
    for steps in (90, 1200):
        a_RS, b_SC = operands(45, steps, 70, turned=(True, False))
        around = torch.full((60, 100), 7.0)
        own = around[5:50, 9:79]
        split_gemm.product(a_RS, b_SC, own)
        torch.testing.assert_close(own.double(), a_RS.double() @ b_SC.double() + 7.0, rtol=0, atol=1e-4)
        own.fill_(7.0)
        assert bool((around == 7.0).all())


@with_tiles
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)])
def test_nothing_is_read_or_written_behind_the_end(turned):
    for rows, steps, columns in ODD_SIZES:
        a_RS, b_SC = operands(rows, steps, columns, turned=turned)
        walled = [before_a_wall(x.t()).t() if own else before_a_wall(x) for x, own in zip((a_RS, b_SC), turned, strict=True)]
        out_RC = before_a_wall(torch.zeros(rows, columns))
        assert torch.equal(split_gemm.product(*walled, out_RC), split_gemm.product(a_RS, b_SC))


@with_tiles
def test_operands_are_read_where_they_lie():
    wide_RS, tall_SC = noise(50, 300), noise(200, 90, seed=1)
    view, other = wide_RS[3:40, 20:150], tall_SC[10:140, 7:71]
    assert torch.equal(split_gemm.product(view, other), split_gemm.product(view.contiguous(), other.contiguous()))
    strided, spread = noise(37, 260)[:, ::2], noise(1, 130).expand(37, 130)
    for a_RS in (strided, spread, spread.t().contiguous().t()):
        assert torch.equal(split_gemm.product(a_RS, other), split_gemm.product(a_RS.contiguous(), other))


@with_tiles
def test_of_nothing_there_is_nothing_and_of_no_steps_zeros():
    assert split_gemm.product(noise(0, 40), noise(40, 30)).shape == (0, 30)
    assert split_gemm.product(noise(20, 40), noise(40, 0)).shape == (20, 0)
    assert torch.equal(split_gemm.product(noise(20, 0), noise(0, 30)), torch.zeros(20, 30))


@with_tiles
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_shows_in_its_row_or_column_and_in_no_other(value):
    a_RS, b_SC = operands(40, 64, 70)
    clean = split_gemm.product(a_RS, b_SC)
    a_RS[4, 3] = value
    b_SC[60, 33] = value
    found = split_gemm.product(a_RS, b_SC)
    struck = torch.zeros(40, 70, dtype=torch.bool)
    struck[4], struck[:, 33] = True, True
    assert not bool(found[struck].isfinite().any())
    assert torch.equal(found[~struck], clean[~struck])


def test_gradients_of_a_row_and_of_a_weight_depend_on_nothing_but_their_own_rows():
    for width in (64, 300):
        grad_RO, weight_OI, input_RI = noise(300, width), noise(width, width, seed=1), noise(300, width, seed=2)
        whole = products.rows_gradient(grad_RO, weight_OI)
        torch.testing.assert_close(whole.double(), grad_RO.double() @ weight_OI.double(), rtol=0, atol=1e-4)
        for start, stop in ((0, 4), (8, 40), (100, 300)):
            assert torch.equal(products.rows_gradient(grad_RO[start:stop], weight_OI), whole[start:stop])
        of_weight = products.weight_gradient(grad_RO, input_RI)
        torch.testing.assert_close(of_weight.double(), grad_RO.double().t() @ input_RI.double(), rtol=0, atol=1e-4)
        twice = products.add_weight_gradient(of_weight.clone(), grad_RO, input_RI)
        torch.testing.assert_close(twice, 2 * of_weight, rtol=1e-5, atol=1e-4)


@with_tiles
def test_gradients_of_wide_weights_come_from_it_and_those_of_narrow_ones_do_not():
    for inputs, split in ((256, True), (128, False)):
        grad_RO, weight_OI, input_RI = noise(64, 320), noise(320, inputs, seed=1), noise(64, inputs, seed=2)
        of_rows, of_weight = products.rows_gradient(grad_RO, weight_OI), products.weight_gradient(grad_RO, input_RI)
        assert torch.equal(of_rows, split_gemm.product(grad_RO, weight_OI)) is split
        assert torch.equal(of_weight, split_gemm.product(grad_RO.t(), input_RI)) is split
        few = grad_RO[:60], input_RI[:60]
        assert torch.equal(products.weight_gradient(*few), few[0].t() @ few[1])


@pytest.mark.skipif(shutil.which("cc") is None or platform.machine() != "x86_64", reason="no C compiler for x86 here")
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512", "sapphirerapids"])
def test_the_kernel_compiles_for_processors_with_tiles_and_without(processor, tmp_path):
    source = Path(bindings.__file__).parents[1] / "kernels" / "split_product.c"
    flags = [f"-march={processor}", "-DPANEL=32", "-fopenmp", "-Wall", "-Wno-unused-function", "-Werror"]
    subprocess.run(["cc", *flags, "-c", str(source), "-o", str(tmp_path / "made.o")], check=True, capture_output=True, timeout=60)
