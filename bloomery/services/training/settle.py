"""What journaled results mean for the rows: metrics, checkpoints, progress of the run.

`settle` applies results in order and moves `run.settled_seq` in the same transaction, so each is applied exactly once, also when the process
died between journal and database. A saved checkpoint is first a `pending` row (its name and key, before the operation is journaled) and becomes
`ready` with its result.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, bindparam, delete, func, insert, or_, select, update

from bloomery.services.held import held_blobs
from bloomery.services.kinds import AUTO, EXTERNAL, NAMED, PENDING, READY, SNAPSHOT, SOURCE
from bloomery.store import rows
from bloomery.store.events import record_event
from bloomery.store.journal import JournaledResult
from bloomery.types.ids import expiry_us, new_id, now_us
from bloomery.types.operations import CheckpointResult, Failed, ForwardBackwardResult, LoadResult, OptimStepResult, Result, SnapshotResult
from bloomery.types.protocol import CheckpointWritten

FORWARD_ONLY: Final = "forward/"
"""Before the names of metrics of operations that only computed."""
SECONDS: Final = "seconds"
"""The metric that every operation has which computes: how long it took."""
SYNC_SECONDS: Final = "sync/seconds"
"""The same of one that publishes."""
KEPT_CHECKPOINTS: Final = 2
"""Automatic checkpoints of a run; the older one is there for the case that the newest cannot be read."""


class RunKey(NamedTuple):
    """Whose rows."""

    project: str
    run_id: str


class Settlement(NamedTuple):
    """A journaled result, and what its operation says of the rows that follow from it."""

    seq: int
    done: JournaledResult
    forward_only: bool = False
    """Whether it only computed."""
    announced: bool = True
    """Whether there is a row of what it saves."""


class RestorePoint(NamedTuple):
    """The run as it was after operation `seq`."""

    seq: int
    key: str


class Kept(NamedTuple):
    """Automatic checkpoints after a new one: operations up to `floor` are needed by none; the blobs `superfluous` are in no row any more.

    Among those may be what an operation up to `floor` loaded.
    """

    floor: int
    superfluous: list[str]


def saves(result: Result) -> bool:
    """Whether the result becomes a row that others look up, and so is shown only once that is there."""
    return isinstance(result, CheckpointResult | SnapshotResult)


def settle(connection: Connection, run: RunKey, settlements: Sequence[Settlement]) -> None:
    """Apply results that follow `run.settled_seq`."""
    row = connection.execute(_SETTLED, {"run": run.run_id}).one()
    step = row.step
    for settlement in settlements:
        if settlement.seq <= row.settled_seq:
            continue
        step = _step_after(step, settlement.done.result)
        _apply(connection, run, settlement, step)
    # What was announced under these numbers and did not come about: the operation failed, or another one was submitted in its place.
    last = {"run": run.run_id, "last": settlements[-1].seq}
    connection.execute(_DROP_PENDING, last)
    connection.execute(_PROGRESS, last | {"reached": step, "now": now_us()})


# Put together once: to do so takes longer than what they ask, and whoever publishes waits for them.
_SETTLED: Final = select(rows.run.c.step, rows.run.c.settled_seq).where(rows.run.c.id == bindparam("run"))
_PENDING_OF_RUN: Final = (rows.checkpoint.c.run_id == bindparam("run"), rows.checkpoint.c.state == PENDING)
_DROP_PENDING: Final = delete(rows.checkpoint).where(*_PENDING_OF_RUN, rows.checkpoint.c.seq <= bindparam("last"))
_DROP_PENDING_AT: Final = delete(rows.checkpoint).where(*_PENDING_OF_RUN, rows.checkpoint.c.seq == bindparam("at"))
_PROGRESS: Final = (
    update(rows.run)
    .where(rows.run.c.id == bindparam("run"), rows.run.c.settled_seq < bindparam("last"))
    .values(settled_seq=bindparam("last"), step=bindparam("reached"), updated_us=bindparam("now"))
)
_AT_PLACE: Final = select(rows.checkpoint).where(
    rows.checkpoint.c.run_id == bindparam("run"), rows.checkpoint.c.seq == bindparam("at"), rows.checkpoint.c.kind == bindparam("of_kind")
)
_SAVED: Final = insert(rows.checkpoint)
_POINTS: Final = insert(rows.run_metric)


def note_checkpoint(connection: Connection, run: RunKey, written: CheckpointWritten, *, done: int) -> Kept:
    """Register an automatic checkpoint, and forget those that it makes superfluous."""
    table = rows.checkpoint.c
    mine = (table.run_id == run.run_id, table.kind == AUTO)
    known = connection.execute(select(table.id).where(*mine, table.seq == written.seq)).first()
    if known is None:
        values = {"id": new_id("checkpoint"), "project": run.project, "run_id": run.run_id, "seq": written.seq, "kind": AUTO, "state": READY}
        values |= {"key": written.key, "digest": written.digest, "size_bytes": 0, "step": 0, "metadata": "{}", "created_us": now_us()}
        connection.execute(insert(rows.checkpoint).values(values))
    else:
        connection.execute(update(rows.checkpoint).where(table.id == known.id).values(key=written.key, digest=written.digest))
    _note_digest(connection, run.run_id, written.seq, written.digest)
    usable = connection.execute(select(table.id, table.key, table.seq).where(*mine, table.seq <= done).order_by(table.seq.desc())).all()
    kept, old = usable[:KEPT_CHECKPOINTS], usable[KEPT_CHECKPOINTS:]
    connection.execute(delete(rows.checkpoint).where(table.id.in_([row.id for row in old])))
    floor = kept[-1].seq if len(kept) == KEPT_CHECKPOINTS else -1
    loaded = (table.run_id == run.run_id, table.kind == SOURCE, table.state == READY, table.seq <= floor)
    let_go = dict.fromkeys([*(row.key for row in old), *connection.scalars(select(table.key).where(*loaded))])
    connection.execute(delete(rows.checkpoint).where(*loaded))
    held = held_blobs(connection, list(let_go))
    return Kept(floor, [key for key in let_go if key not in held])


def last_checkpoint(connection: Connection, run_id: str) -> int:
    """Number of the operation that the newest automatic checkpoint follows, -1 without any: none is noted before its results are journaled."""
    table = rows.checkpoint.c
    newest = connection.scalar(select(func.max(table.seq)).where(table.run_id == run_id, table.kind == AUTO))
    return -1 if newest is None else int(newest)


def restore_point(connection: Connection, run_id: str, *, done: int, before: int | None = None) -> RestorePoint | None:
    """The newest automatic checkpoint whose operations all have journaled results."""
    table = rows.checkpoint.c
    query = select(table.seq, table.key).where(table.run_id == run_id, table.kind == AUTO, table.seq <= done)
    if before is not None:
        query = query.where(table.seq < before)
    row = connection.execute(query.order_by(table.seq.desc()).limit(1)).first()
    return None if row is None else RestorePoint(row.seq, row.key)


def divergence(connection: Connection, run: RunKey, seq: int, journaled: JournaledResult, numerics: str) -> None:
    """A replayed operation gave another result: tell, and change nothing."""
    kind = "run.diverged" if journaled.numerics == numerics else "run.numerics_changed"
    record_event(connection, run.project, kind, run.run_id, seq=seq, journaled=journaled.numerics, replayed=numerics)


def set_state(connection: Connection, run: RunKey, state: str, error: str | None) -> None:
    """`broken` with the reason, or `active` again."""
    table = rows.run.c
    changing = update(rows.run).where(table.id == run.run_id, or_(table.state != state, table.error.is_distinct_from(error)))
    if rows.changed(connection, changing.values(state=state, error=error, updated_us=now_us())):
        record_event(connection, run.project, f"run.{state}", run.run_id, error=error)


def _apply(connection: Connection, run: RunKey, settlement: Settlement, step: int) -> None:
    result, seq = settlement.done.result, settlement.seq
    match result:
        case ForwardBackwardResult() | OptimStepResult():
            _insert_metrics(connection, run, settlement, result, step)
        case CheckpointResult():
            facts = {"key": result.key, "digest": result.digest, "size_bytes": result.size_bytes, "step": result.step}
            _complete(connection, run, settlement, NAMED, facts)
            _note_digest(connection, run.run_id, seq, result.digest)
        case SnapshotResult():
            facts = {"key": result.key, "version": result.version, "size_bytes": result.size_bytes, "step": result.step}
            if not settlement.announced:
                # Another operation was, that was to have this number and was not journaled.
                connection.execute(_DROP_PENDING_AT, {"run": run.run_id, "at": seq})
            _complete(connection, run, settlement, _published_as(connection, run, seq) if settlement.announced else SNAPSHOT, facts)
            _insert_points(connection, run, settlement, step, {**result.sync(), SYNC_SECONDS: settlement.done.seconds})
        case LoadResult():
            loaded = (rows.checkpoint.c.run_id == run.run_id, rows.checkpoint.c.seq == seq, rows.checkpoint.c.kind == SOURCE)
            connection.execute(update(rows.checkpoint).where(*loaded).values(state=READY))
            _note_digest(connection, run.run_id, seq, result.digest)
        case Failed():
            pass


def _step_after(step: int, result: Result) -> int:
    match result:
        case OptimStepResult():
            return int(result.metrics.get("step", step + 1))
        case LoadResult():
            return result.step
        case _:
            return step


def _insert_metrics(connection: Connection, run: RunKey, settlement: Settlement, result: ForwardBackwardResult | OptimStepResult, step: int) -> None:
    metrics = result.metrics
    if isinstance(result, ForwardBackwardResult):
        metrics = metrics | _mean_loss(metrics)
    prefix = FORWARD_ONLY if settlement.forward_only else ""
    found = {f"{prefix}{name}": value for name, value in {**metrics, SECONDS: settlement.done.seconds}.items()}
    _insert_points(connection, run, settlement, step, found)


def _insert_points(connection: Connection, run: RunKey, settlement: Settlement, step: int, metrics: dict[str, float]) -> None:
    place = {"project": run.project, "run_id": run.run_id, "seq": settlement.seq, "step": step, "created_us": settlement.done.done_us}
    points = [place | {"name": name, "value": value if math.isfinite(value) else None} for name, value in metrics.items()]
    connection.execute(_POINTS, points)


def _mean_loss(metrics: dict[str, float]) -> dict[str, float]:
    """Losses are sums; curves of batches of different sizes are compared per unit of weight, or else per token."""
    weight = metrics.get("weights:sum", 0.0)
    if weight <= 0:
        weight = metrics.get("tokens:sum", 0.0)
    return {"loss": metrics["loss:sum"] / weight} if weight > 0 and "loss:sum" in metrics else {}


def _published_as(connection: Connection, run: RunKey, seq: int) -> str:
    """For which purpose these weights were announced."""
    table = rows.checkpoint.c
    announced = select(table.kind).where(table.run_id == run.run_id, table.seq == seq, table.kind == EXTERNAL)
    return connection.scalar(announced) or SNAPSHOT


def _complete(connection: Connection, run: RunKey, settlement: Settlement, kind: str, facts: dict[str, Any]) -> None:
    """The pending row becomes ready and takes its name from an older one."""
    table = rows.checkpoint.c
    pending = connection.execute(_AT_PLACE, {"run": run.run_id, "at": settlement.seq, "of_kind": kind}).one_or_none()
    if pending is None:
        # What was not announced; and what was only after the database was set back to an earlier time than the journal: without a name, but not lost.
        values = {"id": new_id("checkpoint"), "project": run.project, "run_id": run.run_id, "seq": settlement.seq, "kind": kind, "metadata": "{}"}
        connection.execute(_SAVED, values | facts | {"state": READY, "created_us": settlement.done.done_us})
        return
    if pending.name is not None:
        older = (table.run_id == run.run_id, table.kind == kind, table.name == pending.name, table.seq < settlement.seq)
        connection.execute(delete(rows.checkpoint).where(*older))
    ready = {"state": READY, "created_us": settlement.done.done_us, "expires_us": expiry_us(pending.ttl_s, settlement.done.done_us)}
    connection.execute(update(rows.checkpoint).where(table.id == pending.id, table.state == PENDING).values(facts | ready))


def _note_digest(connection: Connection, run_id: str, seq: int, digest: str) -> None:
    table = rows.run.c
    newer = or_(table.digest_seq.is_(None), table.digest_seq <= seq)
    connection.execute(update(rows.run).where(table.id == run_id, newer).values(digest=digest, digest_seq=seq))
