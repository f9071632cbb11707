"""The verbs of a training run: each submits an operation under the next number and returns at once with a result to come."""

import time
from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from bloomery.client.http import Http
from bloomery.client.rollouts import RunRollouts
from bloomery.types.errors import BloomeryError, Conflict, InvalidInput, Unavailable, WorkerError
from bloomery.types.operations import (
    AdamParams,
    CheckpointResult,
    Datum,
    Failed,
    ForwardBackward,
    ForwardBackwardResult,
    LoadResult,
    OptimStep,
    OptimStepResult,
    Result,
    SnapshotResult,
)
from bloomery.types.resources import Checkpoint, Run, RunMetric
from bloomery.types.wire import Wire, encode

_WAIT_S: Final = 20.0
_ANSWER_S: Final = 30.0
"""How much longer than that an answer may take that there is no result yet."""
RESULT_TIMEOUT_S: Final = 3600.0
_MSGPACK: Final = {"content-type": "application/msgpack"}
_results: Final[msgspec.msgpack.Decoder[Result]] = msgspec.msgpack.Decoder(Result)

Outcome = TypeVar("Outcome", bound=Wire)


class OperationFailed(WorkerError):
    """The server failed at an operation, and that is its result for good: whoever asks again is told the same."""


class Pending(Generic[Outcome]):
    """The result of a submitted operation, once it is there."""

    def __init__(self, http: Http, run_id: str, seq: int, kind: type[Outcome]) -> None:
        self.run_id = run_id
        self.seq = seq
        self._http = http
        self._kind = kind
        self._result: Outcome | None = None

    def result(self, timeout_s: float = RESULT_TIMEOUT_S) -> Outcome:
        """Wait for it. An operation that failed raises what it failed with."""
        if self._result is None:
            self._result = self._wait(timeout_s)
        return self._result

    def _wait(self, timeout_s: float) -> Outcome:
        path, deadline, why = f"/api/v1/runs/{self.run_id}/operations/{self.seq}", time.monotonic() + timeout_s, "it was not asked for"
        while (left_s := deadline - time.monotonic()) > 0:
            wait_s = min(_WAIT_S, left_s)
            response = self._http.request("GET", path, params={"wait": wait_s}, timeout=wait_s + _ANSWER_S)
            if response.status_code == 200:
                return self._checked(_results.decode(response.content))
            why = response.json()["waiting_for"]
        what = f"operation {self.seq} of run `{self.run_id}` has no result yet after {timeout_s:g} s"
        raise Unavailable(f"{what}: {why}. Ask again later, or wait for longer (`result(timeout_s=...)`)")

    def _checked(self, result: Result) -> Outcome:
        if isinstance(result, Failed):
            kind = InvalidInput if result.category == "user" else OperationFailed
            raise kind(f"operation {self.seq} of run `{self.run_id}`: {result.message}")
        if not isinstance(result, self._kind):
            raise Conflict(f"operation {self.seq} of run `{self.run_id}` was another one: its result is a {type(result).__name__}")
        return result


class TrainingRun:
    """A run as one writer sees it. Two writers of one run must agree on the numbers of their operations."""

    def __init__(self, http: Http, run: Run) -> None:
        self.id = run.id
        self.base_model = run.base_model
        self.rollouts = RunRollouts(http, run.id)
        self._http = http
        self._next_seq = run.next_seq
        self._unclear: str | None = None

    @property
    def next_seq(self) -> int:
        """The number that the next operation takes: with it a program that is started again knows what it had submitted."""
        return self._next_seq

    def submitted(self, seq: int, kind: type[Outcome]) -> Pending[Outcome]:
        """The result to come of an operation that was submitted before, by its number and the kind of its result."""
        return Pending(self._http, self.id, seq, kind)

    def forward_backward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", loss_config: dict[str, float | str] | None = None, *, logprobs: bool = True
    ) -> Pending[ForwardBackwardResult]:
        """Add the gradients of a batch; the loss is a sum over tokens and data. Without `logprobs` the result has the metrics alone, sooner."""
        return self._compute(data, loss, loss_config, backward=True, logprobs=logprobs)

    def forward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", loss_config: dict[str, float | str] | None = None, *, logprobs: bool = True
    ) -> Pending[ForwardBackwardResult]:
        """Only the loss and the log-probabilities; without `logprobs` only the loss, as of held-out data."""
        return self._compute(data, loss, loss_config, backward=False, logprobs=logprobs)

    def optim_step(self, learning_rate: float, **adam: float) -> Pending[OptimStepResult]:
        """Apply the gradients once and clear them; `adam` are the other fields of `AdamParams`."""
        operation = OptimStep(adam=AdamParams(learning_rate=learning_rate, **adam))
        return self._submit("", OptimStepResult, content=encode(operation), headers=_MSGPACK)

    def save_checkpoint(self, name: str) -> Pending[CheckpointResult]:
        """Keep the resumable state under a name."""
        return self._submit("/checkpoint", CheckpointResult, json={"name": name})

    def save_snapshot(self, name: str | None = None) -> Pending[SnapshotResult]:
        """Publish the weights for sampling. Without a name they stay while a deployment holds them, and else for a few days."""
        return self._submit("/snapshot", SnapshotResult, json={"name": name})

    def load(self, run_id: str, name: str, *, optimizer: bool = True) -> Pending[LoadResult]:
        """Begin where a named checkpoint ended: the first operation of a run only."""
        return self._submit("/load", LoadResult, json={"run_id": run_id, "name": name, "optimizer": optimizer})

    def state(self) -> Run:
        """The run as the server knows it now."""
        return Run.model_validate(self._http.get(f"/api/v1/runs/{self.id}"))

    def metrics(self, after: int = -1) -> list[RunMetric]:
        """Metrics of the operations behind number `after`."""
        return [RunMetric.model_validate(point) for point in self._http.get(f"/api/v1/runs/{self.id}/metrics", after=after)["data"]]

    def checkpoints(self) -> list[Checkpoint]:
        """Named checkpoints and snapshots, newest first."""
        return [Checkpoint.model_validate(item) for item in self._http.pages(f"/api/v1/runs/{self.id}/checkpoints")]

    def _compute(
        self, data: Sequence[Datum], loss: str, loss_config: dict[str, float | str] | None, *, backward: bool, logprobs: bool
    ) -> Pending[ForwardBackwardResult]:
        operation = ForwardBackward(loss=loss, loss_config=loss_config or {}, data=tuple(data), backward=backward, return_logprobs=logprobs)
        return self._submit("", ForwardBackwardResult, content=encode(operation), headers=_MSGPACK)

    def _submit(self, suffix: str, kind: type[Outcome], **body: Any) -> Pending[Outcome]:
        if self._unclear is not None:
            raise Conflict(f"{self._unclear}; take up the run again with `client.run`")
        seq = self._next_seq
        try:
            self._http.request("POST", f"/api/v1/runs/{self.id}/operations/{seq}{suffix}", repeatable=True, **body)
        except BloomeryError as error:
            # Refused by the server: the number is still free. Without an answer nobody knows, and another operation under it would be lost.
            if error.category == "server":
                self._unclear = f"whether operation {seq} of run `{self.id}` was accepted is unclear"
            raise
        self._next_seq = seq + 1
        return Pending(self._http, self.id, seq, kind)
