"""Supervised fine-tuning over the public API: rows in, optimizer steps out.

A `Renderer` turns a row's messages into tokens and loss weights, `fine_tune` takes the steps (`steps`), over the rows that `dealing` gives each.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from bloomery.recipes.dealing import Decay, deal, rate
from bloomery.recipes.replay import Trains
from bloomery.recipes.steps import EVALUATED, HeldOut, OnPoint, OnVersion, Pace, Step, drive
from bloomery.types.arrays import Array
from bloomery.types.operations import Datum, ForwardBackwardResult


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamConfig:
    """How a recipe updates: AdamW, and its learning rate over the steps."""

    learning_rate: float
    decay: Decay = "linear"
    warmup_share: float = 0.1
    floor: float = 0.0
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of a step, from 0."""
        return rate(step, steps, self.learning_rate, decay=self.decay, warmup_share=self.warmup_share, floor=self.floor)

    @property
    def others(self) -> dict[str, float]:
        """What every step has alike."""
        names = ("weight_decay", "grad_clip_norm", "beta1", "beta2", "eps")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class SftConfig:
    """Hyper-parameters of one run; a batch has `batch_size` rows, or `batch_tokens` tokens at most."""

    epochs: float
    adam: AdamConfig
    batch_size: int = 32
    batch_tokens: int | None = None
    seed: int = 0
    """Order of the rows."""
    pace: Pace = field(default_factory=Pace)


class Renderer(Protocol):
    """Messages to (tokens, loss weight of each token)."""

    def __call__(self, messages: Sequence[dict[str, str]]) -> tuple[list[int], list[float]]:
        """Render one row for training."""
        ...


class SftReport(NamedTuple):
    """What the training took. `losses` are means per trained token, one per step."""

    steps: int
    tokens: int
    seconds: float
    losses: tuple[float, ...]

    @property
    def seconds_per_step(self) -> float:
        """Wall time of a step."""
        return self.seconds / max(1, self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Tokens that went through the model each second, prompts included."""
        return self.tokens / self.seconds if self.seconds else 0.0


def fine_tune(
    run: Trains,
    data: Sequence[Datum],
    config: SftConfig,
    on_point: OnPoint = lambda *_: None,
    *,
    held_out: Sequence[Datum] = (),
    on_kept: OnVersion = lambda *_: None,
    on_published: OnVersion = lambda *_: None,
) -> SftReport:
    """Train over the rows `epochs` times; `held_out` rows are looked at as `config.pace` says."""
    started, losses = time.monotonic(), list[float]()
    recipe = Supervised(run, data, config, held_out)

    def pointed(done: int, steps: int, values: dict[str, float]) -> None:
        if "loss" in values:
            losses.append(values["loss"])
        on_point(done, steps, values)

    done = drive(run, recipe, config.pace, pointed, on_kept=on_kept, on_published=on_published)
    return SftReport(done, sum(recipe.tokens[:done]), time.monotonic() - started, tuple(losses))


class Supervised:
    """The steps of supervised fine-tuning; `tokens` of each go through the model."""

    def __init__(self, run: Trains, data: Sequence[Datum], config: SftConfig, held_out: Sequence[Datum] = ()) -> None:
        self._run, self._data, self._config, self._held_out = run, data, config, held_out
        lengths = [datum.tokens.shape[0] for datum in data]
        rows = None if config.batch_tokens else config.batch_size
        self._batches = deal(lengths, epochs=config.epochs, rows=rows, tokens=config.batch_tokens, seed=config.seed)
        self.tokens = [sum(lengths[place] for place in batch) for batch in self._batches]

    @property
    def steps(self) -> int:
        """In all."""
        return len(self._batches)

    def submit(self, step: int) -> Step:
        """Gradients of a batch, as a mean over its trained tokens, and the update."""
        adam, tokens = self._config.adam, self.tokens[step]
        learning_rate = adam.rate(step, self.steps)
        batch = mean_weighted([self._data[place] for place in self._batches[step]])
        gradient = self._run.forward_backward(batch, logprobs=False)
        update = self._run.optim_step(learning_rate, **adam.others)

        def read(of_loss: Mapping[str, float], of_update: Mapping[str, float]) -> dict[str, float]:
            values = {"loss": of_loss["loss:sum"], "learning_rate": learning_rate, "tokens": float(tokens)}
            return values | {"trained_tokens": of_loss["tokens:sum"]} | gradient_norm(of_update)

        return Step(gradient, update, read)

    def evaluate(self) -> HeldOut | None:
        """The loss of the held-out rows, a mean over their trained tokens."""
        return held_loss(self._run, self._held_out) if self._held_out else None


def held_loss(run: Trains, rows: Sequence[Datum]) -> HeldOut:
    """Ask for the mean loss per trained token of rows that are not trained on."""

    def read(result: ForwardBackwardResult) -> dict[str, float]:
        return {EVALUATED: result.metrics["loss:sum"] / result.metrics["weights:sum"]}

    return HeldOut(run.forward(rows, logprobs=False), read)


def gradient_norm(of_update: Mapping[str, float]) -> dict[str, float]:
    """Before clipping, as an update tells it."""
    return {"gradient_norm": of_update["grad_norm"]} if "grad_norm" in of_update else {}


def datum(tokens: Sequence[int], weights: Sequence[float]) -> Datum:
    """A rendered row as a training example: position i predicts token i + 1 with that token's weight."""
    return Datum(
        tokens=Array.of(np.asarray(tokens[:-1], dtype=np.int32)),
        inputs={
            "target_tokens": Array.of(np.asarray(tokens[1:], dtype=np.int64)),
            "weights": Array.of(np.asarray(weights[1:], dtype=np.float32)),
        },
    )


def mean_weighted(batch: Sequence[Datum]) -> list[Datum]:
    """Losses are sums; dividing the weights makes this one a mean over the batch's trained tokens."""
    total = sum(float(row.inputs["weights"].numpy().sum()) for row in batch) or 1.0
    return [
        Datum(tokens=row.tokens, inputs={**row.inputs, "weights": Array.of((row.inputs["weights"].numpy() / total).astype(np.float32))})
        for row in batch
    ]
