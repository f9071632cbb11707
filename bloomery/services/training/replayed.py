"""Whether an operation that was computed again came to the same.

What is compared is what the caller was told of the run's state. A newer release may tell more, or write weights in another form: that alone is no
other history. Of a result that the journal lost, the rows know the numbers.
"""

from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import Connection, select

from bloomery.services.kinds import AUTO, READY, SOURCE
from bloomery.services.training.settle import FORWARD_ONLY, SECONDS, RunKey
from bloomery.store import rows
from bloomery.types.operations import CheckpointResult, Failed, ForwardBackwardResult, LoadResult, OptimStepResult, Result, SnapshotResult
from bloomery.types.wire import encode


def contradicts(told: Result, again: Result) -> bool:
    """Whether one happened and the other did not: then the run is not where its caller was told that it is, on whatever machine."""
    return isinstance(told, Failed) != isinstance(again, Failed)


def agree(told: Result, again: Result) -> bool:
    """Whether both speak of the same bits, as far as both speak of them."""
    match told, again:
        case Failed(), Failed():
            return True
        case ForwardBackwardResult(), ForwardBackwardResult():
            return _alike(told.metrics, again.metrics) and len(told.outputs) == len(again.outputs) and all(map(_alike, told.outputs, again.outputs))
        case OptimStepResult(), OptimStepResult():
            return _alike(told.metrics, again.metrics)
        case CheckpointResult() | LoadResult(), CheckpointResult() | LoadResult():
            return (told.digest, told.step) == (again.digest, again.step)
        case SnapshotResult(), SnapshotResult():
            # Version and key are hashes of files; what they are made from shows in the operations before.
            return told.step == again.step
        case _:
            return False


class InRows(NamedTuple):
    """What rows say of an operation that succeeded: its metrics, and the digest of what it saved or loaded where that stands anywhere."""

    metrics: Mapping[str, float]
    digest: str | None

    def agrees(self, again: Result) -> bool:
        """Whether a result speaks of the same bits, as far as both speak of them."""
        match again:
            case ForwardBackwardResult() | OptimStepResult():
                return _alike(self.metrics, again.metrics)
            case CheckpointResult() | LoadResult():
                return self.digest in (None, again.digest)
            case SnapshotResult():
                return True
            case Failed():
                return False


def in_rows(connection: Connection, run: RunKey, seq: int) -> InRows | None:
    """What rows say of a settled operation; None of one that failed, or whose checkpoint was deleted since."""
    metric, saved = rows.run_metric.c, rows.checkpoint.c
    found = connection.execute(select(metric.name, metric.value).where(metric.run_id == run.run_id, metric.seq == seq)).all()
    mine = (saved.run_id == run.run_id, saved.seq == seq, saved.state == READY, saved.kind != AUTO)
    ready = connection.execute(select(saved.kind, saved.digest).where(*mine)).first()
    if not found and ready is None:
        return None
    digest = None if ready is None else ready.digest
    if ready is not None and ready.kind == SOURCE:
        digest = connection.scalar(select(rows.run.c.digest).where(rows.run.c.id == run.run_id, rows.run.c.digest_seq == seq))
    metrics = {row.name.removeprefix(FORWARD_ONLY): row.value for row in found if row.value is not None}
    metrics.pop(SECONDS, None)
    return InRows(metrics, digest)


def _alike(told: Mapping[str, object], again: Mapping[str, object]) -> bool:
    # As bytes: a metric may be nan.
    return all(encode(told[name]) == encode(again[name]) for name in told.keys() & again.keys())
