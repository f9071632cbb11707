"""Who trains next: projects take turns, and within each its runs; those whose micro-batches fit together share a pass.

A turn is one pass, or one operation that needs none. Because the run at the head always gets its turn and then goes to the end with its project,
nobody with a small batch waits for more than one micro-batch of each other project between two turns of his own. An operation for which others leave
no memory waits while they go on, for so long and no longer. Every operation is in the ledger while it is executed; a suspect has no company.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from bloomery.engine.admission import Lack, shared_pass_bytes
from bloomery.engine.hosted import HostedRun
from bloomery.engine.ledger import CHECKPOINT, InHand, Ledger
from bloomery.engine.memory import Memory, MemoryWaits
from bloomery.engine.turns import Turns
from bloomery.obs.failpoints import failpoint
from bloomery.train.passes import compute, goes_with
from bloomery.types.operations import ForwardBackward, Operation
from bloomery.types.protocol import Execute, FromEngine, OperationDone, RunOpened

log = logging.getLogger(__name__)

FOR_OPERATIONS: Final = Memory()
"""What this process keeps serves them again."""


class Training:
    """The runs in memory and their turns."""

    def __init__(
        self,
        ledger: Ledger,
        send: Callable[[FromEngine], None],
        *,
        pass_rows: int,
        memory: Memory = FOR_OPERATIONS,
        clock_s: Callable[[], float] = time.monotonic,
        let_go: Callable[[str], object] = lambda run_id: None,
    ) -> None:
        """`pass_rows`: at most so many rows of several runs are computed together; `let_go` is told of a run that is given up."""
        self._let_go = let_go
        self.runs: dict[str, HostedRun] = {}
        self._ledger, self._send, self._pass_rows, self._memory = ledger, send, pass_rows, memory
        self._turns = Turns()
        self._waits = MemoryWaits(clock_s)
        """Of runs whose next operation lacks memory."""
        self._tokens_before = 0
        """Trained by runs that were let go."""

    @property
    def waiting(self) -> int:
        """Operations without a result."""
        return sum(run.waiting for run in self.runs.values())

    @property
    def waits_for_memory(self) -> bool:
        """Whether an operation does, which others hold."""
        return self._waits.anybody

    @property
    def begun(self) -> bool:
        """Whether an operation is half done."""
        return any(run.begun for run in self.runs.values())

    @property
    def tokens_trained(self) -> int:
        """Since the engine started."""
        return self._tokens_before + sum(run.tokens_trained for run in self.runs.values())

    @property
    def next_turn_in_s(self) -> float:
        """How long until a turn finds something to do: 0 while there is work, infinite without any."""
        return min((self._waits.due_in_s(run_id) for run_id, run in self.runs.items() if run.waiting), default=math.inf)

    def hold(self, run: HostedRun, project: str = "") -> None:
        """Give a run its turns among those of its project."""
        self.runs[run.run_id] = run
        self._turns.join(run.run_id, project)
        if self._ledger.condemns(InHand(run.run_id, CHECKPOINT), replay=False):
            what = "each of the last two engines that wrote a checkpoint of it died: it is trained without any until the server starts again"
            log.error("run %s: %s. Give it more memory; its journal grows meanwhile", run.run_id, what)

    def forget(self, run_id: str) -> None:
        """Let go of a run as it is, if it is held."""
        run = self.runs.pop(run_id, None)
        if run is not None:
            self._tokens_before += run.tokens_trained
            self._turns.leave(run_id)
            self._waits.end(run_id)

    def take_turn(self, *, begin: bool) -> bool:
        """One turn, if anybody has work; without `begin` only what is half done goes on."""
        run = next(self._with_work(begin), None)
        if run is None:
            return False
        self._turns.had(run.run_id)
        if self._ready(run):
            self._compute(self._with_company(run, begin))
        # A death between two turns is nobody's fault.
        self._ledger.enter(())
        return True

    def checkpoint(self, run: HostedRun) -> None:
        """Make a run's state durable, and say so. A death meanwhile is the checkpoint's, and after two of them the run is trained without any."""
        checkpointing = InHand(run.run_id, CHECKPOINT)
        if self._ledger.condemns(checkpointing, replay=False):
            run.skip_checkpoint()
            return
        try:
            with self._ledger.instead(checkpointing):
                written = run.checkpoint()
            self._ledger.survived(checkpointing)
        except Exception:
            # Nothing is lost but time: the operations since the checkpoint before are in the journal. Another try at once would fail as well.
            log.exception("run %s: no checkpoint could be written; training goes on", run.run_id)
            run.skip_checkpoint()
            return
        if written is not None:
            self._send(written)

    def _with_work(self, begin: bool) -> Iterator[HostedRun]:
        """Those who can go on, in the order of their turns."""

        def has_work(run_id: str) -> bool:
            run = self.runs[run_id]
            return run.begun or (begin and run.waiting > 0 and self._waits.due_in_s(run_id) == 0)

        return (self.runs[run_id] for run_id in self._turns.among(has_work))

    def _ready(self, run: HostedRun) -> bool:
        """Whether the run has a share to compute; begins its next operation unless one is half done."""
        if run.share is None and run.next is not None:
            self._enter([run])
            if self._ledger.condemns(_in_hand(run), replay=run.next.replay):
                self._give_up(run, run.next)
            elif (lack := run.lacks_memory(self._memory)) is not None:
                self._wait_for_memory(run, lack)
            else:
                self._waits.end(run.run_id)
                self._settle(run, run.begin())
        return run.share is not None

    def _wait_for_memory(self, run: HostedRun, lack: Lack) -> None:
        """Look again later, or fail the operation: as the caller's error only where it would not fit into an engine that does nothing else."""
        if not lack.for_ever and self._waits.go_on(run.run_id):
            return
        self._waits.end(run.run_id)
        if lack.for_ever:
            self._settle(run, run.refuse(lack.message, "user"))
            return
        log.warning("run %s: %s", run.run_id, lack.in_vain)
        self._settle(run, run.give_up_waiting(f"{lack.in_vain}. The operation was not begun, and the run is as it was: send it again"))

    def _with_company(self, first: HostedRun, begin: bool) -> list[HostedRun]:
        """The first, and others whose shares fit into one pass with its; they have had their turns then."""
        assert first.share is not None
        team, rows = [first], first.share.rows
        others = [] if self._ledger.suspects(_in_hand(first)) else [run for run in self._with_work(begin) if run is not first]
        for run in others:
            if rows >= self._pass_rows:
                break
            if not run.computes or self._ledger.suspects(_in_hand(run)) or not self._ready(run):
                continue
            if run.share is not None and goes_with(first.share, run.share) and rows + run.share.rows <= self._pass_rows:
                team.append(run)
                rows += run.share.rows
        team = self._fitting(team)
        for run in team[1:]:
            self._turns.had(run.run_id)
        return team

    def _fitting(self, team: list[HostedRun]) -> list[HostedRun]:
        """The first, and those of the others that memory has room for in one pass with it. Each was admitted as if it would be computed alone."""
        shares = {run.run_id: run.share for run in team if run.share is not None}
        device = shares[team[0].run_id].weights.decoder.device
        # Elsewhere a pass that is too large breaks, and kills nobody; and what an allocator keeps for the next one counts as taken.
        if len(team) == 1 or device.type != "cpu":
            return team
        free = self._memory.free(device)
        if shared_pass_bytes(list(shares.values())) <= free:
            return team
        kept = team[:1]
        for run in team[1:]:
            if shared_pass_bytes([shares[one.run_id] for one in (*kept, run)]) <= free:
                kept.append(run)
        return kept

    def _compute(self, team: list[HostedRun]) -> None:
        """One pass; if it breaks, each share is computed alone, so that only the culprit's operation fails."""
        shares = [run.share for run in team if run.share is not None]
        self._enter(team)
        began = time.perf_counter()
        for operation in map(_in_hand, team):
            failpoint(f"engine.pass.{operation.at}")
        try:
            computed = compute(shares)
        except Exception as error:
            if len(team) == 1:
                self._settle(team[0], team[0].fail(error))
                return
            log.warning("a pass of %d runs broke (%s: %s); each is computed alone", len(team), type(error).__name__, error)
            for run in team:
                self._compute([run])
            return
        seconds_per_row = (time.perf_counter() - began) / sum(share.rows for share in shares)
        for run, share, found in zip(team, shares, computed, strict=True):
            self._settle(run, run.resume(found, seconds_per_row * share.rows))

    def _settle(self, run: HostedRun, done: OperationDone | None) -> None:
        if done is not None:
            self._ledger.survived(InHand(done.run_id, done.seq))
            self._send(done)
        if run.checkpoint_due:
            self.checkpoint(run)

    def _enter(self, team: Iterable[HostedRun]) -> None:
        self._ledger.enter(_in_hand(run) for run in team)

    def _give_up(self, run: HostedRun, order: Execute) -> None:
        """Too many engines died in this operation: fail it, or, where its result is known, let go of the run that cannot be brought back."""
        what = f"operation {order.seq} ({_gist(order.operation)})"
        log.error("run %s: %s killed its engine again and again; it is not tried any more", run.run_id, what)
        if order.replay:
            self.forget(run.run_id)
            self._let_go(run.run_id)
            message = f"the engine died again and again while it replayed {what}: give it more memory, then stop and start the server"
            self._send(RunOpened(run_id=run.run_id, error=message))
        else:
            self._settle(run, run.refuse(f"the engine died twice in {what}, so it is not tried again: send less at a time", "server"))


def _in_hand(run: HostedRun) -> InHand:
    assert run.next is not None
    return InHand(run.run_id, run.next.seq)


def _gist(operation: Operation) -> str:
    name = str(type(operation).__struct_config__.tag)
    if not isinstance(operation, ForwardBackward):
        return name
    lengths = [datum.tokens.shape[0] for datum in operation.data]
    return f"{name} of {sum(lengths)} tokens, the longest sequence {max(lengths)}"
