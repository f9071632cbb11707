"""The pointwise parts against autograd's own backward in float64, and without gradients to the same bits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.models.pointwise import rms_norm, rotate, swiglu

EPS = 1e-6


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("shape", [(12, 32), (8, 3, 16), (1100, 100), (600, 2, 70)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_a_norms_value_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(*shape, generator=generator).to(dtype) for _ in range(2))
    weight = (1 + 0.1 * torch.randn(shape[-1], generator=generator)).to(dtype)
    ours = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    wide = [x.double().requires_grad_(), weight.double().requires_grad_()]
    found, expected = rms_norm(*ours, EPS), plain_norm(*wide)
    gradients = zip((found, *torch.autograd.grad(found, ours, grad)), (expected, *torch.autograd.grad(expected, wide, grad.double())), strict=True)
    for got, want in gradients:
        assert got.dtype == dtype
        assert (got.double() - want).norm() <= tolerance * want.norm()


def test_the_rotation_and_the_gate_have_the_gradients_of_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    x, cos, sin = torch.randn(6, 2, 8, generator=generator), torch.randn(6, 1, 4, generator=generator), torch.randn(6, 1, 4, generator=generator)
    for ours, plain in ((lambda t: rotate(t, cos, sin), lambda t: plain_rotate(t, cos, sin)), (swiglu, plain_swiglu)):
        values = [part(x) for part in (ours, plain)]
        gradients = [torch.autograd.grad(part(tensor := x.clone().requires_grad_()).square().sum(), tensor)[0] for part in (ours, plain)]
        torch.testing.assert_close(*values)
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_with_and_without_gradients(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(12, 3, 16, generator=generator).to(dtype), torch.rand(16, generator=generator).to(dtype)
    cos, sin = (torch.randn(12, 1, 8, generator=generator).to(dtype) for _ in range(2))
    for part in (lambda t: rms_norm(t, weight, EPS), lambda t: rotate(t, cos, sin), swiglu):
        with torch.no_grad():
            without = part(x)
        assert torch.equal(without, part(x.clone().requires_grad_()))
