"""Losses of pairs against automatic differentiation in float64, and the weights that carry their gradients."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid

from bloomery.recipes.preference import Dpo, Orpo, Pair, PairLoss, both, judge, weighed
from bloomery.recipes.sft import datum
from bloomery.types.arrays import Array
from bloomery.types.operations import ForwardBackwardResult

LOGPROBS = np.array([[-12.0, -9.0], [-3.0, -30.0], [-0.4, -0.2], [-80.0, -81.0]])
LENGTHS = np.array([[10.0, 8.0], [3.0, 20.0], [1.0, 2.0], [40.0, 41.0]])
REFERENCE = np.array([[-11.0, -10.0], [-4.0, -25.0], [-0.5, -0.1], [-70.0, -90.0]])


def dpo(logprobs: torch.Tensor, beta: float, smoothing: float) -> torch.Tensor:
    """As the paper writes it, with the label smoothing of conservative DPO."""
    ratios = logprobs - torch.from_numpy(REFERENCE)
    logits = beta * (ratios[:, 0] - ratios[:, 1])
    return (-(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)).mean()


def orpo(logprobs: torch.Tensor, weight: float) -> torch.Tensor:
    """Of the paper's equations 4 to 7."""
    means = logprobs / torch.from_numpy(LENGTHS)
    odds = means - torch.log1p(-torch.exp(means))
    return (-means[:, 0] - weight * logsigmoid(odds[:, 0] - odds[:, 1])).mean()


@pytest.mark.parametrize(
    ("loss", "oracle"),
    [
        (Dpo(beta=0.1), lambda logprobs: dpo(logprobs, 0.1, 0.0)),
        (Dpo(beta=2.0, label_smoothing=0.2), lambda logprobs: dpo(logprobs, 2.0, 0.2)),
        (Orpo(weight=0.1), lambda logprobs: orpo(logprobs, 0.1)),
        (Orpo(weight=3.0), lambda logprobs: orpo(logprobs, 3.0)),
    ],
    ids=["dpo", "dpo-smoothed", "orpo", "orpo-heavy"],
)
def test_loss_and_derivatives_are_those_of_automatic_differentiation(loss: PairLoss, oracle: Callable[[torch.Tensor], torch.Tensor]) -> None:
    logprobs = torch.from_numpy(LOGPROBS).requires_grad_()
    expected = oracle(logprobs)
    expected.backward()
    judged = loss(LOGPROBS, LENGTHS, REFERENCE)
    assert logprobs.grad is not None
    assert judged.loss == pytest.approx(expected.item(), rel=1e-12)
    np.testing.assert_allclose(judged.slopes, logprobs.grad.numpy(), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("loss", [Dpo(beta=0.5, label_smoothing=0.1), Orpo(weight=0.7)], ids=["dpo", "orpo"])
def test_a_pair_of_weight_two_is_the_pair_twice(loss: PairLoss) -> None:
    weights, often = np.array([2.0, 1.0, 3.0, 1.0]), [0, 0, 1, 2, 2, 2, 3]
    judged, repeated = loss(LOGPROBS, LENGTHS, REFERENCE, weights), loss(LOGPROBS[often], LENGTHS[often], REFERENCE[often])
    assert judged.loss == pytest.approx(repeated.loss, rel=1e-12)
    assert judged.shown == pytest.approx(repeated.shown, rel=1e-12)
    together = np.array([repeated.slopes[[place for place, pair in enumerate(often) if pair == number]].sum(axis=0) for number in range(4)])
    np.testing.assert_allclose(judged.slopes, together, rtol=1e-12)
    # Weights say how pairs stand to each other, and not how large a step is.
    same = loss(LOGPROBS, LENGTHS, REFERENCE, 5 * weights)
    np.testing.assert_allclose(same.slopes, judged.slopes, rtol=1e-12)


def test_weights_that_are_all_one_change_no_bit() -> None:
    for loss in (Dpo(), Orpo()):
        plain, weighted = loss(LOGPROBS, LENGTHS, REFERENCE), loss(LOGPROBS, LENGTHS, REFERENCE, np.ones(4))
        assert (plain.loss, plain.slopes.tolist()) == (weighted.loss, weighted.slopes.tolist())


def test_the_weight_of_a_pair_reaches_its_loss() -> None:
    judged = judge([PAIRS[0]._replace(weight=3.0), PAIRS[1]], told(), Dpo())
    losses = [
        judge([pair], ForwardBackwardResult(outputs=told().outputs[2 * place : 2 * place + 2], metrics={}), Dpo()).loss
        for place, pair in enumerate(PAIRS)
    ]
    assert judged.loss == pytest.approx((3 * losses[0] + losses[1]) / 4)


@given(st.lists(st.tuples(st.floats(-2000, 0), st.floats(-2000, 0)), min_size=1, max_size=6))
def test_however_far_the_answers_are_apart_everything_stays_finite(logprobs: list[tuple[float, float]]) -> None:
    given, lengths = np.array(logprobs), np.full((len(logprobs), 2), 5.0)
    for loss in (Dpo(beta=5.0), Orpo(weight=1.0)):
        judged = loss(given, lengths, np.zeros_like(given))
        assert np.isfinite(judged.loss)
        assert np.isfinite(judged.slopes).all()
        # Never away from the preferred answer, nor towards the other.
        assert (judged.slopes[:, 0] <= 0).all()
        assert (judged.slopes[:, 1] >= 0).all()


def test_at_the_reference_the_margin_is_zero_and_the_loss_log_two() -> None:
    judged = Dpo()(REFERENCE, LENGTHS, REFERENCE)
    assert judged.loss == pytest.approx(np.log(2))
    assert judged.shown["margin"] == 0


PAIRS = [
    Pair(datum([1, 2, 3, 4], [0, 0, 1, 1]), datum([1, 2, 5], [0, 0, 1]), (-2.0, -1.0)),
    Pair(datum([7, 8], [0, 1]), datum([7, 9, 9], [0, 1, 1]), (-0.5, -3.0)),
]
TOLD = [[-9.0, -1.0, -2.0], [-9.0, -0.5], [-0.25], [-1.5, -0.75]]


def told() -> ForwardBackwardResult:
    outputs = tuple({"logprobs": Array.of(np.array(logprobs, np.float32))} for logprobs in TOLD)
    return ForwardBackwardResult(outputs=outputs, metrics={})


def test_prompts_count_for_nothing() -> None:
    judged = judge(PAIRS, told(), Dpo())
    expected = Dpo()(np.array([[-3.0, -0.5], [-0.25, -2.25]]), np.array([[2.0, 1.0], [1.0, 2.0]]), np.array([[-2.0, -1.0], [-0.5, -3.0]]))
    assert judged.loss == pytest.approx(expected.loss)


def test_weights_carry_the_derivative_to_every_token_of_an_answer() -> None:
    judged = judge(PAIRS, told(), Dpo())
    given = [row.inputs["weights"].numpy() for row in weighed(both(PAIRS), judged.slopes)]
    masks = [row.inputs["weights"].numpy() for row in both(PAIRS)]
    for weights, mask, slope in zip(given, masks, judged.slopes.ravel(), strict=True):
        np.testing.assert_allclose(weights, -slope * mask, rtol=1e-6)
