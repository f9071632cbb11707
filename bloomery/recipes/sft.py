"""Supervised fine-tuning over the public API: rows in, optimizer steps out.

A `Renderer` turns a row's messages into tokens and loss weights, `batches` deals rows out, `fine_tune` keeps one step in flight while the
next is submitted.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from bloomery.client import Pending, TrainingRun
from bloomery.types.arrays import Array
from bloomery.types.operations import Datum, ForwardBackwardResult, OptimStepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class SftConfig:
    """Hyper-parameters of one run."""

    epochs: float
    learning_rate: float
    batch_size: int = 32
    warmup_share: float = 0.1
    weight_decay: float = 0.0
    seed: int = 0
    """Order of the rows."""


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


OnStep = Callable[[int, int, float], None]
"""Called with (steps done, steps in all, loss)."""


def fine_tune(run: TrainingRun, data: Sequence[Datum], config: SftConfig, on_step: OnStep) -> SftReport:
    """Train over the rows `epochs` times with a linear warm-up and decay to zero."""
    steps = max(1, round(config.epochs * len(data) / config.batch_size))
    started, tokens, losses = time.monotonic(), 0, list[float]()
    in_flight: list[_Step] = []
    for number, batch in zip(range(steps), batches(data, config.batch_size, config.seed), strict=False):
        in_flight.append(_submit(run, batch, rate(number, steps, config), config.weight_decay))
        tokens += sum(datum.tokens.shape[0] for datum in batch)
        if len(in_flight) > 1:
            losses.append(in_flight.pop(0).loss())
            on_step(len(losses), steps, losses[-1])
    for step in in_flight:
        losses.append(step.loss())
        on_step(len(losses), steps, losses[-1])
    return SftReport(steps, tokens, time.monotonic() - started, tuple(losses))


def datum(tokens: Sequence[int], weights: Sequence[float]) -> Datum:
    """A rendered row as a training example: position i predicts token i + 1 with that token's weight."""
    return Datum(
        tokens=Array.of(np.asarray(tokens[:-1], dtype=np.int32)),
        inputs={
            "target_tokens": Array.of(np.asarray(tokens[1:], dtype=np.int64)),
            "weights": Array.of(np.asarray(weights[1:], dtype=np.float32)),
        },
    )


def batches(data: Sequence[Datum], batch_size: int, seed: int) -> Iterator[list[Datum]]:
    """Endless batches: every row once per epoch, in an order that depends on the seed alone."""
    order = random.Random(seed)
    waiting: list[Datum] = []
    while True:
        if len(waiting) < batch_size:
            waiting += order.sample(list(data), len(data))
        yield waiting[:batch_size]
        waiting = waiting[batch_size:]


def rate(step: int, steps: int, config: SftConfig) -> float:
    """Learning rate of a step (from 0): linear warm-up, then linear decay to zero behind the last step."""
    warmup = max(1, round(config.warmup_share * steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    return config.learning_rate * (steps - step) / max(1, steps - warmup)


class _Step(NamedTuple):
    gradient: Pending[ForwardBackwardResult]
    update: Pending[OptimStepResult]

    def loss(self) -> float:
        result = self.gradient.result()
        self.update.result()
        return result.metrics["loss:sum"]


def _submit(run: TrainingRun, batch: Sequence[Datum], learning_rate: float, weight_decay: float) -> _Step:
    gradient = run.forward_backward(_mean_weighted(batch), logprobs=False)
    return _Step(gradient, run.optim_step(learning_rate, weight_decay=weight_decay, eps=1e-8))


def _mean_weighted(batch: Sequence[Datum]) -> list[Datum]:
    """Losses are sums; dividing the weights makes this one a mean over the batch's trained tokens."""
    total = sum(float(row.inputs["weights"].numpy().sum()) for row in batch) or 1.0
    return [
        Datum(tokens=row.tokens, inputs={**row.inputs, "weights": Array.of((row.inputs["weights"].numpy() / total).astype(np.float32))})
        for row in batch
    ]
