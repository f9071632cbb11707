"""Preference optimisation over the public API: pairs in, optimizer steps out. `Dpo` and `Orpo` are losses of a pair's two log-probabilities.

A loss of a pair is no sum over tokens, so a step asks twice: `forward` tells the log-probability of every token, the derivatives of the loss by them
follow in float64, and `forward_backward` of cross-entropy with minus these as weights has the gradient of the loss. Both are one forward of the same
weights, so nothing is approximated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bloomery.recipes.dealing import deal
from bloomery.recipes.replay import Awaited, Trains
from bloomery.recipes.sft import AdamConfig, gradient_norm
from bloomery.recipes.steps import EVALUATED, HeldOut, OnPoint, OnVersion, Pace, Step, drive
from bloomery.types.arrays import Array
from bloomery.types.errors import Gone
from bloomery.types.operations import Datum, ForwardBackwardResult

Floats = NDArray[np.float64]
_LEAST_DOUBT: Final = 2.0**-25
"""What float32 has no room for below a probability of 1: an answer that is certain to it has no odds, and a gradient of NaN, otherwise."""


class Pair(NamedTuple):
    """The same prompt with the answer that is preferred and one that is not; weights are 1 where the answer is predicted, 0 in the prompt."""

    chosen: Datum
    rejected: Datum
    reference: tuple[float, float] = (0.0, 0.0)
    """Log-probabilities of both answers under the weights that training is held to."""
    weight: float = 1.0
    """How much it counts in the mean of its batch: 2 is as much as the pair twice."""

    @property
    def tokens(self) -> int:
        """Of both."""
        return self.chosen.tokens.shape[0] + self.rejected.tokens.shape[0]


class Judged(NamedTuple):
    """The loss of a batch of N pairs, its derivatives by the summed log-probabilities [N, 2] of both answers, and what it shows, by name."""

    loss: float
    slopes: Floats
    shown: dict[str, float]


class PairLoss(Protocol):
    """A loss of pairs: chosen first."""

    def __call__(self, logprobs: Floats, lengths: Floats, reference: Floats, weights: Floats | None = None) -> Judged:
        """Of summed log-probabilities, numbers of tokens and those of the reference, all [N, 2]; a mean over the pairs, by weights [N] if some."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Dpo:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290): minus log sigmoid of the margin of implicit rewards."""

    beta: float = 1.0
    """A pair is content where its margin is some 1 / beta nats. Where answers differ in a token or two, 10 nats turn the model over."""
    label_smoothing: float = 0.0
    """The share of pairs that are taken to be the wrong way round (conservative DPO)."""

    def __call__(self, logprobs: Floats, lengths: Floats, reference: Floats, weights: Floats | None = None) -> Judged:
        """Of summed log-probabilities."""
        counts = _Counts(weights, len(logprobs))
        rewards = self.beta * (logprobs - reference)
        margins = rewards[:, 0] - rewards[:, 1]
        smooth = self.label_smoothing
        losses = (1 - smooth) * np.logaddexp(0, -margins) + smooth * np.logaddexp(0, margins)
        by_margin = -(1 - smooth) * _sigmoid(-margins) + smooth * _sigmoid(margins)
        slopes = counts.share(self.beta * by_margin[:, None] * np.array([1.0, -1.0]))
        shown = {"rewards/chosen": counts.mean(rewards[:, 0]), "rewards/rejected": counts.mean(rewards[:, 1])}
        return Judged(counts.mean(losses), slopes, shown | _shown(counts, margins))


@dataclass(frozen=True, kw_only=True, slots=True)
class Orpo:
    """Odds-ratio preference optimisation (Hong et al. 2024, arXiv 2403.07691): the chosen answer is learnt, and its odds against the other raised.

    Needs no reference. Likelihoods are per token, as in the paper.
    """

    weight: float = 0.1
    """Lambda: of the odds-ratio term beside the loss of the chosen answer."""

    def __call__(self, logprobs: Floats, lengths: Floats, reference: Floats, weights: Floats | None = None) -> Judged:
        """Of mean log-probabilities per token."""
        counts = _Counts(weights, len(logprobs))
        means = np.minimum(logprobs / lengths, -_LEAST_DOUBT)
        # log(1 - p), whose derivative is -p / (1 - p).
        left = np.log(-np.expm1(means))
        margins = (means[:, 0] - left[:, 0]) - (means[:, 1] - left[:, 1])
        losses = -means[:, 0] + self.weight * np.logaddexp(0, -margins)
        by_margin = -self.weight * _sigmoid(-margins)
        odds = 1.0 / -np.expm1(means)
        by_means = by_margin[:, None] * odds * np.array([1.0, -1.0]) + np.array([-1.0, 0.0])
        shown = {"loss/chosen": -counts.mean(means[:, 0]), "loss/odds": counts.mean(np.logaddexp(0, -margins))}
        return Judged(counts.mean(losses), counts.share(by_means / lengths), shown | _shown(counts, margins))


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceConfig:
    """Hyper-parameters of one run; a batch has `batch_pairs` pairs, or `batch_tokens` tokens at most."""

    epochs: float
    loss: PairLoss
    adam: AdamConfig
    batch_pairs: int = 4
    batch_tokens: int | None = None
    seed: int = 0
    """Order of the pairs."""
    pace: Pace = field(default_factory=Pace)


def optimise(
    run: Trains,
    pairs: Sequence[Pair],
    config: PreferenceConfig,
    on_point: OnPoint = lambda *_: None,
    *,
    held_out: Sequence[Pair] = (),
    on_kept: OnVersion = lambda *_: None,
    on_published: OnVersion = lambda *_: None,
    evaluated: Mapping[int, float] = MappingProxyType({}),
) -> int:
    """Train over the pairs `epochs` times; the steps taken. `evaluated`: as for `drive`."""
    recipe = Preferences(run, pairs, config, held_out)
    return drive(run, recipe, config.pace, on_point, on_kept=on_kept, on_published=on_published, evaluated=evaluated)


class Preferences:
    """The steps of preference optimisation; `tokens` of each go through the model twice."""

    def __init__(self, run: Trains, pairs: Sequence[Pair], config: PreferenceConfig, held_out: Sequence[Pair] = ()) -> None:
        self._run, self._pairs, self._config, self._held_out = run, pairs, config, held_out
        lengths = [pair.tokens for pair in pairs]
        rows = None if config.batch_tokens else config.batch_pairs
        self._batches = deal(lengths, epochs=config.epochs, rows=rows, tokens=config.batch_tokens, seed=config.seed)
        self.tokens = [sum(lengths[place] for place in batch) for batch in self._batches]

    @property
    def steps(self) -> int:
        """In all."""
        return len(self._batches)

    def submit(self, step: int) -> Step:
        """Log-probabilities, the derivatives that follow from them, and the update."""
        adam, tokens = self._config.adam, self.tokens[step]
        learning_rate = adam.rate(step, self.steps)
        pairs = [self._pairs[place] for place in self._batches[step]]
        data = both(pairs)
        judged = self._judged(pairs, self._run.forward(data))
        gradient = self._run.forward_backward(data if judged is None else weighed(data, judged.slopes), logprobs=False)
        update = self._run.optim_step(learning_rate, **adam.others)

        def read(_: Mapping[str, float], of_update: Mapping[str, float]) -> dict[str, float]:
            values = {"learning_rate": learning_rate, "tokens": float(tokens)} | gradient_norm(of_update)
            return values if judged is None else values | {"loss": judged.loss} | judged.shown

        return Step(gradient, update, read)

    def _judged(self, pairs: Sequence[Pair], forward: Awaited[ForwardBackwardResult]) -> Judged | None:
        """None of a step that was taken so long ago that its numbers are gone: what it measured was told then, and its gradient is there."""
        try:
            return judge(pairs, forward.result(), self._config.loss)
        except Gone:
            return None

    def evaluate(self) -> HeldOut | None:
        """The loss of the held-out pairs, and what it shows."""
        if not self._held_out:
            return None

        def read(result: ForwardBackwardResult) -> dict[str, float]:
            judged = judge(self._held_out, result, self._config.loss)
            return {EVALUATED: judged.loss} | {f"evaluation/{name}": value for name, value in judged.shown.items()}

        return HeldOut(self._run.forward(both(self._held_out)), read)


def both(pairs: Sequence[Pair]) -> list[Datum]:
    """Chosen and rejected in turns."""
    return [datum for pair in pairs for datum in (pair.chosen, pair.rejected)]


def judge(pairs: Sequence[Pair], told: ForwardBackwardResult, loss: PairLoss) -> Judged:
    """The loss of what a forward of `both` told."""
    data = both(pairs)
    weights = [datum.inputs["weights"].numpy().astype(np.float64) for datum in data]
    sums = [float(weight @ output["logprobs"].numpy().astype(np.float64)) for weight, output in zip(weights, told.outputs, strict=True)]
    lengths = [float(weight.sum()) for weight in weights]
    reference, counts = np.array([pair.reference for pair in pairs]), np.array([pair.weight for pair in pairs])
    return loss(np.array(sums).reshape(-1, 2), np.array(lengths).reshape(-1, 2), reference, counts)


def weighed(data: Sequence[Datum], slopes: Floats) -> list[Datum]:
    """The data with weights whose cross-entropy has these derivatives by the summed log-probabilities."""
    # Cross-entropy is minus the weighted sum.
    return [
        Datum(tokens=datum.tokens, inputs={**datum.inputs, "weights": Array.of((-slope * datum.inputs["weights"].numpy()).astype(np.float32))})
        for datum, slope in zip(data, slopes.ravel(), strict=True)
    ]


def _sigmoid(values: Floats) -> Floats:
    # Of large negative ones exp would overflow the other way round.
    return np.exp(-np.logaddexp(0, -values))


class _Counts:
    """How much each pair of a batch counts."""

    def __init__(self, weights: Floats | None, pairs: int) -> None:
        self._weights = np.ones(pairs) if weights is None else weights

    def mean(self, values: Floats) -> float:
        """Over the pairs."""
        return float((values * self._weights).sum() / self._weights.sum())

    def share(self, values: Floats) -> Floats:
        """What of each pair's row is in the mean."""
        shares: Floats = values * self._weights[:, None] / self._weights.sum()
        return shares


def _shown(counts: _Counts, margins: Floats) -> dict[str, float]:
    return {"margin": counts.mean(margins), "accuracy": counts.mean((margins > 0).astype(np.float64))}
