"""A run that remembers: a recipe that was killed runs again from its first line, and what it had submitted before is not submitted again.

The server keeps a run's operations in order and for good, so the run itself is the cursor of every recipe whose operations follow from its settings:
SFT, DPO, ORPO. No step is repeated, and none is left out. Their metrics are kept for good too, and so is what was saved under a name; other results
for some days.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from bloomery.client import TrainingRun
from bloomery.client.training import RESULT_TIMEOUT_S, OperationFailed
from bloomery.types.errors import Conflict, Gone, WorkerError
from bloomery.types.operations import CheckpointResult, Datum, ForwardBackwardResult, LoadResult, OptimStepResult, SnapshotResult
from bloomery.types.resources import Checkpoint
from bloomery.types.wire import Wire

Outcome = TypeVar("Outcome", bound=Wire, covariant=True)
FIRST_SEQ: Final = 1
"""Of a run that was created over `/api/v1`."""
_FORWARD_ONLY: Final = "forward/"
"""Before the names of metrics of operations that only computed."""


class Awaited(Protocol[Outcome]):
    """A result to come."""

    def result(self, timeout_s: float = ...) -> Outcome:
        """Wait for it; an operation that failed raises what it failed with."""
        ...


class Trains(Protocol):
    """The verbs of a run that recipes use."""

    id: str

    def forward_backward(
        self, data: Sequence[Datum], loss: str = ..., loss_config: dict[str, float | str] | None = ..., *, logprobs: bool = ...
    ) -> Awaited[ForwardBackwardResult]:
        """Add the gradients of a batch."""
        ...

    def forward(
        self, data: Sequence[Datum], loss: str = ..., loss_config: dict[str, float | str] | None = ..., *, logprobs: bool = ...
    ) -> Awaited[ForwardBackwardResult]:
        """Only the loss."""
        ...

    def optim_step(self, learning_rate: float, **adam: float) -> Awaited[OptimStepResult]:
        """Apply the gradients."""
        ...

    def save_checkpoint(self, name: str) -> Awaited[CheckpointResult]:
        """Keep the resumable state."""
        ...

    def save_snapshot(self, name: str | None = None) -> Awaited[SnapshotResult]:
        """Publish the weights."""
        ...

    def load(self, run_id: str, name: str, *, optimizer: bool = True) -> Awaited[LoadResult]:
        """Begin at a checkpoint."""
        ...


class Replayed:
    """The verbs of a run from its first operation on: of those that are there, the results of then; behind them, the run's own."""

    def __init__(self, run: TrainingRun) -> None:
        self.id = run.id
        self._run, self._seq, self._there = run, FIRST_SEQ, run.next_seq
        self._metrics = {point.seq: point.values for point in run.metrics()} if run.next_seq > FIRST_SEQ else {}

    def forward_backward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", loss_config: dict[str, float | str] | None = None, *, logprobs: bool = True
    ) -> Awaited[ForwardBackwardResult]:
        """Add the gradients of a batch."""
        if (seq := self._again()) is None:
            return self._run.forward_backward(data, loss, loss_config, logprobs=logprobs)
        return self._run.submitted(seq, ForwardBackwardResult) if logprobs else self._computed(seq)

    def forward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", loss_config: dict[str, float | str] | None = None, *, logprobs: bool = True
    ) -> Awaited[ForwardBackwardResult]:
        """Only the loss."""
        if (seq := self._again()) is None:
            return self._run.forward(data, loss, loss_config, logprobs=logprobs)
        if not logprobs:
            return self._computed(seq)
        pending = self._run.submitted(seq, ForwardBackwardResult)
        return _Needed(pending) if seq + 1 == self._there else pending

    def optim_step(self, learning_rate: float, **adam: float) -> Awaited[OptimStepResult]:
        """Apply the gradients."""
        if (seq := self._again()) is None:
            return self._run.optim_step(learning_rate, **adam)
        metrics = self._told(seq)
        return self._run.submitted(seq, OptimStepResult) if metrics is None else _Known(OptimStepResult(metrics=metrics))

    def save_checkpoint(self, name: str) -> Awaited[CheckpointResult]:
        """Keep the resumable state."""
        if (seq := self._again()) is None:
            return Saving(self._run.save_checkpoint(name))
        return _Kept(self._run.submitted(seq, CheckpointResult), lambda: self._checkpoint(seq), lambda: self.save_checkpoint(name))

    def save_snapshot(self, name: str | None = None) -> Awaited[SnapshotResult]:
        """Publish the weights."""
        if (seq := self._again()) is None:
            return Saving(self._run.save_snapshot(name))
        # What has no name is not waited for: by the time that it is known to have failed, the weights may be others.
        again = None if name is None else lambda: self.save_snapshot(name)
        return _Kept(self._run.submitted(seq, SnapshotResult), lambda: self._snapshot(seq), again)

    def load(self, run_id: str, name: str, *, optimizer: bool = True) -> Awaited[LoadResult]:
        """Begin at a checkpoint."""
        return self._run.load(run_id, name, optimizer=optimizer) if (seq := self._again()) is None else self._run.submitted(seq, LoadResult)

    def _again(self) -> int | None:
        """The number of the next operation where it is there."""
        seq, self._seq = self._seq, self._seq + 1
        return seq if seq < self._there else None

    def _computed(self, seq: int) -> Awaited[ForwardBackwardResult]:
        # One that failed has no metrics: its result says why.
        metrics = self._told(seq)
        return self._run.submitted(seq, ForwardBackwardResult) if metrics is None else _Known(ForwardBackwardResult(outputs=(), metrics=metrics))

    def _checkpoint(self, seq: int) -> CheckpointResult | None:
        """What is kept under a name says itself what it is; where its blob lies nobody asks who replays."""
        kept = self._named(seq)
        if kept is None or kept.digest is None:
            return None
        return CheckpointResult(key="", digest=kept.digest, size_bytes=kept.size_bytes, step=kept.step)

    def _snapshot(self, seq: int) -> SnapshotResult | None:
        kept = self._named(seq)
        if kept is None or kept.version is None:
            return None
        return SnapshotResult(version=kept.version, key="", size_bytes=kept.size_bytes, step=kept.step)

    def _named(self, seq: int) -> Checkpoint | None:
        return next((kept for kept in self._run.checkpoints() if kept.seq == seq), None)

    def _told(self, seq: int) -> dict[str, float] | None:
        if (values := self._metrics.get(seq)) is None:
            return None
        return {name.removeprefix(_FORWARD_ONLY): math.nan if value is None else value for name, value in values.items()}


class _Known(Awaited[Outcome]):
    def __init__(self, known: Outcome) -> None:
        self._known = known

    def result(self, timeout_s: float = 0.0) -> Outcome:
        """It is there."""
        return self._known


class NotKept(WorkerError):
    """The server could not keep weights, its disk is full say. That is the operation's result for good: a recipe that runs again saves anew."""


class Saving(Awaited[Outcome]):
    """A save. Behind one under a name a recipe submits nothing but others before it is there."""

    def __init__(self, pending: Awaited[Outcome]) -> None:
        self._pending = pending

    def result(self, timeout_s: float = RESULT_TIMEOUT_S) -> Outcome:
        """NotKept where the server failed at it."""
        try:
            return self._pending.result(timeout_s)
        except OperationFailed as error:
            raise NotKept(error.message) from error


class _Kept(Awaited[Outcome]):
    """Of a save whose result was dropped: what is there under its name. One that the server failed at is submitted `again`."""

    def __init__(self, pending: Awaited[Outcome], kept: Callable[[], Outcome | None], again: Callable[[], Awaited[Outcome]] | None) -> None:
        self._pending, self._kept, self._again = pending, kept, again

    def result(self, timeout_s: float = RESULT_TIMEOUT_S) -> Outcome:
        """Gone where there is nothing."""
        try:
            return self._pending.result(timeout_s)
        except OperationFailed as error:
            if self._again is None:
                raise Gone(f"{error.message}: those weights had no name, and the run has others by now") from error
            return self._again().result(timeout_s)
        except Gone:
            if (kept := self._kept()) is None:
                raise
            return kept


class _Needed(Awaited[Outcome]):
    """What the next operation follows from, which was never submitted."""

    def __init__(self, pending: Awaited[Outcome]) -> None:
        self._pending = pending

    def result(self, timeout_s: float = RESULT_TIMEOUT_S) -> Outcome:
        """Conflict where it was dropped: nobody can say what comes next."""
        try:
            return self._pending.result(timeout_s)
        except Gone as gone:
            raise Conflict(
                f"{gone.message}; the next operation follows from it and is not there, so that this run cannot go on: begin anew"
            ) from gone
