"""Losses as functions of per-token log-probabilities.

A loss gives one term per prediction; terms are summed over tokens and data, and nothing is normalised implicitly. Every term is multiplied by
one of the loss's inputs: where that is 0 the prediction has no loss and no gradient, whatever its log-probability.
All tensors of a call have one shape: T predictions, or T predictions with K soft targets each; `sequence_T` says which datum each belongs to.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bloomery.types.errors import InvalidInput

Inputs = Mapping[str, Tensor]
Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """One entry of `LOSSES`."""

    terms: Callable[[Tensor, Inputs, Tensor], Tensor]
    """(log-probabilities, inputs, sequence_T) -> differentiable terms whose sum is the loss."""
    metrics: Callable[[Tensor, Inputs, Tensor], Metrics]
    """Figures beside `loss:sum`, named `name:reduction`; all add up (or reduce) over the parts of a batch."""
    learns: Callable[[Inputs], Tensor]
    """inputs -> which predictions `terms` has to see, bool [T]; a datum gives all of its rows or those alone."""
    inputs: tuple[str, ...]
    exact: bool
    """Whether training needs the sampler's bits: then attention pads its keys as a cached step does."""
    soft_targets: bool = False
    term_output: str | None = None
    """Name under which the terms are returned per token."""


def cross_entropy(logprobs: Tensor, inputs: Inputs, sequence_T: Tensor) -> Tensor:
    """`-weight * logprob`: weights are real and signed."""
    weights = inputs["weights"]
    return -logprobs.where(weights != 0, 0.0) * weights


def importance_sampling(logprobs: Tensor, inputs: Inputs, sequence_T: Tensor) -> Tensor:
    """`-exp(logprob - sampled logprob) * advantage`."""
    return -_log_ratio(logprobs, inputs).exp() * inputs["advantages"]


def find_loss(name: str, config: Mapping[str, float | str]) -> Loss:
    """The loss of this name; options it does not have are refused."""
    if name not in LOSSES:
        raise InvalidInput(f"unknown loss `{name}`: one of {', '.join(LOSSES)}", field="loss_fn")
    if config:
        raise InvalidInput(f"loss `{name}` has no option `{min(config)}`", field="loss_fn_config")
    return LOSSES[name]


def _log_ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    # Selected before exp: a product with 0 afterwards would still send nan back through an overflow at a masked token.
    return (logprobs - inputs["logprobs"]).where(inputs["advantages"] != 0, 0.0)


def _cross_entropy_metrics(logprobs: Tensor, inputs: Inputs, sequence_T: Tensor) -> Metrics:
    weights = inputs["weights"]
    return {"weights:sum": _sum(weights), "tokens:sum": float(torch.count_nonzero(weights))}


def _importance_metrics(logprobs: Tensor, inputs: Inputs, sequence_T: Tensor) -> Metrics:
    """`k3:sum` over `tokens:sum` estimates KL(sampler || trainer)."""
    active = inputs["advantages"] != 0
    log_ratio = _log_ratio(logprobs.double(), inputs)
    ratio = log_ratio.exp()
    return {
        "tokens:sum": float(torch.count_nonzero(active)),
        "ratio:sum": _sum(ratio.where(active, 0.0)),
        "k3:sum": _sum(ratio - 1 - log_ratio),
        "logprob_diff:max": float(log_ratio.abs().max()),
    }


def _where_nonzero(factor: str) -> Callable[[Inputs], Tensor]:
    return lambda inputs: (inputs[factor] != 0).any(1)


def _sum(values: Tensor) -> float:
    # numpy adds in one order whatever the number of threads.
    return float(np.sum(values.numpy(), dtype=np.float64))


LOSSES = {
    "cross_entropy": Loss(
        terms=cross_entropy,
        metrics=_cross_entropy_metrics,
        inputs=("weights",),
        learns=_where_nonzero("weights"),
        exact=False,
        soft_targets=True,
        term_output="elementwise_loss",
    ),
    "importance_sampling": Loss(
        terms=importance_sampling,
        metrics=_importance_metrics,
        inputs=("logprobs", "advantages"),
        learns=_where_nonzero("advantages"),
        exact=True,
    ),
}
