"""One run in the engine's memory: its queue of operations, the one that is being executed, and what the api did not make durable yet."""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from bloomery.config import DEFAULT_CHECKPOINT_S
from bloomery.engine.admission import Lack, lack, operation_need
from bloomery.engine.memory import Memory
from bloomery.obs.failpoints import failpoint
from bloomery.train.passes import Computed, Share
from bloomery.train.run import State, TrainableRun, Work
from bloomery.types.errors import reason
from bloomery.types.fingerprint import fingerprint
from bloomery.types.footprint import CHECKPOINT_BYTES
from bloomery.types.operations import Failed, ForwardBackward, LoadResult, Operation, Rejected, Result, effect_of_failure
from bloomery.types.protocol import CheckpointWritten, Execute, OperationDone

log = logging.getLogger(__name__)

QUICK_CHECKPOINT_S: Final = 1.0
"""One that takes longer (of a whole model, say) comes as much more rarely, and a replay then takes as much longer."""
STEP_AWAITED_S: Final = 10.0
"""Compute time for which a checkpoint waits for a step beyond that: behind one it holds no gradients."""
_FEWEST_BYTES: Final = 64 << 20
_RECORD_BYTES: Final = 1 << 10
"""Of an operation in the journal beside its arrays, about."""


class CheckpointAfter(NamedTuple):
    """How much a run may have done since its last checkpoint before it gets another one."""

    seconds: float = DEFAULT_CHECKPOINT_S
    """Of compute: about what a replay costs at most."""
    bytes: int | None = None
    """Of payloads, about what the journal keeps; None for as many as a checkpoint of the run has, and at least 64 MiB."""

    def payload_bytes(self, trained_numbers: int) -> int:
        """The same for a run that trains so many numbers."""
        return max(_FEWEST_BYTES, trained_numbers * CHECKPOINT_BYTES) if self.bytes is None else self.bytes


class _Execution(NamedTuple):
    """An operation that was begun."""

    order: Execute
    work: Work[Result]


class _Saved(NamedTuple):
    """A blob, and which of the run's states it holds."""

    key: str
    state: State
    digest: str | None
    """Of its weights; None where nobody asked yet."""


class HostedRun:
    """A run and its place in its history.

    Between two operations a checkpoint holds the run as it is, gradients that wait for a step included, so that a step of any number of operations
    leaves a journal and a replay that are bounded. While an operation is half done its gradients are: a checkpoint then holds the state after
    `rest_seq`, the last operation after which nothing waited for a step (only steps and loads change weights), and those after it are executed again.
    Where nothing changed since the last one, as after forwards alone, the same blob is the checkpoint of a later operation.
    """

    def __init__(
        self, run: TrainableRun, write: Callable[[str, bytes], None], *, last_seq: int, checkpoint_after: CheckpointAfter, restored: str | None = None
    ) -> None:
        """`restored`: the blob that the run was restored from."""
        self._run, self._write, self._checkpoint_after = run, write, checkpoint_after
        self._saved = None if restored is None else _Saved(restored, run.state(unfinished=True), None)
        self._queue: deque[Execute] = deque()
        self._current: _Execution | None = None
        self.share: Share | None = None
        """What the operation that was begun waits for."""
        self._seconds = self._unsaved_s = self._checkpoint_took_s = 0.0
        self._unsaved_bytes = 0
        self._received = self._rest_seq = self._saved_seq = last_seq
        self.executed = last_seq
        """Last operation with a result."""
        self.checkpoint_due = False
        """Whether a death now, or the journal, would cost too much: after every load, and when much was done since the last checkpoint."""
        self.unacknowledged: dict[int, OperationDone] = {}
        self.newest_checkpoint: CheckpointWritten | None = None
        self.tokens_trained = 0

    @property
    def run_id(self) -> str:
        """Of the run."""
        return self._run.spec.run_id

    @property
    def waiting(self) -> int:
        """Operations without a result."""
        return len(self._queue) + self.begun

    @property
    def begun(self) -> bool:
        """Whether an operation is half done."""
        return self._current is not None

    @property
    def next(self) -> Execute | None:
        """The operation that is half done, or else the one to begin."""
        if self._current is not None:
            return self._current.order
        return self._queue[0] if self._queue else None

    @property
    def computes(self) -> bool:
        """Whether what comes next needs a pass."""
        return self.next is not None and isinstance(self.next.operation, ForwardBackward)

    def receive(self, order: Execute) -> None:
        """Queue an operation; those whose result a new connection does not know arrive a second time."""
        if order.seq > self._received:
            self._received = order.seq
            self._queue.append(order)

    def acknowledge(self, seq: int) -> None:
        """Forget a result that is durable elsewhere."""
        self.unacknowledged.pop(seq, None)

    def begin(self) -> OperationDone | None:
        """Begin the next operation: its result, or `share` is what it asks for."""
        order = self._queue.popleft()
        failpoint("engine.operation.started")
        failpoint(f"engine.operation.{order.seq}")
        return self._begin(order, order.operation)

    def refuse(self, message: str, category: Literal["user", "server"]) -> OperationDone | None:
        """Fail the next operation without trying it."""
        order = self._queue.popleft()
        return self._begin(order, Rejected(message=message, category=category, effect=effect_of_failure(order.operation)))

    def give_up_waiting(self, message: str) -> OperationDone | None:
        """Fail the next operation without trying it, and let the run keep its gradients: sent again it may well run."""
        order = self._queue.popleft()
        effect, unbegun = effect_of_failure(order.operation), fingerprint(order.operation)
        return self._begin(order, Rejected(message=message, category="server", effect=effect, unbegun=unbegun))

    def lacks_memory(self, memory: Memory) -> Lack | None:
        """Why the next operation cannot run in the memory there is. What is replayed did, and is not judged again."""
        if self.next is None or self.next.replay:
            return None
        need = operation_need(self.next.operation, self._run.weights, self._run.spec.micro_batch_tokens)
        return None if need is None else lack(need, self._run.weights, memory)

    def resume(self, computed: Computed, seconds: float) -> OperationDone | None:
        """Go on with what the share gave: the operation's result, or the next `share`. `seconds` is what its pass took of this run's time."""
        self._seconds += seconds
        return self._drive(lambda work: work.send(computed))

    def fail(self, error: Exception) -> OperationDone | None:
        """The share cannot be computed: so goes its operation."""
        return self._drive(lambda work: work.throw(error))

    def checkpoint(self) -> CheckpointWritten | None:
        """Make the state durable, unless it is."""
        self.checkpoint_due = False
        unfinished = not self.begun
        seq = self.executed if unfinished else self._rest_seq
        if seq <= self._saved_seq:
            return None
        if self._saved is None or self._saved.state != self._run.state(unfinished=unfinished):
            self._saved = self._write_checkpoint(seq, unfinished)
        digest = self._saved.digest or self._run.weights_digest()
        self._saved, self._saved_seq = self._saved._replace(digest=digest), seq
        self._unsaved_s, self._unsaved_bytes = 0.0, 0
        self.newest_checkpoint = CheckpointWritten(run_id=self.run_id, seq=seq, key=self._saved.key, digest=digest)
        return self.newest_checkpoint

    def skip_checkpoint(self) -> None:
        """Go on without one, until the next would be due."""
        self.checkpoint_due, self._unsaved_s, self._unsaved_bytes = False, 0.0, 0

    def _write_checkpoint(self, seq: int, unfinished: bool) -> _Saved:
        began = time.perf_counter()
        key = f"checkpoints/{self.run_id}/{seq}-{secrets.token_hex(4)}.safetensors"
        self._write(key, self._run.checkpoint_bytes(unfinished=unfinished))
        self._checkpoint_took_s = time.perf_counter() - began
        failpoint("engine.checkpoint.written")
        return _Saved(key, self._run.state(unfinished=unfinished), None)

    def _begin(self, order: Execute, operation: Operation) -> OperationDone | None:
        self._current = _Execution(order, self._run.execute(operation, seq=order.seq))
        self._seconds = 0.0
        return self._drive(lambda work: next(work))

    def _drive(self, step: Callable[[Work[Result]], Share]) -> OperationDone | None:
        assert self._current is not None
        order, work = self._current
        began = time.perf_counter()
        self.share, result = None, None
        try:
            self.share = step(work)
        except StopIteration as done:
            result = done.value
        except Exception as error:
            log.exception("run %s: operation %d", self.run_id, order.seq)
            result = Failed(message=f"operation {order.seq} broke: {type(error).__name__}: {reason(error)}", category="server")
        self._seconds += time.perf_counter() - began
        return None if result is None else self._finish(order, result)

    def _finish(self, order: Execute, result: Result) -> OperationDone:
        done = OperationDone(run_id=self.run_id, seq=order.seq, result=result, seconds=self._seconds, replay=order.replay)
        self._current = None
        self.executed = order.seq
        self.unacknowledged[order.seq] = done
        self._unsaved_s += self._seconds
        self._unsaved_bytes += _RECORD_BYTES + (order.operation.input_bytes if isinstance(order.operation, ForwardBackward) else 0)
        if self._run.at_rest:
            self._rest_seq = order.seq
        self.checkpoint_due |= isinstance(result, LoadResult) or self._much_is_unsaved
        if isinstance(order.operation, ForwardBackward) and not isinstance(result, Failed):
            self.tokens_trained += sum(datum.tokens.shape[0] for datum in order.operation.data)
        failpoint("engine.operation.done")
        return done

    @property
    def _much_is_unsaved(self) -> bool:
        pause_s = self._checkpoint_after.seconds * max(1.0, self._checkpoint_took_s / QUICK_CHECKPOINT_S)
        if not self._run.at_rest:
            pause_s += STEP_AWAITED_S
        return self._unsaved_s >= pause_s or self._unsaved_bytes >= self._checkpoint_after.payload_bytes(self._run.weights.masters.numel())
