"""The native kernels against float64, on awkward shapes; and what happens where they cannot be compiled."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.infer.sampling import Draw, choose, choose_along, uniforms
from bloomery.models.head import logsumexp, token_logprobs
from bloomery.models.native import bindings, multinomial, softmax
from bloomery.models.pointwise import rms_norm, rotate, swiglu
from bloomery.types.generation import SamplingParams

pytestmark = pytest.mark.skipif(
    os.environ.get("BLOOMERY_NATIVE") == "0" or shutil.which("cc") is None or not sys.platform.startswith("linux"),
    reason="torch computes everything here",
)
EPS = 1e-6


def test_a_machine_with_a_compiler_has_the_kernels() -> None:
    assert bindings.present()


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("width", [1, 7, 8, 33, 512, 1000])
def test_every_width_is_computed_whole(width: int) -> None:
    x, weight = noise(5, width) * 3, noise(width)
    x.requires_grad_()
    wide = x.detach().double().requires_grad_()
    found, expected = rms_norm(x, weight, EPS), F.rms_norm(wide, (width,), weight.double(), EPS)
    grad = noise(5, width).flip(0)
    torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=3e-6)
    (got,), (want,) = torch.autograd.grad(found, x, grad), torch.autograd.grad(expected, wide, grad.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=3e-6)
    inner = noise(5, 2 * width) * 4
    torch.testing.assert_close(swiglu(inner).double(), F.silu(inner[:, :width].double()) * inner[:, width:].double(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(logsumexp(x.detach()).double(), torch.logsumexp(wide.detach(), -1), rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("half", [1, 5, 8, 32])
def test_heads_of_a_wider_row_are_turned_where_they_lie(half: int) -> None:
    rows_RO, cos, sin = noise(6, 2 + 3 * 2 * half + 1), noise(6, 1, half), noise(6, 1, half).flip(0)
    x_RNE = rows_RO[:, 2:-1].unflatten(1, (3, 2 * half))[:, ::2]
    first, second = x_RNE.double().chunk(2, -1)
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    torch.testing.assert_close(rotate(x_RNE, cos, sin).double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rms_norm(x_RNE, noise(2 * half), EPS), rms_norm(x_RNE.contiguous(), noise(2 * half), EPS), rtol=0, atol=0)


def test_a_row_has_its_bits_whatever_stands_beside_it_and_however_many_threads_there_are() -> None:
    x, weight, inner = noise(700, 96), noise(96), noise(700, 384)
    whole = rms_norm(x, weight, EPS), swiglu(inner), logsumexp(inner)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for rows in (slice(0, 1), slice(13, 14), slice(5, 700)):
                part = rms_norm(x[rows], weight, EPS), swiglu(inner[rows]), logsumexp(inner[rows])
                assert all(torch.equal(mine, theirs[rows]) for mine, theirs in zip(part, whole, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_extremes_end_where_they_should() -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, 1e30, float("nan")]])
    got, want = swiglu(torch.cat([gate, torch.ones_like(gate)], -1)), F.silu(gate)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-36, equal_nan=True)
    rows = torch.tensor([[-1e30, 0.0, 5.0], [1e30, 1e30, -1e30], [-3e38, -3e38, -3e38]])
    torch.testing.assert_close(logsumexp(rows), torch.logsumexp(rows, -1), rtol=1e-6, atol=1e-6)
    assert not logsumexp(torch.tensor([[0.0, float("nan")], [0.0, float("inf")]])).isfinite().any()


def test_nothing_is_computed_of_no_rows() -> None:
    assert rms_norm(noise(0, 16), noise(16), EPS).shape == (0, 16)
    assert rotate(noise(0, 2, 16), noise(0, 1, 8), noise(0, 1, 8)).shape == (0, 2, 16)
    assert swiglu(noise(0, 16)).shape == (0, 8)
    assert logsumexp(noise(0, 16)).shape == (0,)


def test_log_probabilities_and_their_gradients_agree_with_float64() -> None:
    hidden, head, targets = noise(12, 16).requires_grad_(), noise(1000, 16), torch.randint(0, 1000, (12, 2))
    wide = hidden.detach().double().requires_grad_()
    found = token_logprobs(hidden, head, None, targets)
    expected = torch.log_softmax(wide @ head.double().t(), -1).gather(1, targets)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)
    (got,), (want,) = torch.autograd.grad(found.sum(), hidden), torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1, 5, 512, 513, 5000])
def test_numbers_fall_into_the_shares_of_float64(width: int) -> None:
    logs = (noise(3, width) * 4 - 6).numpy()
    logs[:, : width // 2 : 2] = -np.inf
    numbers = np.random.default_rng(width).random((3, 200))
    shares = np.cumsum(np.exp(logs.astype(np.float64)), -1)
    for row, found_k in enumerate(multinomial.invert(logs, numbers)):
        edges = shares[row] / shares[row, -1]
        assert np.isfinite(logs[row, found_k]).all()
        assert (numbers[row] <= edges[found_k] + 1e-6).all()
        assert (numbers[row] >= np.concatenate([[0.0], edges])[found_k] - 1e-6).all()


def test_the_first_and_the_last_number_find_what_has_weight() -> None:
    logs = np.full((1, 1500), -np.inf, np.float32)
    logs[0, [3, 700, 1400]] = 0.0
    assert multinomial.invert(logs, np.array([[2.0**-53, 0.4, 1 - 2.0**-53, 1.0]])).tolist() == [[3, 700, 1400, 1400]]
    nothing = np.full((2, 1500), [[-np.inf], [np.nan]], np.float32)
    # Weights far below one are drawn as often as they weigh, and the rest of a block's rounding falls to nobody.
    rare = np.full((1, 512), -17.4, np.float32)
    rare[0, :8], rare[0, -1] = 0.0, -80.0
    edges = np.cumsum(np.exp(rare[0].astype(np.float64)))
    numbers = np.linspace(edges[7], edges[-2], 700, endpoint=False)[None, 1:] / edges[-1]
    assert set(multinomial.invert(rare, numbers)[0].tolist()) == set(range(8, 511))
    assert ((multinomial.invert(nothing, np.full((2, 1), 0.5)) >= 0) & (multinomial.invert(nothing, np.full((2, 1), 0.5)) < 1500)).all()


@pytest.mark.parametrize("width", [1, 511, 1500])
def test_a_token_is_drawn_by_the_number_of_its_seed_position_and_sample(width: int) -> None:
    logits = noise(40, width).numpy() * 4
    draws = [Draw(row % 3, row * 1000, SamplingParams(max_tokens=1, seed=(row << 60) - row)) for row in range(40)]
    expected = multinomial.invert(logits - logits.max(-1, keepdims=True), uniforms(draws)[:, None])[:, 0]
    assert np.array_equal(choose(logits, draws).tokens_B, expected)
    # And of one sample, whose draws follow each other, with the reduction that all log-probabilities are made with.
    found, reduced = choose_along(logits, draws[0])
    follow = [draws[0]._replace(position=row) for row in range(40)]
    assert np.array_equal(found, choose(logits, follow).tokens_B)
    assert np.array_equal(reduced, softmax.logsumexp(torch.from_numpy(logits)).numpy())
    # Beside others, of which one is drawn otherwise, too.
    draws[7] = draws[7]._replace(params=SamplingParams(max_tokens=1, temperature=0.0, seed=7))
    beside = choose(logits[5:9], draws[5:9])
    assert beside.tokens_B.tolist() == [*expected[5:7], logits[7].argmax(), expected[8]]
    assert list(beside.processed) == [2]


@pytest.mark.slow
@pytest.mark.parametrize("lacks", ["a compiler", "the wish"])
def test_torch_computes_where_there_are_no_kernels(tmp_path: Path, lacks: str) -> None:
    package = tmp_path / "bloomery"
    shutil.copytree(Path(bindings.__file__).parents[2], package, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment |= {"PATH": str(tmp_path)} if lacks == "a compiler" else {"BLOOMERY_NATIVE": "0"}
    code = "import torch\nfrom bloomery.models import pointwise\nfrom bloomery.models.native import bindings\n"
    code += "print(bindings.identity(), pointwise.swiglu(torch.ones(1, 2)).item())"
    told = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout.split()[0] == "torch"
    assert abs(float(told.stdout.split()[1]) - 0.7310586) < 1e-6
    assert ("torch computes what native kernels would" in told.stderr) is (lacks == "a compiler")
    assert not list(tmp_path.rglob("native-*.so"))
