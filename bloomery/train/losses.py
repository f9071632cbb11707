"""Losses as functions of per-token log-probabilities.

A loss gives one term per prediction; terms are summed over tokens and data, and nothing is normalised implicitly. Every term is multiplied by the
loss's factor (`types/losses.py`): where that is 0 the prediction has no loss and no gradient, whatever its log-probability.
All tensors of a call have one shape: T predictions, or T predictions with K soft targets each; `sequence_T` says which datum each belongs to, the
predictions of a datum side by side. What a threshold cuts off is selected before `exp`: a product with 0 afterwards would still send nan back through
an overflow. What is not a number is never compared away: it stays in the term, so that the operation fails by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bloomery.types.losses import CLIP_HIGH, CLIP_LOW, LOSSES, RATIO_MASK, TEMPERATURE, LossForm

Inputs = Mapping[str, Tensor]
Metrics = dict[str, float]

_REPORTED_LOG_RATIO: Final = 100.0
"""Ratios enter the metrics up to `exp` of this, so that a sum of them is always a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A loss with its options: what a run computes by."""

    form: LossForm
    options: Mapping[str, float]
    kernel: "Kernel"

    @property
    def exact(self) -> bool:
        """Whether training needs the sampler's bits."""
        return self.form.exact

    @property
    def temperature(self) -> float:
        """Of the distribution whose log-probabilities it takes."""
        return self.options.get(TEMPERATURE, 1.0)

    def terms(self, logprobs: Tensor, inputs: Inputs, sequence_T: Tensor) -> Tensor:
        """Differentiable terms whose sum is the loss."""
        return self.kernel(logprobs, inputs, sequence_T, self.options).terms

    def learns(self, inputs: Inputs) -> Tensor:
        """Which predictions `terms` has to see, bool [T] from inputs [T, K]; a datum gives all of its rows or those alone."""
        names = (self.form.factor, *self.form.masks)
        return torch.stack([(inputs[name] != 0).any(1) for name in names]).any(0)

    def metrics(self, logprobs: Tensor, inputs: Inputs, sequence_T: Tensor) -> Metrics:
        """Figures beside `loss:sum`, named `name:reduction`; all add up (or reduce) over the parts of a batch."""
        active = inputs[self.form.factor] != 0
        if "logprobs" not in inputs:
            return {"weights:sum": _sum(inputs["weights"]), "tokens:sum": float(torch.count_nonzero(active))}
        cut = self.kernel(logprobs, inputs, sequence_T, self.options).cut
        return _ratio_metrics(logprobs, inputs, active) | ({} if cut is None else {"clipped:sum": float(torch.count_nonzero(cut & active))})


def find_loss(name: str, config: Mapping[str, float | str]) -> Loss:
    """The loss of this name with its options, which the door has checked."""
    form = LOSSES[name]
    return Loss(form=form, options={option: float(config.get(option, form.options[option].default)) for option in form.options}, kernel=KERNELS[name])


class Scored(NamedTuple):
    """What a kernel gives."""

    terms: Tensor
    cut: Tensor | None = None
    """Where a threshold cut off the term, its gradient or its weight; None for a loss without thresholds."""


Kernel = Callable[[Tensor, Inputs, Tensor, Mapping[str, float]], Scored]


def cross_entropy(logprobs: Tensor, inputs: Inputs, sequence_T: Tensor, options: Mapping[str, float]) -> Scored:
    """`-weight * logprob`: weights are real and signed."""
    weights = inputs["weights"]
    return Scored(-logprobs.where(weights != 0, 0.0) * weights)


def importance_sampling(logprobs: Tensor, inputs: Inputs, sequence_T: Tensor, options: Mapping[str, float]) -> Scored:
    """`-ratio * advantage`."""
    return Scored(-_log_ratio(logprobs, inputs).exp() * inputs["advantages"])


def ppo(logprobs: Tensor, inputs: Inputs, sequence_T: Tensor, options: Mapping[str, float]) -> Scored:
    """`-min(ratio * advantage, clamp(ratio, low, high) * advantage)`."""
    return _clipped(_log_ratio(logprobs, inputs), inputs)


def dapo(logprobs: Tensor, inputs: Inputs, sequence_T: Tensor, options: Mapping[str, float]) -> Scored:
    """As ppo; a negative advantage counts at most `dual_clip_threshold` times."""
    return _clipped(_log_ratio(logprobs, inputs), inputs, dual=options["dual_clip_threshold"])


def gspo(logprobs: Tensor, inputs: Inputs, sequence_T: Tensor, options: Mapping[str, float]) -> Scored:
    """As ppo with one ratio per sequence, the geometric mean over its marked tokens; the gradient is each token's own."""
    active, marked = inputs["advantages"] != 0, inputs[RATIO_MASK] != 0
    log_ratio = (logprobs.detach() - inputs["logprobs"]).where(marked, 0.0)
    of_sequence = _sequence_means(log_ratio, marked, sequence_T)
    own = logprobs.where(active, 0.0)
    return _clipped((of_sequence + (own - own.detach())).where(active, 0.0), inputs)


def cispo(logprobs: Tensor, inputs: Inputs, sequence_T: Tensor, options: Mapping[str, float]) -> Scored:
    """`-sg(clamp(ratio, low, high)) * advantage * logprob`."""
    ratio = _log_ratio(logprobs.detach(), inputs).exp()
    low, high = inputs[CLIP_LOW], inputs[CLIP_HIGH]
    return Scored(-torch.clamp(ratio, low, high) * inputs["advantages"] * _active(logprobs, inputs), (ratio < low) | (ratio > high))


def dro(logprobs: Tensor, inputs: Inputs, sequence_T: Tensor, options: Mapping[str, float]) -> Scored:
    """`-(logprob * advantage - beta / 2 * log_ratio ** 2)`."""
    return Scored(_pull(logprobs, inputs, options["beta"]) - _active(logprobs, inputs) * inputs["advantages"])


def dppo(logprobs: Tensor, inputs: Inputs, sequence_T: Tensor, options: Mapping[str, float]) -> Scored:
    """`-ratio * advantage`, but nothing where the token's probability went further than the threshold in the direction of the advantage."""
    advantages = inputs["advantages"]
    moved = _active(logprobs.detach(), inputs).exp() - _active(inputs["logprobs"], inputs).exp()
    too_high = (advantages > 0) & (moved > options["mask_high_threshold"])
    masked = too_high | ((advantages < 0) & (moved < -options["mask_low_threshold"]))
    ratio = _log_ratio(logprobs, inputs).where(~masked, 0.0).exp()
    return Scored(-ratio.where(~masked, 0.0) * advantages, masked)


def reinforce(logprobs: Tensor, inputs: Inputs, sequence_T: Tensor, options: Mapping[str, float]) -> Scored:
    """`-advantage * logprob`, wherever the sample came from."""
    return Scored(-_active(logprobs, inputs) * inputs["advantages"])


def stable_reinforce(logprobs: Tensor, inputs: Inputs, sequence_T: Tensor, options: Mapping[str, float]) -> Scored:
    """`-sg(min(ratio, high)) * advantage * logprob + kl_coeff / 2 * log_ratio ** 2`; why so: docs/design/006-losses.md."""
    ratio = _log_ratio(logprobs.detach(), inputs).exp()
    high = inputs[CLIP_HIGH]
    policy = -torch.minimum(ratio, high) * inputs["advantages"] * _active(logprobs, inputs)
    return Scored(policy + _pull(logprobs, inputs, options["kl_coeff"]), ratio > high)


KERNELS: Final[Mapping[str, Kernel]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
    "dapo": dapo,
    "dppo": dppo,
    "reinforce": reinforce,
}


def _active(values: Tensor, inputs: Inputs) -> Tensor:
    return values.where(inputs["advantages"] != 0, 0.0)


def _log_ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return _active(logprobs - inputs["logprobs"], inputs)


def _pull(logprobs: Tensor, inputs: Inputs, coefficient: float) -> Tensor:
    return coefficient / 2 * _log_ratio(logprobs, inputs).square()


def _clipped(log_ratio: Tensor, inputs: Inputs, dual: float = float("inf")) -> Scored:
    """`-min(ratio * advantage, clamp(ratio, low, high) * advantage)`, at most `dual * |advantage|` where the advantage is negative."""
    advantages, low, high = inputs["advantages"], inputs[CLIP_LOW], inputs[CLIP_HIGH]
    ratio = log_ratio.detach().exp()
    over, under, far = (advantages > 0) & (ratio > high), (advantages < 0) & (ratio < low), (advantages < 0) & (ratio > dual)
    cut = over | under | far
    bound = high.where(over, low.where(under, dual))
    return Scored(-log_ratio.where(~cut, 0.0).exp().where(~cut, bound) * advantages, cut)


def _sequence_means(values: Tensor, marked: Tensor, sequence_T: Tensor) -> Tensor:
    """Per prediction the mean of `values` over the marked ones of its datum, in the shape and dtype of `values`; a datum that marks none has 0."""
    # In one order, whatever the device and the number of threads.
    _, index_T, counts = torch.unique_consecutive(sequence_T, return_inverse=True, return_counts=True)
    rows = len(sequence_T)
    sums = torch.segment_reduce(values.double().reshape(rows, -1).sum(1), "sum", lengths=counts)
    sizes = torch.segment_reduce(marked.double().reshape(rows, -1).sum(1), "sum", lengths=counts)
    means_T = (sums / sizes.clamp(min=1.0))[index_T]
    return means_T.to(values.dtype).reshape((rows,) + (1,) * (values.ndim - 1)).expand(values.shape)


def _ratio_metrics(logprobs: Tensor, inputs: Inputs, active: Tensor) -> Metrics:
    """`k3:sum` over `tokens:sum` estimates KL(sampler || trainer)."""
    log_ratio = _log_ratio(logprobs.double(), inputs)
    bounded = log_ratio.clamp(-_REPORTED_LOG_RATIO, _REPORTED_LOG_RATIO)
    ratio = bounded.exp()
    return {
        "tokens:sum": float(torch.count_nonzero(active)),
        "ratio:sum": _sum(ratio.where(active, 0.0)),
        "k3:sum": _sum(ratio - 1 - bounded),
        "logprob_diff:max": float(log_ratio.abs().max()),
    }


def _sum(values: Tensor) -> float:
    # numpy adds in one order whatever the number of threads.
    return float(np.sum(values.numpy(), dtype=np.float64))
