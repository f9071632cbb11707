"""Rows of batches, as values, and the one place where a batch's state changes."""

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, select, update

from bloomery.services.access.principal import Principal
from bloomery.services.one_row import one_row
from bloomery.store import rows
from bloomery.types.batches import BATCH_NEXT, Batch, BatchCounts, BatchProblem, BatchState, NewBatch
from bloomery.types.errors import Conflict, shown
from bloomery.types.ids import now_us

OPEN = tuple(state for state in BatchState if not state.ended)


def batch_of(row: Row[Any]) -> Batch:
    """As it is."""
    return Batch(
        id=row.id,
        asked=NewBatch.model_validate_json(row.asked),
        state=BatchState(row.state),
        model=row.model,
        problems=[BatchProblem.model_validate(problem) for problem in json.loads(row.problems)],
        counts=BatchCounts(total=row.total, completed=row.completed, failed=row.failed),
        output_file=row.output_file,
        error_file=row.error_file,
        times_us={BatchState(state): at_us for state, at_us in json.loads(row.times).items()},
        created_us=row.created_us,
        expires_us=row.expires_us,
    )


def own(p: Principal) -> Select[Any]:
    """The batches of a project."""
    return select(rows.batch).where(rows.batch.c.project == p.project)


def one(connection: Connection, p: Principal, batch: str, *, field: str = "batch") -> Row[Any]:
    """One of them; `field` is what called it so."""
    return one_row(connection, own(p).where(rows.batch.c.id == batch), f"batch `{shown(batch)}`", field=field)


def now(connection: Connection, batch: str) -> Row[Any]:
    """The row of a batch that is there."""
    return connection.execute(select(rows.batch).where(rows.batch.c.id == batch)).one()


def switch(connection: Connection, row: Row[Any], state: BatchState, **values: Any) -> None:
    """Change a batch's state, by compare-and-swap; whatever ended needs its input no longer."""
    before = BatchState(row.state)
    if state not in BATCH_NEXT[before]:
        raise Conflict(f"batch `{row.id}` is {before}, and cannot be {state} after that", field="batch")
    times = json.dumps({**json.loads(row.times), state: now_us()})
    changed = {"state": state, "times": times, **({"input_key": None} if state.ended else {}), **values}
    statement = update(rows.batch).where(rows.batch.c.id == row.id, rows.batch.c.state == before).values(changed)
    if not rows.changed(connection, statement):
        raise Conflict(f"batch `{row.id}` was changed meanwhile: look at it again", field="batch")


def as_json(problems: Sequence[BatchProblem]) -> str:
    """As a row has them."""
    return json.dumps([problem.model_dump() for problem in problems])
