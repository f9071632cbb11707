"""A run's history as its callers see it: operations accepted by number, results by number, rows that follow.

`ready`: operations up to here are journaled without a gap. `done`: results up to here are journaled. An operation may arrive before its
predecessors; if one of those stays away too long, a `Rejected` takes its place. Results that save something are shown once their row is there.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from bloomery.obs import background
from bloomery.services.listeners import Listeners
from bloomery.services.training.backlog import MAX_WAITING, MAX_WAITING_BYTES, Backlog, RunBacklog, payload_bytes, small
from bloomery.services.training.replayed import InRows, in_rows
from bloomery.services.training.settle import RunKey, Settlement, last_checkpoint, restore_point, saves, settle
from bloomery.store.database import Database
from bloomery.store.journal import Journal, JournaledResult
from bloomery.types.errors import BloomeryError, Conflict, Corrupt, InvalidInput, NotFound, Stopped, TooLarge, Unavailable, reason
from bloomery.types.generation import Weights
from bloomery.types.operations import (
    Effect,
    ForwardBackward,
    ForwardBackwardResult,
    Operation,
    Rejected,
    Result,
    RunSpec,
    SaveSnapshot,
    SnapshotResult,
)

log = logging.getLogger(__name__)

KEPT_IN_MEMORY: Final = 32
"""Operations that wait, at most; others are read from the journal when it is their turn."""
KEPT_BYTES: Final = 64 << 20
"""Of their payloads, beside that of the first."""
RETRY_S: Final = 1.0
ROWS_FOLLOW_S: Final = 0.1
"""Rows that nobody waits for are written so much later, many at once: those of a step, say, in the transaction of what is published behind it."""

Make = Callable[[], Awaitable[Operation]]


class RunFacts(NamedTuple):
    """What never changes about a run."""

    project: str
    spec: RunSpec
    first_seq: int

    @property
    def key(self) -> RunKey:
        """Whose rows."""
        return RunKey(self.project, self.spec.run_id)


class Successor(NamedTuple):
    """An adapter that a run published, and the version that it had published before."""

    project: str
    before: str
    base_hash: str
    weights: Weights


Succeeded = Callable[[Successor], None]


class History:
    """Accepts operations and shows results; `changed` is called when there is something to do with them.

    `published` hear of weights with a row, `succeeded` of successors as soon as the engine has published them: their blobs are durable, and while
    they are brought to where they may be wanted, the journal and rows follow.
    """

    def __init__(
        self,
        facts: RunFacts,
        journal: Journal,
        database: Database,
        published: Listeners,
        succeeded: Succeeded,
        backlog: Backlog,
        *,
        gap_s: float,
        changed: Callable[[], None],
    ) -> None:
        self.facts = facts
        self.journal = journal
        self.done = max(journal.last_result, facts.first_seq - 1)
        self.ready = self.done
        self.failure: str | None = None
        """Why the run cannot go on in this life of the server."""
        self.gap_at: float | None = None
        """When the missing operation before those that wait is given up, by the loop's clock."""
        self.lost: dict[int, InRows | None] = {}
        """What rows say of operations whose results were journaled once and are not here: they are computed again."""
        self.unsettled: dict[int, Settlement] = {}
        self._told: set[int] = set()
        """Operations whose results somebody was shown since the start."""
        self._bounded_bytes = 0
        """Of results, that were left when they were bounded last."""
        self._database, self._published, self._gap_s, self._changed = database, published, gap_s, changed
        self._succeeded = succeeded
        self._version: str | None = None
        """That was published last since the start."""
        self._backlog = RunBacklog(backlog)
        self._accepting: dict[int, asyncio.Task[None]] = {}
        self._recent: dict[int, Operation] = {}
        self._requests: dict[int, bytes] = {}
        """Hashes of the requests that brought those without a result, as far as they came since the start."""
        self._waiting: dict[int, asyncio.Future[JournaledResult | None]] = {}
        self._to_settle, self._to_settle_now = asyncio.Event(), asyncio.Event()
        self._settler: asyncio.Task[None] | None = None

    async def start(self, settled: int) -> None:
        """Check that the journal reaches back to a checkpoint and forward to what is known, and settle what the last process left."""
        for seq in self.journal.operations_after(self.done):
            self._backlog.add(seq, self.journal.operation_bytes(seq))
        self._advance()
        run_id = self.facts.key.run_id
        known = max(settled, await self._database.read(lambda connection: last_checkpoint(connection, run_id)))
        lost = range(self.done + 1, known + 1)
        if lost and (known > settled or known > self.ready):
            # Results are journaled before their rows are written: without them the run would begin again, and nobody would notice.
            has = f"ends with result {self.done}" if self.journal.last_result >= 0 else "has no results"
            raise Corrupt(f"the journal of run `{run_id}` {has}, yet operation {known} was done: bring its directory back from a backup")
        restored = await self._database.read(lambda connection: restore_point(connection, run_id, done=self.done))
        needed = range(self.facts.first_seq if restored is None else restored.seq + 1, self.done + 1)
        if lacking := [seq for seq in needed if not self.journal.has_operation(seq)]:
            lacks = f"lacks operation {lacking[0]}, whose result is known and in no checkpoint"
            raise Corrupt(f"the journal of run `{run_id}` {lacks}: bring its directory back from a backup")
        if lost:
            log.warning("run %s: the results of operations %d to %d are lost; they are computed again", run_id, lost[0], lost[-1])
            self.lost = await self._database.read(lambda connection: {seq: in_rows(connection, self.facts.key, seq) for seq in lost})
        for seq in range(settled + 1, self.done + 1):
            await self._note_unsettled(seq, await self.journal.result(seq))
        self._to_settle.set()
        self._settler = background.start(self._settle(), f"settle-{run_id}")

    async def close(self) -> None:
        """Finish what is being journaled, and stop."""
        await asyncio.gather(*self._accepting.values(), return_exceptions=True)
        await background.stop(self._settler)
        self._backlog.forget()
        await self.journal.close()

    @property
    def last_known(self) -> int:
        """Highest number of an operation that arrived."""
        return max(self.ready, self.journal.last_operation, *self._accepting)

    async def submit(self, seq: int, make: Make, *, refused: Effect = "spoil", request: bytes = b"") -> None:
        """Journal the operation that `make` gives. Repetitions change nothing, and another `request` (its hash) under the same number is refused.

        A user error in `make` takes the operation's place in the order; `refused` is what then becomes of the gradients.
        """
        if self.failure is not None:
            raise Stopped(self.failure)
        if seq < self.facts.first_seq:
            numbered = f"operations of this run are numbered from {self.facts.first_seq}, not {seq}"
            raise InvalidInput(f"{numbered}: the next one is {self.last_known + 1}", field="seq")
        if seq <= self.ready or self.journal.has_operation(seq):
            await self._require_same(seq, request)
            return
        if seq > self.ready + MAX_WAITING:
            raise InvalidInput(f"operation {seq} is too far ahead: the next one is {self.ready + 1}", field="seq")
        if seq > self.done + MAX_WAITING:
            raise Unavailable(f"{MAX_WAITING} operations of run `{self.facts.key.run_id}` wait for the engine: go on when some have a result")
        joins = seq in self._accepting
        await asyncio.shield(self._accept_once(seq, lambda: _made(make, refused), request))
        if joins:
            await self._require_same(seq, request)

    async def result(self, seq: int, timeout_s: float) -> Result | None:
        """The result of an operation, or None while there is none after `timeout_s`."""
        if not self.facts.first_seq <= seq <= self.last_known:
            has = f"its last one is {self.last_known}" if self.last_known >= self.facts.first_seq else "it has none yet"
            raise NotFound(f"run `{self.facts.key.run_id}` has no operation {seq}, {has}: submit it first", field="seq")
        clock = asyncio.get_running_loop().time
        until = clock() + timeout_s
        while not self._shows(seq):
            if self.failure is not None:
                raise Stopped(self.failure)
            waiter = self._waiting.setdefault(seq, asyncio.get_running_loop().create_future())
            arrived, _ = await asyncio.wait({waiter}, timeout=max(0.0, until - clock()))
            if not arrived:
                return None
            if (told := waiter.result()) is not None:
                self._told.add(seq)
                return told.result
        found = await self.journal.result(seq)
        self._told.add(seq)
        return found.result

    async def operation(self, seq: int) -> Operation:
        """An accepted operation."""
        return self._recent.get(seq) or await self.journal.operation(seq)

    async def keep(self, results: dict[int, JournaledResult]) -> None:
        """Journal the next results, then let them be seen."""
        results = {seq: msgspec.structs.replace(result, request=await self._request(seq)) for seq, result in results.items()}
        for result in results.values():
            self._note_successor(result.result)
        await self.journal.append_results(results)
        for seq, result in results.items():
            await self._note_unsettled(seq, result)
            self._recent.pop(seq, None)
            self._requests.pop(seq, None)
            self.lost.pop(seq, None)
        self._backlog.remove(results)
        self.done = max(results)
        self._to_settle.set()
        self._wake({seq: result for seq, result in results.items() if self._shows(seq)})

    async def fill_gap(self) -> None:
        """Give up the operations that did not come in time, so that those behind them can run."""
        if self.gap_at is None or asyncio.get_running_loop().time() < self.gap_at:
            return
        missing = [self.ready + 1]
        while not self.journal.has_operation(missing[-1] + 1):
            missing.append(missing[-1] + 1)
        log.warning("run %s: operations %s did not arrive within %g s and are given up", self.facts.key.run_id, missing, self._gap_s)
        refusal = Rejected(message=f"this operation did not arrive within {self._gap_s:g} s of a later one: submit operations without gaps")
        await asyncio.gather(*(self._accept_once(seq, _always(refusal)) for seq in missing))

    def settle_now(self) -> None:
        """Somebody waits for the rows."""
        self._to_settle_now.set()

    async def drop_old_results(self, before_us: int) -> None:
        """Forget results that are older, unless they still have to be settled, and what is too much in bytes."""
        if all(settlement.done.done_us >= before_us for settlement in self.unsettled.values()):
            await self.journal.drop_results(before_us)
        self._bounded_bytes = 0
        await self._bound_results()
        self._told = {seq for seq in self._told if self.journal.has_result(seq)}

    async def _bound_results(self) -> None:
        """Forget what is too much in bytes. Where a replay needs it all, again only when there is another segment that may go."""
        bounds, held = self.journal.bounds, self.journal.result_bytes
        if held <= max(bounds.most_bytes, self._bounded_bytes + bounds.segment_bytes):
            return
        await self.journal.bound_results(bounds.most_bytes, self._told, min(self.unsettled, default=self.done + 1))
        self._bounded_bytes = self.journal.result_bytes
        log.info("run %s: dropped %d MiB of results", self.facts.key.run_id, (held - self._bounded_bytes) >> 20)

    def fail(self, why: str) -> None:
        """The run cannot go on until someone repairs its files; whoever waits is told."""
        self.failure = why
        self._backlog.forget()
        self._wake(dict.fromkeys(self._waiting))

    async def _require_same(self, seq: int, request: bytes) -> None:
        known = await self._request(seq) if request else b""
        if known and known != request:
            what = f"operation {seq} was submitted before with another body"
            raise Conflict(f"{what}: repeat that body, or give a new operation the next number", field="seq")

    async def _request(self, seq: int) -> bytes:
        return self._requests[seq] if seq in self._requests else await self.journal.request(seq)

    def _note_successor(self, result: Result) -> None:
        if not isinstance(result, SnapshotResult):
            return
        before, self._version = self._version, result.version
        # A whole model takes memory twice while it loads, and what others need for what nobody may ask for.
        if self.facts.spec.lora.rank and before not in (None, result.version):
            self._succeeded(Successor(self.facts.project, before, self.facts.spec.base_hash, Weights(version=result.version, key=result.key)))

    def _accept_once(self, seq: int, make: Make, request: bytes = b"") -> asyncio.Task[None]:
        if seq not in self._accepting:
            self._accepting[seq] = asyncio.create_task(self._accept(seq, make, request))
        return self._accepting[seq]

    async def _accept(self, seq: int, make: Make, request: bytes) -> None:
        try:
            operation = await make()
            await self._journal_operation(seq, operation, request)
        finally:
            del self._accepting[seq]
        self._advance()
        self._changed()

    async def _journal_operation(self, seq: int, operation: Operation, request: bytes) -> None:
        size_bytes = payload_bytes(operation)
        if not small(operation):
            self._require_room(seq, size_bytes)
        self._backlog.add(seq, size_bytes)
        try:
            await self.journal.append_operation(seq, operation, request=request)
        except OSError as error:
            self._backlog.remove([seq])
            raise Unavailable(f"operation {seq} cannot be journaled: {reason(error)}") from error
        self._requests[seq] = request
        kept_bytes = sum(map(payload_bytes, self._recent.values()))
        if not self._recent or (len(self._recent) < KEPT_IN_MEMORY and kept_bytes + size_bytes <= KEPT_BYTES):
            self._recent[seq] = operation

    def _require_room(self, seq: int, size_bytes: int) -> None:
        """Of bytes. What is computed next is taken in any case: nothing else makes room."""
        if seq == self.done + 1:
            return
        needed_bytes, run_id = self._backlog.bytes + size_bytes, self.facts.key.run_id
        if self.ready == self.done:
            # All that waits does so for an operation that may not come before these were taken, as the SDK sends the first of many pieces last.
            if needed_bytes > MAX_WAITING_BYTES:
                behind = f"what arrived before operation {self.ready + 1} of run `{run_id}` has more than {MAX_WAITING_BYTES >> 20} MiB"
                raise TooLarge(f"{behind} with operation {seq}: send less in one call", field="seq")
            if not self._backlog.takes_behind_gap(size_bytes):
                waits = f"operations of run `{run_id}` with {self._backlog.bytes >> 20} MiB wait for operation {self.ready + 1}"
                raise Unavailable(f"{waits}, and those of all runs have no room for more at present: go on when some have a result")
        elif needed_bytes > self._backlog.most_bytes:
            waits = f"operations of run `{run_id}` with {self._backlog.bytes >> 20} MiB wait for the engine"
            raise Unavailable(f"{waits}, and {self._backlog.most_bytes >> 20} MiB may at present: go on when some have a result")

    def _advance(self) -> None:
        before = self.ready
        while self.journal.has_operation(self.ready + 1):
            self.ready += 1
        if self.ready > before:
            self._backlog.gap_closed()
        if self.journal.last_operation <= self.ready:
            self.gap_at = None
        elif self.gap_at is None or self.ready > before:
            self.gap_at = asyncio.get_running_loop().time() + self._gap_s

    def _shows(self, seq: int) -> bool:
        return seq <= self.done and not (seq in self.unsettled and saves(self.unsettled[seq].done.result))

    def _wake(self, told: Mapping[int, JournaledResult | None]) -> None:
        """Whoever waits for these looks again, or is told."""
        for seq, result in told.items():
            if (waiter := self._waiting.pop(seq, None)) is not None and not waiter.done():
                waiter.set_result(result)

    async def _note_unsettled(self, seq: int, done: JournaledResult) -> None:
        settlement = Settlement(seq, done)
        if isinstance(done.result, ForwardBackwardResult | SnapshotResult) and self.journal.has_operation(seq):
            match await self.operation(seq):
                case ForwardBackward(backward=False):
                    settlement = settlement._replace(forward_only=True)
                case SaveSnapshot(announced=False):
                    settlement = settlement._replace(announced=False)
        self.unsettled[seq] = settlement
        if saves(done.result):
            self._to_settle_now.set()

    async def _settle(self) -> None:
        while True:
            await self._to_settle.wait()
            self._to_settle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(ROWS_FOLLOW_S):
                    await self._to_settle_now.wait()
            self._to_settle_now.clear()
            while batch := list(self.unsettled.values()):
                try:
                    await self._write(batch)
                except Exception:
                    log.exception("run %s: results cannot be settled; trying again in %g s", self.facts.key.run_id, RETRY_S)
                    await asyncio.sleep(RETRY_S)
            try:
                await self._bound_results()
            except OSError:
                log.exception("run %s: what is too much of its results stays for now", self.facts.key.run_id)

    async def _write(self, batch: list[Settlement]) -> None:
        await self._database.write(lambda connection: settle(connection, self.facts.key, batch))
        for settlement in batch:
            del self.unsettled[settlement.seq]
        self._wake({settlement.seq: settlement.done for settlement in batch})
        self._changed()
        if any(isinstance(settlement.done.result, SnapshotResult) for settlement in batch):
            self._published.tell()


async def _made(make: Make, refused: Effect) -> Operation:
    """What the caller asks for, or the refusal that takes its place in the order."""
    try:
        return await make()
    except BloomeryError as error:
        if error.category != "user":
            raise
        return Rejected(message=error.message, effect=refused)


def _always(operation: Operation) -> Make:
    async def make() -> Operation:
        return operation

    return make
