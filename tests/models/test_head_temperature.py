"""Log-probabilities at a temperature, against log-softmax in float64: values and gradients, by every way in which the head computes them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from bloomery.infer.sampling import divisors, scale_and_truncate
from bloomery.models import head
from bloomery.models.factors import Factors
from bloomery.models.head import HeadRows, pooled_logprobs, tempered, token_logprobs
from bloomery.models.native import bindings
from bloomery.types.generation import SamplingParams

ROWS, WIDTH, VOCAB, RANK, TARGETS = 24, 16, 700, 4, 3
TEMPERATURES = (1.0, 0.7, 2.5)
"""Of three segments of eight rows; the second has no factors."""


class Given(NamedTuple):
    hidden_RD: Tensor
    head_VD: Tensor
    factors: tuple[Factors | None, ...]
    targets_RK: Tensor
    weights_RK: Tensor


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def given(dtype: torch.dtype = torch.float32) -> Given:
    def leaf(*shape: int, seed: int = 0) -> Tensor:
        return noise(*shape, seed=seed).to(dtype).requires_grad_()

    adapted = [Factors(leaf(RANK, WIDTH, seed=seed), leaf(VOCAB, RANK, seed=seed)) for seed in (1, 2)]
    targets_RK = torch.randint(0, VOCAB, (ROWS, TARGETS), generator=torch.Generator().manual_seed(5))
    return Given(leaf(ROWS, WIDTH), leaf(VOCAB, WIDTH, seed=3), (adapted[0], None, adapted[1]), targets_RK, noise(ROWS, TARGETS, seed=6))


def segments(of: Given, temperatures: Sequence[float] = TEMPERATURES) -> list[HeadRows]:
    size = ROWS // len(temperatures)
    return [
        HeadRows(own, number * size, (number + 1) * size, temperature)
        for number, (own, temperature) in enumerate(zip(of.factors, temperatures, strict=True))
    ]


def leaves(of: Given) -> list[Tensor]:
    return [of.hidden_RD, of.head_VD, *(tensor for own in of.factors if own is not None for tensor in own)]


def computed(of: Given, softcap: float | None) -> tuple[Tensor, list[Tensor]]:
    found_RK = pooled_logprobs(of.hidden_RD, of.head_VD, segments(of), of.targets_RK, softcap)
    return found_RK, list(torch.autograd.grad((found_RK * of.weights_RK).sum(), leaves(of)))


def by_definition(of: Given, softcap: float | None) -> tuple[Tensor, list[Tensor]]:
    """In float64, by torch's own derivative."""
    wide = iter([leaf.detach().double().requires_grad_() for leaf in leaves(of)])
    everything = [hidden_RD, head_VD] = [next(wide), next(wide)]
    parts = []
    for number, (own, temperature) in enumerate(zip(of.factors, TEMPERATURES, strict=True)):
        rows_RD = hidden_RD[number * 8 : number * 8 + 8]
        logits_RV = rows_RD @ head_VD.t()
        if own is not None:
            a, b = next(wide), next(wide)
            everything += [a, b]
            logits_RV = logits_RV + rows_RD @ a.t() @ b.t()
        if softcap is not None:
            logits_RV = softcap * torch.tanh(logits_RV / softcap)
        parts.append(torch.log_softmax(logits_RV / temperature, -1))
    found_RK = torch.cat(parts).gather(1, of.targets_RK)
    return found_RK, list(torch.autograd.grad((found_RK * of.weights_RK.double()).sum(), everything))


WAYS = {
    "kept": {},
    "computed twice": {"_KEPT_BYTES": 0},
    # 64 rows are the least that a chunk has.
    "in chunks": {"_chunk_rows": lambda vocab_size: 4},
    "in chunks, computed twice": {"_chunk_rows": lambda vocab_size: 12, "_KEPT_BYTES": 0},
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch, way: str, softcap: float | None, native: bool) -> None:
    for name, value in WAYS[way].items():
        monkeypatch.setattr(head, name, value)
    if not native:
        monkeypatch.setattr(bindings, "available", lambda *tensors: False)
    of = given()
    (found_RK, gradients), (expected_RK, expected) = computed(of, softcap), by_definition(of, softcap)
    # float32 beside float64: products of 16 terms, and at 0.7 differences of logits that are 1.4 times as large.
    torch.testing.assert_close(found_RK.double(), expected_RK, rtol=2e-6, atol=5e-6)
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_half_precision_is_divided_in_float32(softcap: float | None) -> None:
    of = given(torch.bfloat16)
    (found_RK, gradients), (expected_RK, expected) = computed(of, softcap), by_definition(of, softcap)
    # bfloat16 has steps of 2**-8 of logits that go to 15, once more divided by 0.7; sums of gradients stray by as much of their largest.
    torch.testing.assert_close(found_RK.double(), expected_RK, rtol=0, atol=0.2)
    for got, want in zip(gradients, expected, strict=True):
        assert float((got.double() - want).abs().max()) < 0.05 * float(want.abs().max())


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("way", WAYS)
def test_a_temperature_beside_it_changes_no_bit_of_a_segment(monkeypatch: pytest.MonkeyPatch, way: str, softcap: float | None) -> None:
    for name, value in WAYS[way].items():
        monkeypatch.setattr(head, name, value)
    of = given()
    found_RK, (grad_hidden, _, *grad_factors) = computed(of, softcap)
    for segment, grads in zip(segments(of), (grad_factors[:2], [], grad_factors[2:]), strict=True):
        rows, own = slice(segment.start, segment.stop), [] if segment.factors is None else [*segment.factors]
        alone_RK = pooled_logprobs(
            of.hidden_RD[rows], of.head_VD, [HeadRows(segment.factors, 0, 8, segment.temperature)], of.targets_RK[rows], softcap
        )
        assert torch.equal(found_RK[rows], alone_RK)
        grad_alone, *grad_own = torch.autograd.grad((alone_RK * of.weights_RK[rows]).sum(), [of.hidden_RD, *own])
        assert torch.equal(grad_alone[rows], grad_hidden[rows])
        assert all(torch.equal(got, want) for got, want in zip(grad_own, grads, strict=True))


def test_at_temperature_one_nothing_is_computed_otherwise() -> None:
    of = given()
    plain = pooled_logprobs(of.hidden_RD, of.head_VD, segments(of, (1.0, 1.0, 1.0)), of.targets_RK)
    for segment in segments(of):
        rows = slice(segment.start, segment.stop)
        assert torch.equal(plain[rows], token_logprobs(of.hidden_RD[rows], of.head_VD, segment.factors, of.targets_RK[rows]))


@pytest.mark.parametrize("temperature", [0.01, 0.3, 0.7, 1.3, 100.0])
def test_trainer_and_sampler_divide_by_the_same_operations(temperature: float) -> None:
    logits_RV = noise(8, VOCAB) * 9
    drawn_RV = scale_and_truncate(logits_RV.numpy(), [SamplingParams(max_tokens=1, seed=0, temperature=temperature)] * 8)
    assert np.array_equal(drawn_RV, tempered(logits_RV.clone(), temperature).numpy())
    assert np.array_equal(drawn_RV, tempered(logits_RV.clone(), torch.from_numpy(divisors([temperature] * 8))).numpy())
    assert np.array_equal(divisors([temperature]), [[np.float32(temperature)]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_a_process_takes_for_its_default_dtype_changes_no_bit_of_a_temperature(dtype: torch.dtype) -> None:
    of = given()
    expected_RK, expected = computed(of, None)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found_RK, found = computed(of, None)
    finally:
        torch.set_default_dtype(usual)
    assert torch.equal(found_RK, expected_RK)
    assert all(torch.equal(got, want) for got, want in zip(found, expected, strict=True))
