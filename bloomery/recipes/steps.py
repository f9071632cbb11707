"""The steps of a recipe whose operations follow from its settings: one in flight while the next is submitted, evaluated and kept now and then.

`drive` numbers steps; what a step consists of is its recipe's (`sft`, `dpo`, `orpo`). Everything that it submits follows from the settings and from
results, which a run that is taken up again tells again (`replay`), so a recipe that was killed submits the same.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from bloomery.recipes.replay import Awaited, Trains
from bloomery.types.errors import Gone
from bloomery.types.operations import CheckpointResult, ForwardBackwardResult, OptimStepResult, SnapshotResult

IN_FLIGHT: Final = 2
"""Steps that are submitted and not looked at yet: the engine has work while a result travels."""


class Step(NamedTuple):
    """One submitted step, and what its metrics are called to people."""

    gradient: Awaited[ForwardBackwardResult]
    update: Awaited[OptimStepResult]
    read: Callable[[Mapping[str, float], Mapping[str, float]], dict[str, float]]
    """Of the metrics of both."""

    def values(self) -> dict[str, float]:
        """Once both are there."""
        gradient, update = self.gradient.result(), self.update.result()
        return self.read(gradient.metrics, update.metrics)


class Stepping(Protocol):
    """What a recipe does in a step."""

    @property
    def steps(self) -> int:
        """In all."""
        ...

    def submit(self, step: int) -> Step:
        """Step `step`, from 0."""
        ...

    def evaluate(self) -> "HeldOut | None":
        """Ask how the weights of now do on rows that are held out; None where there are none."""
        ...


class HeldOut(NamedTuple):
    """A submitted look at held-out rows."""

    pending: Awaited[ForwardBackwardResult]
    read: Callable[[ForwardBackwardResult], dict[str, float]]

    def values(self) -> dict[str, float]:
        """Its measures by name; `evaluation/loss` is what early stopping looks at."""
        return self.read(self.pending.result())


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """What happens besides steps, and how often; 0 is never."""

    evaluate_every: int = 0
    """And behind the last step."""
    checkpoint_every: int = 0
    publish_every: int = 0
    """Weights without a name, for whoever looks at what is served while training goes on."""
    patience: int = 0
    """Evaluations in a row without a better loss that end the training."""
    min_delta: float = 0.0


OnPoint = Callable[[int, int, dict[str, float]], None]
"""Called with (steps done, steps in all, what was measured by name). What it raises ends the training there."""
OnVersion = Callable[[int, str], Any]
"""Called with (steps done, version)."""
EVALUATED: Final = "evaluation/loss"


def drive(
    run: Trains,
    recipe: Stepping,
    pace: Pace,
    on_point: OnPoint,
    *,
    on_kept: OnVersion = lambda *_: None,
    on_published: OnVersion = lambda *_: None,
    evaluated: Mapping[int, float] = MappingProxyType({}),
) -> int:
    """Take all steps, or so many as early stopping lets; how many those were. `on_kept` is told of checkpoints, `on_published` of weights.
    `evaluated` are held-out losses by step, as they were told before, of evaluations whose results are kept no more."""
    waiting: deque[Callable[[], Any]] = deque()
    best, since = math.inf, 0
    for step in range(recipe.steps):
        waiting.append(partial(_point, on_point, step + 1, recipe.steps, recipe.submit(step)))
        _settle(waiting, leave=IN_FLIGHT - 1)
        done, last = step + 1, step + 1 == recipe.steps
        if pace.checkpoint_every and done % pace.checkpoint_every == 0 and not last:
            on_kept(done, _keep(run, done))
        if pace.publish_every and done % pace.publish_every == 0 and not last:
            waiting.append(partial(_published, on_published, done, run.save_snapshot()))
        looks = pace.evaluate_every and (last or done % pace.evaluate_every == 0)
        if looks and (held := recipe.evaluate()) is not None:
            if not pace.patience:
                waiting.append(partial(_point, on_point, done, recipe.steps, held))
                continue
            _settle(waiting)
            loss = _evaluated(on_point, done, recipe.steps, held, evaluated)
            best, since = (loss, 0) if loss < best - pace.min_delta else (best, since + 1)
            if since >= pace.patience:
                return done
    _settle(waiting)
    return recipe.steps


def kept_name(step: int) -> str:
    """Of the checkpoint and the snapshot behind a step."""
    return f"step-{step}"


def _keep(run: Trains, step: int) -> str:
    checkpoint: Awaited[CheckpointResult] = run.save_checkpoint(kept_name(step))
    snapshot: Awaited[SnapshotResult] = run.save_snapshot(kept_name(step))
    checkpoint.result()
    return snapshot.result().version


def _settle(waiting: deque[Callable[[], Any]], *, leave: int = 0) -> None:
    while len(waiting) > leave:
        waiting.popleft()()


def _point(on_point: OnPoint, done: int, steps: int, told: Step | HeldOut) -> None:
    try:
        values = told.values()
    except Gone:
        # Held-out rows of which not even the numbers are there any more were looked at then.
        return
    on_point(done, steps, values)


def _evaluated(on_point: OnPoint, done: int, steps: int, held: HeldOut, evaluated: Mapping[int, float]) -> float:
    try:
        values = held.values()
    except Gone:
        if done not in evaluated:
            raise
        return evaluated[done]
    on_point(done, steps, values)
    return values[EVALUATED]


def _published(on_published: OnVersion, done: int, snapshot: Awaited[SnapshotResult]) -> None:
    # Weights of which not even the result is there any more were looked at then.
    with suppress(Gone):
        on_published(done, snapshot.result().version)
