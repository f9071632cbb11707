"""A run whose log-probabilities are those of another temperature: the whole gradient against torch's own of a head in float64, and its company."""

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from bloomery.models.head import HeadRows
from bloomery.train import passes
from bloomery.train.passes import Share, compute
from bloomery.train.run import TrainableRun
from bloomery.types.losses import LOSSES, TEMPERATURE
from bloomery.types.operations import ForwardBackward, ForwardBackwardResult
from tests.train import builders
from tests.train.builders import finish, gradients, relative_difference
from tests.train.test_losses import sampled

T = 0.7
SOFTCAPS = (None, 8.0)


def naive(hidden_RD: Tensor, head_VD: Tensor, rows: Sequence[HeadRows], targets_RK: Tensor, softcap: float | None = None) -> Tensor:
    """Log-probabilities by their definition, in float64."""
    found = []
    for factors, start, stop, temperature in rows:
        own_RD = hidden_RD[start:stop].double()
        logits_RV = own_RD @ head_VD.double().t()
        if factors is not None:
            logits_RV = logits_RV + own_RD @ factors.a.double().t() @ factors.b.double().t()
        if softcap is not None:
            logits_RV = softcap * torch.tanh(logits_RV / softcap)
        found.append(torch.log_softmax(logits_RV / temperature, -1))
    return torch.cat(found).gather(1, targets_RK).float()


def trained(rank: int, softcap: float | None, *, budget: int = 4096, dtype: torch.dtype = torch.float32) -> TrainableRun:
    model = builders.decoder(dtype=dtype)
    model.config = dataclasses.replace(model.config, logit_softcap=softcap)
    run = builders.run(model, rank=rank, budget=budget)
    if rank:
        # A fresh adapter changes nothing, and half of its gradient is 0.
        run.weights.masters.add_(torch.randn(run.weights.masters.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
        run.weights.refresh()
    return run


def learn(name: str, **config: float) -> ForwardBackward:
    data = builders.supervised([5, 37, 12, 64, 4, 90]) if name == "cross_entropy" else sampled()
    return ForwardBackward(loss=name, loss_config=config, data=data)


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("rank", [8, 0])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch, name: str, rank: int, softcap: float | None) -> None:
    operation = learn(name, temperature=T)
    run, oracle = trained(rank, softcap), trained(rank, softcap)
    found = finish(run, operation)
    monkeypatch.setattr(passes, "pooled_logprobs", naive)
    expected = finish(oracle, operation)
    assert isinstance(found, ForwardBackwardResult), found
    assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=2e-5)
    for got, want in zip(builders.logprobs(found), builders.logprobs(expected), strict=True):
        # float32 beside float64: products of 64 terms, and logits up to 15 divided by 0.7.
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    # Of each factor or matrix, relative to its norm: float32 through two layers.
    assert relative_difference(gradients(run), gradients(oracle)) < 5e-5
    assert relative_difference(gradients(run), gradients_at(name, rank, softcap, 1.0)) > 0.05


def gradients_at(name: str, rank: int, softcap: float | None, temperature: float) -> dict[str, Tensor]:
    run = trained(rank, softcap)
    finish(run, learn(name, temperature=temperature))
    return gradients(run)


@pytest.mark.parametrize("rank", [8, 0])
@pytest.mark.parametrize("name", ["cross_entropy", "gspo"])
def test_micro_batches_change_neither_result_nor_gradient(name: str, rank: int) -> None:
    whole, parts = trained(rank, None), trained(rank, None, budget=64)
    left, right = (finish(run, learn(name, temperature=T)) for run in (whole, parts))
    assert left == right
    # float32 sums in another order.
    assert relative_difference(gradients(parts), gradients(whole)) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_runs_of_several_temperatures_share_a_pass_and_keep_their_bits(dtype: torch.dtype, softcap: float | None) -> None:
    first = trained(8, softcap, dtype=dtype)
    model, runs, shares = first.weights.decoder, [], []
    operations = [learn("ppo"), learn("ppo", temperature=T), learn("cispo", temperature=1.9), learn("cross_entropy", temperature=0.3)]
    for number, operation in enumerate(operations):
        run = builders.run(model, run_id=f"run-{number}", rank=8)
        run.weights.masters.copy_(first.weights.masters)
        run.weights.refresh()
        runs.append(run.execute(operation))
        shares.append(next(runs[-1]))
    together = compute(shares)
    kept = [[tensor.grad.clone() for tensor in share.weights.fused().tensors if tensor.grad is not None] for share in shares]
    for share, found, grads in zip(shares, together, kept, strict=True):
        (alone,) = compute([Share(share.weights, share.packed, share.loss, True)])
        assert torch.equal(found.logprobs_RK, alone.logprobs_RK)
        own = [tensor.grad for tensor in share.weights.fused().tensors if tensor.grad is not None]
        assert all(torch.equal(got, want) for got, want in zip(grads, own, strict=True))
    assert len({found.logprobs_RK.numpy().tobytes() for found in together[:3]}) == 3


def test_metrics_alone_are_the_same_at_a_temperature() -> None:
    run, brief = trained(8, None), trained(8, None)
    operation = learn("ppo", temperature=T)
    told, short = finish(run, operation), finish(brief, msgspec.structs.replace(operation, return_logprobs=False))
    assert told.metrics == short.metrics
    assert relative_difference(gradients(brief), gradients(run)) == 0


@pytest.mark.parametrize("name", LOSSES)
def test_without_a_temperature_all_is_as_at_one(name: str) -> None:
    plain, said = trained(8, None), trained(8, None)
    assert finish(plain, learn(name)) == finish(said, learn(name, **{TEMPERATURE: 1.0}))
    assert relative_difference(gradients(said), gradients(plain)) == 0
