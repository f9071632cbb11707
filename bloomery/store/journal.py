"""A run's journal: its operations and their results, durable before anyone is told.

Operations lie in `ops-*.seg` in the order of arrival, results in `results-*.seg` in the order of `seq`; only the api opens them.
Appends that arrive while one is being synced share the next sync. An append that was cut off by the death of the process was never
acknowledged and is dropped when the journal is opened; damage anywhere else is `Corrupt` and names file and offset.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Container
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from bloomery.disk.durable import make_directory
from bloomery.store.segments import Held, Lane, Record, Torn, damage, last_seq, lowest_seq, named_seq, readable, segments
from bloomery.types.errors import Corrupt, Gone, NotFound
from bloomery.types.operations import Operation, Result
from bloomery.types.wire import Wire, encode

SEGMENT_BYTES: Final = 64 << 20
RESULT_SEGMENT_BYTES: Final = 16 << 20
_OPERATIONS, _RESULTS = "ops", "results"


class Requested(Wire, frozen=True, tag="requested"):
    """An operation, and the hash of the request that brought it: the same number with another request is no repetition."""

    operation: Operation
    request: bytes


class _Origin(msgspec.Struct):
    """What is read of an operation or a result where only the request that brought it is wanted: the rest is skipped."""

    request: bytes = b""


_operation: msgspec.msgpack.Decoder[Operation | Requested] = msgspec.msgpack.Decoder(Operation | Requested)


class JournaledResult(Wire, frozen=True):
    """A result with what is worth knowing about its making."""

    result: Result
    numerics: str
    """Numerics id of the engine that computed it: replays under the same id must give the same bits."""
    seconds: float
    done_us: int
    request: bytes = b""
    """Hash of the request that brought the operation, whose own record goes earlier; empty where none is known."""


_result = msgspec.msgpack.Decoder(JournaledResult)
_origin = msgspec.msgpack.Decoder(_Origin)


class Bounds(NamedTuple):
    """How long results stay, and how many bytes of a run at most; those that a replay may still need stay in any case."""

    ttl_s: int = 7 * 86_400
    most_bytes: int = 1 << 30
    segment_bytes: int = RESULT_SEGMENT_BYTES
    """Whole segments go."""


BOUNDS: Final = Bounds()


class Extent(NamedTuple):
    """How far a run came, by the headers of its journal."""

    last_operation: int
    last_result: int


class Journal:
    """The journal of one run, opened by one process."""

    def __init__(self, directory: Path, pool: Executor, *, first_seq: int = 1, segment_bytes: int = SEGMENT_BYTES, bounds: Bounds = BOUNDS) -> None:
        """Blocking: reads and verifies all segments. The run's history begins with `first_seq`."""
        if os.path.lexists(directory) and not directory.is_dir():
            raise Corrupt(f"run `{directory.name}`: its directory is none; bring it back from a backup, then stop and start the server")
        make_directory(directory)
        self.bounds = bounds
        self._pool = pool
        self._operations = Lane(directory, name=_OPERATIONS, kind=1, label="operation", segment_bytes=segment_bytes)
        self._results = _results_lane(directory, min(segment_bytes, bounds.segment_bytes))
        torn = self._operations.torn
        if torn is not None and (seq := self._cut_off(torn)) <= self.last_result:
            raise damage(torn.segment, f"operation {seq} at offset {torn.offset} is damaged, yet its result is known")
        self._operations.start()
        self._results.start()
        self._operations.complete_through = self._results.complete_through = max(self.last_result, first_seq - 1)
        self._operation_queue = _Queue(self._operations, pool)
        self._result_queue = _Queue(self._results, pool)

    @property
    def last_operation(self) -> int:
        """Highest `seq` of the operations here, -1 when there never was one since opening."""
        return self._operations.last

    @property
    def last_result(self) -> int:
        """`seq` of the newest result, -1 without any."""
        return self._results.last

    @property
    def result_bytes(self) -> int:
        """Of all results here."""
        return self._results.size_bytes

    def has_operation(self, seq: int) -> bool:
        """Whether the operation is here (not: whether it ever was)."""
        return seq in self._operations.places

    def operations_after(self, seq: int) -> list[int]:
        """Those here with a higher number."""
        return [found for found in self._operations.places if found > seq]

    def operation_bytes(self, seq: int) -> int:
        """Of an operation that is here."""
        return self._operations.places[seq].length

    def has_result(self, seq: int) -> bool:
        """Whether the result is here."""
        return seq in self._results.places

    async def append_operation(self, seq: int, operation: Operation, *, request: bytes = b"") -> None:
        """Durable when this returns. `request`: the hash of what brought it, where its repetition is to be the same."""
        await self._operation_queue.append(Record(seq, encode(Requested(operation=operation, request=request) if request else operation)))

    async def append_results(self, results: dict[int, JournaledResult]) -> None:
        """Durable when this returns; they continue the sequence."""
        await self._result_queue.append(*(Record(seq, encode(result)) for seq, result in results.items()))
        self._operations.complete_through = self._results.complete_through = self.last_result

    async def operation(self, seq: int) -> Operation:
        """An operation as it was submitted."""
        found = _operation.decode(await asyncio.get_running_loop().run_in_executor(self._pool, self._operations.read, seq))
        return found.operation if isinstance(found, Requested) else found

    async def request(self, seq: int) -> bytes:
        """Hash of the request that brought an operation; empty where it brought none, or nothing of the operation is here any more."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._request, seq)

    async def result(self, seq: int) -> JournaledResult:
        """A result; one that outlived its time is `Gone`."""
        try:
            payload = await asyncio.get_running_loop().run_in_executor(self._pool, self._results.read, seq)
        except (NotFound, Gone) as error:
            # Asked afterwards: it may have been dropped while others were read.
            if seq > self.last_result:
                raise
            kept = f"results stay {self.bounds.ttl_s / 86_400:g} days, and of a run the last {self.bounds.most_bytes >> 20} MiB or so"
            what = f"the result of operation {seq} was dropped and cannot be had again, what the operation did stays: {kept}"
            raise Gone(what) from error
        return _result.decode(payload)

    async def drop_operations(self, through: int) -> None:
        """Operations up to `through` are in a checkpoint and settled: delete the segments that hold only those, and begin a new one."""
        await self._operation_queue.alone(partial(self._drop_operations, through))

    async def drop_results(self, before_us: int) -> None:
        """Delete segments, but never the last, whose newest result is older."""
        await self._result_queue.alone(partial(_drop_older, self._results, before_us, self._replayed_from))

    async def bound_results(self, most_bytes: int, told: Container[int], before: int) -> None:
        """Delete segments until they have at most so many bytes, but never the last, nor results from `before` on.

        First those whose results were all `told`, then others; the oldest first.
        """
        before = min(before, self._replayed_from)
        await self._result_queue.alone(lambda: _drop_spare(self._results, most_bytes, told, before))

    async def close(self) -> None:
        """Finish what is being written and give the files back."""
        await self._operation_queue.finish()
        await self._result_queue.finish()
        self._operations.close()
        self._results.close()

    @property
    def _replayed_from(self) -> int:
        """The oldest operation here: whoever computes from it on again compares what comes out, and must fail where it failed."""
        return min(list(self._operations.places), default=self.last_result + 1)

    def _cut_off(self, torn: Torn) -> int:
        """Which operation is cut off: where its header is, too, the first that its segment lacks of those with a result, or the next one."""
        if torn.seq is not None:
            return torn.seq
        places = self._operations.places
        lowest = min((seq for seq, place in places.items() if place.segment == torn.segment), default=named_seq(torn.segment))
        return next((seq for seq in range(lowest, self.last_result + 1) if seq not in places), self.last_result + 1)

    def _request(self, seq: int) -> bytes:
        # The result first: it is mostly the smaller one, and stays when a checkpoint has the operation dropped, which may happen meanwhile.
        for lane in (self._results, self._operations):
            with suppress(NotFound, Gone):
                if found := _origin.decode(lane.read(seq)).request:
                    return found
        return b""

    def _drop_operations(self, through: int) -> None:
        self._operations.drop(through)
        self._operations.rotate()


def trim(directory: Path, before_us: int, most_bytes: int = BOUNDS.most_bytes) -> None:
    """Delete old results of a run whose journal is not open, and those beyond `most_bytes`; cheap where nothing can go. Blocking."""
    there, needed = segments(directory, _RESULTS), lowest_seq(segments(directory, _OPERATIONS))
    # The first ends before the second begins. To look into one, all are read.
    second = lowest_seq(there[1:])
    if second is None or (needed is not None and second > needed):
        return
    results = _results_lane(directory, RESULT_SEGMENT_BYTES)
    before = results.last + 1 if needed is None else needed
    _drop_older(results, before_us, before)
    _drop_spare(results, most_bytes, (), before)
    results.close()


def result_bytes(directory: Path) -> int:
    """Of all results of a run whose journal is not open."""
    found = 0
    for path in segments(directory, _RESULTS):
        with readable(path):
            found += path.stat().st_size
    return found


def extent(directory: Path) -> Extent:
    """How far a run came, without opening its journal."""
    return Extent(last_seq(directory, _OPERATIONS), last_seq(directory, _RESULTS))


def _results_lane(directory: Path, segment_bytes: int) -> Lane:
    return Lane(directory, name=_RESULTS, kind=2, label="result", segment_bytes=segment_bytes)


def _droppable(results: Lane, before: int) -> list[Held]:
    # Never the last segment: it says how far the run came.
    return results.droppable(min(results.last, before) - 1)


def _drop_older(results: Lane, before_us: int, before: int) -> None:
    for held in _droppable(results, before):
        if _result.decode(results.read(held.newest)).done_us >= before_us:
            return
        results.drop_only({held.newest})


def _drop_spare(results: Lane, most_bytes: int, told: Container[int], before: int) -> None:
    spare = results.size_bytes - most_bytes
    if spare <= 0:
        return
    for held in sorted(_droppable(results, before), key=lambda held: not all(seq in told for seq in held.seqs)):
        if spare <= 0:
            return
        results.drop_only({held.newest})
        spare -= held.bytes


class _Job(NamedTuple):
    """Records to append together with those of the next jobs, or work that wants the lane for itself."""

    records: tuple[Record, ...]
    work: Callable[[], None] | None
    done: "asyncio.Future[None]"


class _Queue:
    """Jobs on a lane, in order; records that wait while one batch is written become the next batch."""

    def __init__(self, lane: Lane, pool: Executor) -> None:
        self._lane, self._pool = lane, pool
        self._jobs: deque[_Job] = deque()
        self._runner: asyncio.Task[None] | None = None

    async def append(self, *records: Record) -> None:
        await self._put(records, None)

    async def alone(self, work: Callable[[], None]) -> None:
        await self._put((), work)

    async def finish(self) -> None:
        """Wait until nothing is in flight."""
        if self._runner is not None:
            await self._runner

    async def _put(self, records: tuple[Record, ...], work: Callable[[], None] | None) -> None:
        job = _Job(records, work, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        # A task of its own: a caller that is cancelled must not leave the lane half-way.
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        await job.done

    async def _run(self) -> None:
        while self._jobs:
            batch = [self._jobs.popleft()]
            while batch[0].work is None and self._jobs and self._jobs[0].work is None:
                batch.append(self._jobs.popleft())
            work = batch[0].work or partial(self._lane.append, [record for job in batch for record in job.records])
            try:
                await asyncio.get_running_loop().run_in_executor(self._pool, work)
            except Exception as error:
                _tell(batch, error)
            else:
                _tell(batch, None)


def _tell(batch: list[_Job], error: Exception | None) -> None:
    """Wake whoever still waits."""
    for job in batch:
        if job.done.done():
            continue
        if error is None:
            job.done.set_result(None)
        else:
            job.done.set_exception(error)
