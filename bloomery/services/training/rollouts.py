"""The rollouts of a run's steps: recorded once by whoever trains, read by whoever wants to see what was trained on.

A step is one blob, as it came, beside a row that sums it up. The newest steps of a run are kept, and of those before every tenth: `forget_old` lets
the others go, which housekeeping asks for.

A step may be large, and larger when it is read: what is made of one is made in a turn, on a thread, and nothing of it outlives the turn but bytes.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Literal, TypeVar

from sqlalchemy import Connection, Row, Select, delete, func, insert, select
from sqlalchemy.sql.dml import ReturningDelete

from bloomery.services.access.principal import Principal
from bloomery.services.engines.models import Models
from bloomery.services.engines.texts import Texts, texts_of
from bloomery.services.training.recorded import Packed, pack, sampled_tokens, unpack
from bloomery.services.training.rollout_texts import START, Place, exported, page
from bloomery.services.training.run_rows import RunRow, one_run
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs
from bloomery.store.database import Database
from bloomery.types.errors import BloomeryError, Conflict, Corrupt, Gone, InvalidInput, NotFound, NotSupported
from bloomery.types.histograms import Histogram
from bloomery.types.ids import now_us
from bloomery.types.resources import Page
from bloomery.types.rollouts import RecordedStep, RolloutFilter, RolloutPage, RolloutStep

KEPT_EVERY: Final = 10
"""Of the steps before the newest, those whose number it divides stay."""
MAX_RUN_BYTES: Final = 4 << 30
"""Of a run on the disk: of a larger one the oldest steps go."""
MAX_AHEAD: Final = 1024
"""How far a step may be beyond all that is known of its run: loops count rounds, and those without anything to train on leave no trace but this."""
_TURNS: Final = 2
"""Steps that are in memory at a time."""
_STEPS_AT_ONCE: Final = 500
"""Whose rows go in one statement."""

log = logging.getLogger(__name__)

Order = Literal["newest", "oldest"]
T = TypeVar("T")


class Rollouts:
    """Every look-up is confined to the caller's project. `refused`: why nothing is recorded here; None where it is."""

    def __init__(self, database: Database, blobs: AsyncBlobs, models: Models, *, refused: str | None = None) -> None:
        self._database, self._blobs, self._models, self._refused = database, blobs, models, refused
        self._turns = asyncio.Semaphore(_TURNS)

    async def add(self, p: Principal, run_id: str, step: int, body: bytes) -> RolloutStep:
        """Keep what a `RecordedStep` says of a step, from msgpack. The same again changes nothing; another one is a Conflict."""
        p.require("train")
        run = await self._run(p, run_id)
        if self._refused is not None:
            raise NotSupported(self._refused, field="record")
        await self._database.read(lambda connection: _check_near(connection, run, step))
        packed = await self._in_turn(lambda: pack(body))
        key = f"rollouts/{run.id}/{step}-{packed.values['hash'][:32]}"
        await self._database.read(lambda connection: _known(connection, run, step, packed))
        # Also where its row is there: that may be let go meanwhile, and no blob that was just written is deleted with it.
        await self._blobs.put(key, packed.blob)
        row = await self._database.write(lambda connection: _add(connection, run, step, packed, key))
        return _shown(row)

    async def steps(self, p: Principal, run_id: str, *, order: Order = "newest", limit: int = 50, offset: int = 0) -> Page[RolloutStep]:
        """Those that are kept."""
        p.require("read", "train")
        run, table = await self._run(p, run_id), rows.rollout_step.c
        query = _of(run).order_by(table.step.desc() if order == "newest" else table.step).limit(limit + 1).offset(offset)
        found = await self._database.read(lambda connection: connection.execute(query).all())
        return Page(data=[_shown(row) for row in found[:limit]], offset=offset, has_more=len(found) > limit)

    async def groups(self, p: Principal, run_id: str, step: int, wanted: RolloutFilter, *, limit: int, offset: int = 0) -> bytes:
        """Groups of a step with what their tokens say, in the order in which they were recorded: a `RolloutPage` as JSON."""
        p.require("read", "train")
        run = await self._run(p, run_id)
        query = _of(run).where(rows.rollout_step.c.step == step)
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        if row is None:
            raise NotFound(f"no rollouts of step {step} of run `{run_id}` are kept: none were recorded, or their time is over", field="step")
        texts = await texts_of(self._models, run.base_hash)

        def shown() -> bytes:
            with _reading(row):
                kept = self._step(row)
                found = page(kept, wanted, texts, limit=limit, offset=offset)
                whole = RolloutPage(step=_shown(row), **_spread(kept), data=found.groups, offset=offset, has_more=found.has_more)
                return whole.model_dump_json().encode()

        return await self._in_turn(shown)

    async def export(
        self, p: Principal, run_id: str, wanted: RolloutFilter, *, first: int | None = None, last: int | None = None
    ) -> AsyncIterator[bytes]:
        """JSON Lines, one for each rollout of the steps from `first` to `last`, oldest first. A step that cannot be read has a line with its
        `error`."""
        p.require("read", "train")
        run, table = await self._run(p, run_id), rows.rollout_step.c
        query = _of(run).order_by(table.step)
        query = query if first is None else query.where(table.step >= first)
        query = query if last is None else query.where(table.step <= last)
        found = await self._database.read(lambda connection: connection.execute(query).all())
        texts = await texts_of(self._models, run.base_hash)
        return self._exported(found, wanted, texts)

    async def _exported(self, found: Sequence[Row[Any]], wanted: RolloutFilter, texts: Texts) -> AsyncIterator[bytes]:
        for row in found:
            place: Place | None = START
            while place is not None:
                try:
                    lines, place = await self._in_turn(partial(self._lines, row, wanted, texts, place))
                except Exception as error:
                    # The answer has begun: what is the matter with one step can only be said in it, and the others are wanted.
                    if not isinstance(error, BloomeryError):
                        log.exception("step %d of run `%s` cannot be exported", row.step, row.run_id)
                    said = error.message if isinstance(error, BloomeryError) else f"the step cannot be exported ({type(error).__name__})"
                    lines, place = _line({"run": row.run_id, "step": row.step, "error": said}), None
                if lines:
                    yield lines

    def _lines(self, row: Row[Any], wanted: RolloutFilter, texts: Texts, place: Place) -> tuple[bytes, Place | None]:
        """Some from that place on, and where the next begin. Whoever reads slowly has no step held for it: it is read again for those."""
        with _reading(row):
            some = exported(self._step(row), wanted, texts, place)
            whose = {"run": row.run_id, "step": row.step}
            return b"".join(_line(whose | values) for values in some.rollouts), some.next

    def _step(self, row: Row[Any]) -> RecordedStep:
        return unpack(self._blobs.blobs.get(row.key), row.hash)

    async def _run(self, p: Principal, run_id: str) -> RunRow:
        return await self._database.read(lambda connection: one_run(connection, p, run_id))

    async def _in_turn(self, work: Callable[[], T]) -> T:
        """A turn is over when its thread is done, also where nobody waits for it any more."""
        await self._turns.acquire()
        working = asyncio.ensure_future(asyncio.to_thread(work))
        working.add_done_callback(self._give_back)
        return await asyncio.shield(working)

    def _give_back(self, worked: "asyncio.Future[Any]") -> None:
        self._turns.release()
        if not worked.cancelled():
            # Looked at, for nobody may be there who does.
            worked.exception()


@contextmanager
def _reading(row: Row[Any]) -> Iterator[None]:
    which = f"the rollouts of step {row.step} of run `{row.run_id}`"
    try:
        yield
    except NotFound:
        raise Gone(f"{which} are not there any more, though they are listed: their blob `{row.key}` is missing", field="step") from None
    except Corrupt as error:
        raise Corrupt(f"{which} are damaged: of their blob `{row.key}`, {error.message}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Corrupt(f"{which} cannot be shown: {type(error).__name__}") from error


def forget_old(connection: Connection, newest: int, since_us: int = 0, *, most_bytes: int = MAX_RUN_BYTES) -> list[str]:
    """Of every run to which something was added since all but the `newest` steps and every tenth of those before, and of these the oldest where they
    are more than `most_bytes` together; the blobs that are nobody's then."""
    table = rows.rollout_step.c
    # Made one here: a database that is to do so goes through all there are, in the order of their runs.
    grown = set(connection.scalars(select(table.run_id).where(table.created_us >= since_us)))
    return [key for run_id in sorted(grown) for key in _forget_old_of(connection, run_id, newest, most_bytes)]


def _forget_old_of(connection: Connection, run_id: str, newest: int, most_bytes: int) -> list[str]:
    table = rows.rollout_step.c
    of_run = select(table.step, table.size_bytes).where(table.run_id == run_id).order_by(table.step.desc())
    gone: list[int] = []
    for place, (step, size_bytes) in enumerate(connection.execute(of_run).all()):
        if place >= newest and step % KEPT_EVERY:
            gone.append(step)
            continue
        most_bytes -= size_bytes
        if most_bytes < 0:
            gone.append(step)
    some = [gone[start : start + _STEPS_AT_ONCE] for start in range(0, len(gone), _STEPS_AT_ONCE)]
    return [key for steps in some for key in connection.scalars(_deleted(run_id, steps)).all()]


def _deleted(run_id: str, steps: Sequence[int]) -> ReturningDelete[Any]:
    table = rows.rollout_step.c
    return delete(rows.rollout_step).where(table.run_id == run_id, table.step.in_(steps)).returning(table.key)


def _of(run: RunRow) -> Select[Any]:
    return select(rows.rollout_step).where(rows.rollout_step.c.run_id == run.id, rows.rollout_step.c.project == run.project)


def _check_near(connection: Connection, run: RunRow, step: int) -> None:
    table = rows.rollout_step.c
    newest = connection.scalar(select(func.max(table.step)).where(table.run_id == run.id)) or 0
    most = max(run.settled_seq, newest) + MAX_AHEAD
    if step > most:
        known = f"run `{run.id}` has had {run.settled_seq} operations, and its newest recorded step is {newest}"
        raise InvalidInput(f"{known}: step {step} is none of it yet, up to {most} it may be one; number steps by rounds, from 1", field="step")


def _known(connection: Connection, run: RunRow, step: int, packed: Packed) -> Row[Any] | None:
    """The row of the same, where it is there."""
    row = connection.execute(_of(run).where(rows.rollout_step.c.step == step)).one_or_none()
    if row is not None and row.hash != packed.values["hash"]:
        raise Conflict(f"other rollouts were recorded for step {step} of run `{run.id}`: those of a step are recorded once", field="step")
    return row


def _add(connection: Connection, run: RunRow, step: int, packed: Packed, key: str) -> Row[Any]:
    if (row := _known(connection, run, step, packed)) is not None:
        return row
    values = {"project": run.project, "run_id": run.id, "step": step, "key": key, "created_us": now_us(), **packed.values}
    return connection.execute(insert(rows.rollout_step).values(values).returning(rows.rollout_step)).one()


def _shown(row: Row[Any]) -> RolloutStep:
    fields = {name: value for name, value in row._mapping.items() if name in RolloutStep.model_fields}
    return RolloutStep(run=row.run_id, **fields)


def _spread(step: RecordedStep) -> dict[str, Histogram | None]:
    rollouts = [rollout for group in step.groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return {"rewards": Histogram.of(rewards), "lengths": Histogram.of([sampled_tokens(rollout) for rollout in rollouts])}


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode() + b"\n"
