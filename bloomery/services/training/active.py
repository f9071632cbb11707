"""One run that is in use: its history, its place in the engine, and the loop between them.

The loop alone talks to the engine: it journals and acknowledges results, registers checkpoints, fills gaps that waited too long, opens the run
where it is needed, and sends what is next. What happens while the engine is away waits for the next connection.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from bloomery.obs import background
from bloomery.obs.failpoints import failpoint
from bloomery.services.engines.connection import Connection, EngineLost, RunMessage
from bloomery.services.kinds import ACTIVE, BROKEN
from bloomery.services.listeners import Listeners
from bloomery.services.training.backlog import Backlog
from bloomery.services.training.history import RETRY_S, History, Make, RunFacts, Succeeded
from bloomery.services.training.place import Place, PlaceState
from bloomery.services.training.replayed import agree, contradicts
from bloomery.services.training.settle import Kept, divergence, note_checkpoint, restore_point, set_state
from bloomery.store.blobs import AsyncBlobs
from bloomery.store.database import Database
from bloomery.store.journal import Journal, JournaledResult
from bloomery.types.errors import Category, Corrupt, Gone, NotFound, Unavailable
from bloomery.types.fingerprint import fingerprint
from bloomery.types.ids import now_us
from bloomery.types.operations import Effect, Failed, Operation, Rejected, Result, effect_of_failure
from bloomery.types.protocol import Acknowledge, CheckpointWritten, CloseRun, OperationDone, RunClosed, RunOpened
from bloomery.types.wire import encode

log = logging.getLogger(__name__)

MAX_REFUSALS: Final = 5
"""After so many the operations that wait are failed, and later ones try again."""


class Patience(NamedTuple):
    """How long runs wait: for an operation before others while nothing comes in, and before they ask an engine that refused them again."""

    gap_s: float = 60.0
    reopen_s: float = 5.0


class ActiveRun:
    """Operations in, results out, strictly by `seq`."""

    def __init__(
        self,
        facts: RunFacts,
        journal: Journal,
        database: Database,
        blobs: AsyncBlobs,
        published: Listeners,
        succeeded: Succeeded,
        backlog: Backlog,
        patience: Patience,
    ) -> None:
        self.facts = facts
        self.used_us = now_us()
        self.history = History(facts, journal, database, published, succeeded, backlog, gap_s=patience.gap_s, changed=self._wake)
        self._patience = patience
        self._journal, self._database, self._blobs = journal, database, blobs
        self._place = Place(facts.spec, facts.first_seq, facts.project)
        self._next_connection: Connection | None = None
        self._wanted = False
        """Whether the engine should hold the run: from its creation or next operation on, until it is let go."""
        self._leaving = False
        self._reopen_at: float | None = None
        self._arriving_until = 0.0
        """Until when no gap is given up, by the loop's clock: what is missing may be behind what came in last, on the same line."""
        self._opened: RunOpened | None = None
        self._arrived: dict[int, _Arrived] = {}
        self._written: list[CheckpointWritten] = []
        self._kick, self._turned = asyncio.Event(), asyncio.Event()
        self._driver: asyncio.Task[None] | None = None

    async def start(self, *, settled: int) -> None:
        """Go on where the journal ends."""
        await self.history.start(settled)
        self._wanted = not self.idle
        self._driver = background.start(self._drive(), f"drive-{self.facts.key.run_id}")
        self._wake()

    async def close(self) -> None:
        """Stop; what is being journaled is finished first."""
        await background.stop(self._driver)
        await self.history.close()

    def want(self) -> None:
        """Have the engine hold the run."""
        self.used_us, self._wanted, self._leaving = now_us(), True, False
        self._wake()

    async def submit(self, seq: int, make: Make, *, refused: Effect = "spoil", request: bytes = b"") -> None:
        """Journal an operation; the rest happens behind this call."""
        self.want()
        try:
            await self.history.submit(seq, make, refused=refused, request=request)
        except Unavailable:
            # Whoever was told to come again will: what follows is not to be computed without it.
            self.note_arriving()
            raise

    def note_arriving(self) -> None:
        """Part of an operation came in: the patience with those that are missing begins anew."""
        self._arriving_until = asyncio.get_running_loop().time() + self._patience.gap_s

    async def result(self, seq: int, timeout_s: float) -> Result | None:
        """The result of an operation, or None while there is none after `timeout_s`."""
        self.used_us = now_us()
        return await self.history.result(seq, timeout_s)

    def waiting_for(self) -> str:
        """Who is being waited for."""
        history, connection = self.history, self._next_connection
        if history.failure is not None:
            return history.failure
        if history.gap_at is not None and history.ready == history.done:
            return f"operation {history.ready + 1} did not arrive yet, later ones did"
        if connection is None or not connection.open:
            return f"the engine of base model {self.facts.spec.base_hash} is not connected"
        if self._place.state != PlaceState.HELD:
            return "the engine is opening the run, as soon as it has memory for it"
        return f"the engine is at operation {self._place.answered + 1}"

    def connected(self, connection: Connection) -> None:
        """A new conversation with the engine began."""
        self._next_connection = connection
        self._wake()

    def received(self, connection: Connection, message: RunMessage) -> None:
        """Take a message about this run; those of an earlier conversation count only if they bring something lasting."""
        if self.history.failure is not None:
            return
        current = connection is self._place.connection
        match message:
            case OperationDone():
                self._arrived[message.seq] = _Arrived(message, connection)
                if current:
                    self._place.answered = max(self._place.answered, message.seq)
            case CheckpointWritten():
                self._written.append(message)
            case RunOpened() if current:
                self._opened = message
            case RunClosed() if current:
                self._place.closed()
        self._wake()

    @property
    def idle(self) -> bool:
        """Whether everything that was submitted is done."""
        return self.history.done == self.history.last_known

    @property
    def quiet(self) -> bool:
        """Idle, and everything that the engine said is stored."""
        return self.idle and self._stored

    async def stored(self) -> None:
        """Wait until all that the engine said so far is journaled and in rows."""
        self.history.settle_now()
        await self._until(lambda: self._stored)

    async def rows_follow(self, timeout_s: float) -> None:
        """Wait until the rows say what the results said so far, but no longer than `timeout_s`: then they are late."""
        newest = max(self.history.unsettled, default=-1)
        self.history.settle_now()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: all(seq > newest for seq in self.history.unsettled))

    async def rest(self, timeout_s: float) -> bool:
        """Have the engine let go of a quiet run; says whether it did and nothing came in between. One that is stopped stays, so that it is known."""
        if self.history.failure is not None:
            return False
        self._wanted, self._leaving = False, True
        self._wake()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: not self._leaving or self._away)
        return self._leaving and self._away

    @property
    def _stored(self) -> bool:
        return not (self._arrived or self._written or self.history.unsettled)

    @property
    def _away(self) -> bool:
        return self.quiet and (self._place.state == PlaceState.ABSENT or not self._connected)

    @property
    def _gap_due(self) -> float | None:
        return None if self.history.gap_at is None else max(self.history.gap_at, self._arriving_until)

    @property
    def _connected(self) -> bool:
        return self._place.connection is not None and self._place.connection.open

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._turned.wait()

    def _wake(self) -> None:
        self._kick.set()
        self._turned.set()
        self._turned = asyncio.Event()

    async def _drive(self) -> None:
        while self.history.failure is None:
            await self._work_to_do()
            try:
                await self._take_turn()
            except EngineLost:
                # The next connection begins with all that was not answered on this one.
                continue
            except Corrupt as error:
                await self.stop(error)
            except Exception:
                log.exception("run %s: trying again in %g s", self.facts.key.run_id, RETRY_S)
                await asyncio.sleep(RETRY_S)
                self._kick.set()

    async def stop(self, error: Corrupt) -> None:
        """Nothing that the engine said or says of this run counts any more, and it is not to hold what is not the run."""
        log.error("run %s: %s", self.facts.key.run_id, error.message)
        self.history.fail(error.message)
        self._arrived.clear()
        self._written.clear()
        place = self._place
        if place.connection is not None and place.connection.open and place.state != PlaceState.ABSENT:
            place.connection.post(CloseRun(run_id=self.facts.key.run_id))
            place.closed()
        await self._store_state(error.message)
        self._wake()

    async def _work_to_do(self) -> None:
        clock = asyncio.get_running_loop().time
        times = [at for at in (self._gap_due, self._reopen_at) if at is not None]
        with suppress(TimeoutError):
            # Not wait_for: before Python 3.12 it may swallow the cancellation that `close` waits for.
            async with asyncio.timeout(max(0.0, min(times) - clock()) if times else None):
                await self._kick.wait()
        self._kick.clear()
        if self._reopen_at is not None and self._reopen_at <= clock():
            self._reopen_at = None

    async def _take_turn(self) -> None:
        await self._take_results()
        await self._take_checkpoints()
        if self._next_connection is not None and self._next_connection is not self._place.connection:
            # An engine that computed what has to be computed again will not do so by itself.
            self._place.begin(self._next_connection, ready=self.history.done if self.history.lost else self.history.ready)
            self._opened = self._reopen_at = None
        await self._take_opened()
        if self._gap_due is not None and self._gap_due <= asyncio.get_running_loop().time():
            await self.history.fill_gap()
        if self._connected:
            await self._come_or_go()
            await self._send_next()
        self._turned.set()
        self._turned = asyncio.Event()

    async def _take_results(self) -> None:
        repeated = [seq for seq in sorted(self._arrived) if seq <= self.history.done]
        for seq in repeated:
            await self._compare(self._arrived[seq])
        fresh: dict[int, JournaledResult] = {}
        while (arrived := self._arrived.get(self.history.done + len(fresh) + 1)) is not None:
            if arrived.done.seq in self.history.lost:
                await self._compare_with_rows(arrived)
            fresh[arrived.done.seq] = _journaled(arrived.done.result, arrived.done.seconds, arrived.numerics)
        if fresh:
            await self.history.keep(fresh)
        for seq in (*repeated, *fresh):
            connection = self._arrived.pop(seq).connection
            if connection.open:
                connection.post(Acknowledge(run_id=self.facts.key.run_id, seq=seq))

    async def _compare(self, arrived: "_Arrived") -> None:
        """A result that is known already: of a replay, or sent again because its acknowledgement was lost.

        Another one that was to have the same bits, or a failure where something was learned, means that the engine trains what is not this run, and
        is Corrupt.
        """
        done, run, numerics = arrived.done, self.facts.key, arrived.numerics
        if (journaled := await self._journaled_still(done.seq)) is None:
            return
        told, again = journaled.result, done.result
        if encode(told) == encode(again) or (isinstance(told, Failed) and isinstance(again, Failed)):
            return
        log.error("run %s: operation %d gave another result when it was replayed (%s, then %s)", run.run_id, done.seq, journaled.numerics, numerics)
        await self._database.write(lambda connection: divergence(connection, run, done.seq, journaled, numerics))
        promised = journaled.numerics == numerics and arrived.connection.welcome.bit_exact
        if contradicts(told, again):
            stops = await self._changes_the_run(done.seq)
        else:
            stops = promised and not agree(told, again)
        if stops:
            raise self._other_history(done)

    async def _compare_with_rows(self, arrived: "_Arrived") -> None:
        """The same of a result that the journal lost. Who computed it stands nowhere; it was most likely who computed the one before."""
        done, told = arrived.done, self.history.lost[arrived.done.seq]
        before = await self._journaled_still(done.seq - 1)
        if (told is None) != isinstance(done.result, Failed):
            stops = effect_of_failure(await self.history.operation(done.seq)) != "none"
        else:
            promised = arrived.connection.welcome.bit_exact and (before is None or before.numerics == arrived.numerics)
            stops = told is not None and promised and not told.agrees(done.result)
        if stops:
            raise self._other_history(done)

    async def _journaled_still(self, seq: int) -> JournaledResult | None:
        """A result, unless it made room for others, as those that no replay goes back to may at any moment."""
        with suppress(Gone, NotFound):
            return await self._journal.result(seq)
        return None

    def _other_history(self, done: OperationDone) -> Corrupt:
        how = f"failed ({done.result.message})" if isinstance(done.result, Failed) else "gave another result than its caller was told"
        what = f"operation {done.seq} of run `{self.facts.key.run_id}` {how} when it was computed again"
        return Corrupt(f"{what}: the run is stopped, so that nothing is built on it. Mend the cause, then stop and start the server to try again")

    async def _changes_the_run(self, seq: int) -> bool:
        """Whether weights, moments or gradients depend on whether an operation succeeded. Of one that checkpoints cover nothing does any more."""
        return self._journal.has_operation(seq) and effect_of_failure(await self.history.operation(seq)) != "none"

    async def _take_checkpoints(self) -> None:
        # One that overtook the results before it waits for them: without those it is no point to begin again from. So does one behind results that
        # came again and have not been compared: they may say that it is another run's.
        while self._written and self._written[0].seq <= self.history.done and all(seq > self._written[0].seq for seq in self._arrived):
            kept = await self._note_checkpoint(self._written[0])
            failpoint("checkpoint.row.committed")
            await self._journal.drop_operations(kept.floor)
            for key in kept.superfluous:
                await self._blobs.delete(key)
            self._written.pop(0)

    async def _note_checkpoint(self, written: CheckpointWritten) -> Kept:
        return await self._database.write(lambda connection: note_checkpoint(connection, self.facts.key, written, done=self.history.done))

    async def _take_opened(self) -> None:
        if self._opened is None:
            return
        (error, fails), self._opened = (self._opened.error, self._opened.fails), None
        self._place.opened(error, lacks_memory=fails is not None)
        # Memory that others hold is no fault of the run.
        if fails != "server":
            await self._store_state(error)
        if error is None:
            return
        log.error("run %s: the engine refuses to open it: %s", self.facts.key.run_id, error)
        self._reopen_at = asyncio.get_running_loop().time() + self._patience.reopen_s
        # Nobody is kept from memory, or written to the log, for a run that nobody asks anything.
        self._wanted &= fails is None
        waiting = range(self.history.done + 1, self.history.ready + 1)
        if waiting and (fails is not None or self._place.refusals >= MAX_REFUSALS):
            message = f"the engine cannot open the run: {error}"
            await self.history.keep({seq: await self._failed(seq, message, fails) for seq in waiting})

    async def _failed(self, seq: int, message: str, fails: Category | None) -> JournaledResult:
        """A failure that no engine computed. What found no memory was not begun: sent again, it takes its place."""
        unbegun = fingerprint(await self.history.operation(seq)) if fails == "server" else ""
        return _journaled(Failed(message=message, category=fails or "server", unbegun=unbegun), 0.0, "")

    async def _come_or_go(self) -> None:
        place, history = self._place, self.history
        if place.state == PlaceState.HELD and self._leaving and self.idle:
            await place.close()
        if place.state == PlaceState.ABSENT and (self._wanted or not self.idle) and self._reopen_at is None:
            # An even number of refusals: the newest checkpoint again; an odd one: the checkpoint before it, or the beginning.
            before = place.refused.seq if place.refused is not None and place.refusals % 2 else None
            restored = await self._database.read(
                lambda connection: restore_point(connection, self.facts.key.run_id, done=history.done, before=before)
            )
            begins = history.done < self.facts.first_seq or self._journal.has_operation(self.facts.first_seq)
            await place.open(restored if restored is not None or begins else place.refused)

    async def _send_next(self) -> None:
        while self._place.has_room() and self._place.sent < self.history.ready:
            seq = self._place.sent + 1
            await self._place.send(seq, await self._as_it_happened(seq), replay=seq <= self.history.done)

    async def _as_it_happened(self, seq: int) -> Operation:
        """The operation; one whose failure is journaled fails again, though its reason (memory, say) may be gone."""
        operation = await self.history.operation(seq)
        if seq <= self.history.done:
            result = (await self._journal.result(seq)).result
            if isinstance(result, Failed):
                effect, unbegun = effect_of_failure(operation), result.unbegun
                return Rejected(message=result.message, category=result.category, effect=effect, unbegun=unbegun)
        return operation

    async def _store_state(self, error: str | None) -> None:
        state = ACTIVE if error is None else BROKEN
        await self._database.write(lambda connection: set_state(connection, self.facts.key, state, error))


class _Arrived(NamedTuple):
    """A result, and the conversation in which it is to be acknowledged."""

    done: OperationDone
    connection: Connection

    @property
    def numerics(self) -> str:
        """Of the engine that computed it."""
        return self.connection.welcome.numerics


def _journaled(result: Result, seconds: float, numerics: str) -> JournaledResult:
    return JournaledResult(result=result, numerics=numerics, seconds=seconds, done_us=now_us())
