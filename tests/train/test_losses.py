"""Each loss against its closed form, in float64."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from bloomery.train.losses import LOSSES, find_loss
from bloomery.types.errors import InvalidInput

SEQUENCE = torch.zeros(0, dtype=torch.long)
"""Losses of single predictions do not look at it."""


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def terms_and_gradient(name: str, learner: Tensor, /, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    leaf = learner.clone().requires_grad_()
    terms = LOSSES[name].terms(leaf, inputs, SEQUENCE)
    terms.sum().backward()
    assert leaf.grad is not None
    return terms.detach(), leaf.grad


def test_cross_entropy_is_minus_weight_times_logprob():
    logprobs, weights = float64(-1.5, -0.25, -3.0), float64(1.0, -2.5, 0.5)
    terms, gradient = terms_and_gradient("cross_entropy", logprobs, weights=weights)
    assert torch.equal(terms, -logprobs * weights)
    assert torch.equal(gradient, -weights)


def test_cross_entropy_of_soft_targets_is_summed_over_them():
    logprobs, weights = torch.log_softmax(torch.randn(4, 3, dtype=torch.float64), -1), torch.rand(4, 3, dtype=torch.float64)
    terms, gradient = terms_and_gradient("cross_entropy", logprobs, weights=weights)
    assert float(terms.sum()) == pytest.approx(float(-(weights * logprobs).sum()), rel=1e-14)
    assert torch.equal(gradient, -weights)


@pytest.mark.parametrize("masked", [-math.inf, math.nan, -1e300])
def test_a_weight_of_zero_keeps_any_logprob_out_of_loss_and_gradient(masked):
    terms, gradient = terms_and_gradient("cross_entropy", float64(masked, -1.0), weights=float64(0.0, 2.0))
    assert terms.tolist() == [0.0, 2.0]
    assert gradient.tolist() == [0.0, -2.0]


def test_importance_sampling_follows_its_formula():
    p, q, advantages = float64(-1.0, -2.0, -0.5), float64(-1.3, -1.1, -0.5), float64(0.7, -1.2, 3.0)
    terms, gradient = terms_and_gradient("importance_sampling", p, logprobs=q, advantages=advantages)
    expected = [-math.exp(pi - qi) * a for pi, qi, a in zip(p.tolist(), q.tolist(), advantages.tolist(), strict=True)]
    torch.testing.assert_close(terms, float64(*expected), rtol=1e-15, atol=0)
    # d/dp of -exp(p - q) A is itself.
    assert torch.equal(gradient, terms)


def test_on_policy_the_importance_gradient_is_exactly_minus_the_advantage():
    logprobs = torch.log_softmax(torch.randn(50, generator=torch.Generator().manual_seed(0)), 0)
    advantages = torch.randn(50, generator=torch.Generator().manual_seed(1))
    _, gradient = terms_and_gradient("importance_sampling", logprobs, logprobs=logprobs.clone(), advantages=advantages)
    assert torch.equal(gradient, -advantages)


@pytest.mark.parametrize(("p", "q"), [(-1.0, -1e6), (-math.inf, 0.0), (-1.0, -math.inf), (math.nan, 0.0)])
def test_an_advantage_of_zero_keeps_any_ratio_out_of_loss_and_gradient(p, q):
    terms, gradient = terms_and_gradient("importance_sampling", float64(p, -1.0), logprobs=float64(q, -1.0), advantages=float64(0.0, 1.0))
    assert terms.tolist() == [0.0, -1.0]
    assert gradient.tolist() == [0.0, -1.0]


def test_an_overflowing_ratio_is_an_infinite_loss_and_not_a_silent_number():
    terms, _ = terms_and_gradient("importance_sampling", float64(0.0), logprobs=float64(-1e4), advantages=float64(1.0))
    assert terms.tolist() == [-math.inf]


def test_importance_metrics_are_those_of_the_ratio():
    p, q, advantages = torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-1.5, -1.75, 0.0]), torch.tensor([1.0, -1.0, 0.0])
    metrics = LOSSES["importance_sampling"].metrics(p, {"logprobs": q, "advantages": advantages}, SEQUENCE)
    ratios = [math.exp(0.5), math.exp(-0.25)]
    assert metrics["tokens:sum"] == 2
    assert metrics["ratio:sum"] == pytest.approx(sum(ratios), rel=1e-12)
    assert metrics["k3:sum"] == pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in ratios), rel=1e-12)
    assert metrics["logprob_diff:max"] == 0.5


def test_on_policy_k3_is_exactly_zero():
    logprobs = torch.randn(9)
    metrics = LOSSES["importance_sampling"].metrics(logprobs, {"logprobs": logprobs.clone(), "advantages": torch.ones(9)}, SEQUENCE)
    assert (metrics["k3:sum"], metrics["logprob_diff:max"], metrics["ratio:sum"]) == (0.0, 0.0, 9.0)


def test_cross_entropy_metrics_count_what_has_weight():
    metrics = LOSSES["cross_entropy"].metrics(torch.zeros(3), {"weights": torch.tensor([0.0, -2.0, 0.5])}, SEQUENCE)
    assert metrics == {"weights:sum": -1.5, "tokens:sum": 2.0}


def test_metric_names_carry_one_reduction():
    empty = {name: torch.zeros(2) for loss in LOSSES.values() for name in loss.inputs}
    for loss in LOSSES.values():
        names = loss.metrics(torch.zeros(2), empty, SEQUENCE)
        assert all(name.split(":")[1] in ("sum", "max", "min", "mean") and name.count(":") == 1 for name in names)


def test_an_unknown_loss_names_those_there_are():
    with pytest.raises(InvalidInput, match=r"`pppo`: one of cross_entropy, importance_sampling"):
        find_loss("pppo", {})


def test_an_option_that_a_loss_lacks_is_refused():
    with pytest.raises(InvalidInput, match="`cross_entropy` has no option `beta`"):
        find_loss("cross_entropy", {"beta": 0.1})


def test_sums_do_not_depend_on_the_number_of_threads():
    values = torch.from_numpy(np.random.default_rng(0).normal(size=100_000).astype(np.float32))
    threads = torch.get_num_threads()
    sums = set()
    for count in (1, 2):
        torch.set_num_threads(count)
        sums.add(LOSSES["cross_entropy"].metrics(values, {"weights": values}, SEQUENCE)["weights:sum"])
    torch.set_num_threads(threads)
    assert len(sums) == 1
