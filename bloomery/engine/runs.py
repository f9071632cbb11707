"""What is ordered for runs: an engine holds them and gives them turns, a replica refuses them by name.

`executor` knows neither which of the two it has nor what a run is.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

from bloomery.config import EngineConfig
from bloomery.config.data_dir import DataDir
from bloomery.engine.admission import Lack, lack_to_open
from bloomery.engine.hosted import CheckpointAfter, HostedRun
from bloomery.engine.ledger import InHand, Ledger
from bloomery.engine.memory import Memory, MemoryWaits
from bloomery.engine.shelf import BlobShelf
from bloomery.engine.training import FOR_OPERATIONS, Training
from bloomery.models.decoder import Decoder
from bloomery.models.memory import free_bytes
from bloomery.train.run import TrainableRun
from bloomery.types.batching import rows_at_once
from bloomery.types.errors import BloomeryError, Conflict, WorkerError, blame
from bloomery.types.operations import Failed
from bloomery.types.protocol import Acknowledge, CloseRun, Execute, FromEngine, OpenRun, OperationDone, RunClosed, RunOpened

log = logging.getLogger(__name__)

RunOrder = OpenRun | Execute | Acknowledge | CloseRun
_FOR_RUNS: Final = Memory(free=free_bytes)
"""Where a whole model is to be held, it is judged by this again."""
Send = Callable[[FromEngine], None]
_REFUSAL: Final = "this process is a replica, which only samples: send what concerns runs to the engine of the base model"


class ProcessRuns(Protocol):
    """The runs of one process and their turns."""

    @property
    def executed(self) -> Mapping[str, int]:
        """Last executed operation of each run in memory."""
        ...

    @property
    def waiting(self) -> int:
        """Operations without a result."""
        ...

    @property
    def next_turn_in_s(self) -> float:
        """How long until a turn finds something to do: 0 while there is work, infinite without any."""
        ...

    @property
    def waits_for_memory(self) -> bool:
        """Whether a run or an operation does, which others hold."""
        ...

    @property
    def begun(self) -> bool:
        """Whether an operation is half done."""
        ...

    @property
    def tokens_trained(self) -> int:
        """Since the process started."""
        ...

    def obey(self, order: RunOrder) -> None:
        """Do what is ordered, or queue it."""
        ...

    def repeat(self) -> None:
        """Say again what a new conversation may not know."""
        ...

    def take_turn(self, *, begin: bool) -> bool:
        """One turn, if anybody has work; without `begin` only what is half done goes on."""
        ...

    def checkpoint_all(self) -> None:
        """Make every run durable."""
        ...

    def close(self) -> None:
        """A clean end."""
        ...


class HeldRuns:
    """Those of an engine; the ledger knows what it has in hand."""

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        shelf: BlobShelf,
        send: Send,
        checkpoint_after: CheckpointAfter,
        *,
        memory: Memory = _FOR_RUNS,
        operations_memory: Memory = FOR_OPERATIONS,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._base_hash, self._decoder, self._shelf, self._send = config.model.base_hash, decoder, shelf, send
        self._checkpoint_after, self._memory = checkpoint_after, memory
        self._waits = MemoryWaits(clock_s)
        self._lacking: dict[str, OpenRun] = {}
        """What is to be opened when there is memory for it."""
        self._ledger = Ledger(DataDir(Path(config.data_dir)).in_hand(config.model.base_hash))
        self._training = Training(
            self._ledger,
            send,
            pass_rows=rows_at_once(decoder.config.hidden_size),
            memory=operations_memory,
            clock_s=clock_s,
            let_go=shelf.forget,
        )

    @property
    def executed(self) -> Mapping[str, int]:
        """Last executed operation of each run in memory."""
        return {run_id: run.executed for run_id, run in self._training.runs.items()}

    @property
    def waiting(self) -> int:
        """Operations without a result."""
        return self._training.waiting

    @property
    def next_turn_in_s(self) -> float:
        """How long until a turn finds something to do: 0 while there is work, infinite without any."""
        return min([self._training.next_turn_in_s, *map(self._waits.due_in_s, self._lacking)])

    @property
    def begun(self) -> bool:
        """Whether an operation is half done."""
        return self._training.begun

    @property
    def waits_for_memory(self) -> bool:
        """Whether a run or an operation does, which others hold."""
        return self._waits.anybody or self._training.waits_for_memory

    @property
    def tokens_trained(self) -> int:
        """Since the process started."""
        return self._training.tokens_trained

    def obey(self, order: RunOrder) -> None:
        """Do what is ordered, or queue it."""
        runs = self._training.runs
        match order:
            case OpenRun():
                self._open(order)
            case Execute(run_id=run_id) if run_id in runs:
                runs[run_id].receive(order)
            case Acknowledge(run_id=run_id, seq=seq) if run_id in runs:
                runs[run_id].acknowledge(seq)
            case CloseRun(run_id=run_id):
                self._close(run_id)
            case _:
                log.info("ignored %s of a run that is not held", type(order).__name__)

    def repeat(self) -> None:
        """Results that were not acknowledged, and where the newest checkpoint of each run is. What is to be opened is asked for again."""
        for run_id in list(self._lacking):
            self._forget(run_id)
        for run in self._training.runs.values():
            for done in run.unacknowledged.values():
                self._send(done)
            if run.newest_checkpoint is not None:
                self._send(run.newest_checkpoint)

    def take_turn(self, *, begin: bool) -> bool:
        """One turn, if anybody has work; without `begin` only what is half done goes on."""
        due = [order for run_id, order in self._lacking.items() if begin and self._waits.due_in_s(run_id) == 0]
        for order in due:
            self._open(order)
        return self._training.take_turn(begin=begin) or bool(due)

    def checkpoint_all(self) -> None:
        """Make every run durable."""
        for run in self._training.runs.values():
            self._training.checkpoint(run)

    def close(self) -> None:
        """A clean end."""
        self._ledger.close()

    def _open(self, order: OpenRun) -> None:
        """Hold a run; one that is held already is replaced, for the api knows better which history counts."""
        spec = order.spec
        self._training.forget(spec.run_id)
        if (lack := self._lacks_memory(order)) is not None:
            self._wait_for_memory(order, lack)
            return
        self._forget(spec.run_id)
        opening = InHand(spec.run_id, order.checkpoint or "")
        self._ledger.enter([opening])
        try:
            with blame(WorkerError, f"cannot open run {spec.run_id}"):
                if spec.base_hash != self._base_hash:
                    raise Conflict(f"the run is on base model {spec.base_hash}, this engine holds {self._base_hash}")
                if self._ledger.condemns(opening, replay=False):
                    raise WorkerError(f"the engine died twice while it opened the run from {order.checkpoint or 'its beginning'}")
                run = TrainableRun(self._decoder, spec, self._shelf)
                if order.checkpoint is not None:
                    run.restore(self._shelf.read(order.checkpoint))
        except BloomeryError as error:
            self._ledger.enter(())
            self._shelf.forget(spec.run_id)
            self._send(RunOpened(run_id=spec.run_id, error=error.message))
            return
        self._ledger.survived(opening)
        restored, after = order.checkpoint, self._checkpoint_after
        hosted = HostedRun(run, self._shelf.write, last_seq=order.last_seq, checkpoint_after=after, restored=restored)
        self._training.hold(hosted, order.project)
        self._send(RunOpened(run_id=spec.run_id))

    def _lacks_memory(self, order: OpenRun) -> Lack | None:
        spec = order.spec
        # An adapter that was held before is held again: what its operations wait for is no estimate.
        if spec.base_hash != self._base_hash or (spec.lora.rank and order.checkpoint is not None):
            return None
        return lack_to_open(spec.lora, self._decoder, self._memory)

    def _wait_for_memory(self, order: OpenRun, lack: Lack) -> None:
        """Look again later, or refuse: as the caller's error only what would not fit into an engine that does nothing else."""
        run_id = order.spec.run_id
        # What its writer keeps of a run that was held takes memory, too.
        self._shelf.forget(run_id)
        if not lack.for_ever and self._waits.go_on(run_id):
            self._lacking[run_id] = order
            return
        self._forget(run_id)
        if lack.for_ever:
            self._send(RunOpened(run_id=run_id, error=lack.message, fails="user"))
        else:
            self._send(RunOpened(run_id=run_id, error=f"{lack.in_vain}. Send its operations again", fails="server"))

    def _forget(self, run_id: str) -> None:
        """It is not to be opened later."""
        self._lacking.pop(run_id, None)
        self._waits.end(run_id)

    def _close(self, run_id: str) -> None:
        self._forget(run_id)
        if run_id in self._training.runs:
            self._training.checkpoint(self._training.runs[run_id])
            self._training.forget(run_id)
            self._shelf.forget(run_id)
        self._send(RunClosed(run_id=run_id))


class NoRuns:
    """A replica's: it holds none, and touches neither ledger nor checkpoints."""

    executed: Mapping[str, int] = {}
    waiting = tokens_trained = 0
    next_turn_in_s = math.inf
    begun = waits_for_memory = False

    def __init__(self, send: Send) -> None:
        self._send = send

    def obey(self, order: RunOrder) -> None:
        """Refuse it."""
        match order:
            case OpenRun(spec=spec):
                self._send(RunOpened(run_id=spec.run_id, error=_REFUSAL))
            case Execute(run_id=run_id, seq=seq):
                self._send(OperationDone(run_id=run_id, seq=seq, result=Failed(message=_REFUSAL, category="server"), seconds=0.0))
            case CloseRun(run_id=run_id):
                self._send(RunClosed(run_id=run_id))
            case Acknowledge():
                log.info("ignored an acknowledgement: a replica gives no results")

    def repeat(self) -> None:
        """There is nothing."""

    def take_turn(self, *, begin: bool) -> bool:
        """Nobody has work."""
        return False

    def checkpoint_all(self) -> None:
        """There is nothing."""

    def close(self) -> None:
        """There is nothing."""
