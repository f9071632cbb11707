"""The rollouts of a run's steps: recorded once by whoever trains, read by whoever wants to see what was trained on.

A step is one blob, as it came, beside a row that sums it up. The newest steps of a run are kept, and of those before every tenth: `forget_old` lets
the others go, which housekeeping asks for.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Literal, TypeVar

from sqlalchemy import Connection, Row, Select, delete, func, insert, select

from bloomery.services.access.principal import Principal
from bloomery.services.engines.models import Models
from bloomery.services.training.recorded import Packed, pack, unpack
from bloomery.services.training.rollout_texts import Shown, Texts, filtered, page, shown_group
from bloomery.services.training.run_rows import RunRow, one_run
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs
from bloomery.store.database import Database
from bloomery.types.errors import BloomeryError, Conflict, Corrupt, Gone, NotFound, NotSupported
from bloomery.types.ids import now_us
from bloomery.types.resources import Page
from bloomery.types.rollouts import RecordedStep, RolloutFilter, RolloutPage, RolloutStep

KEPT_EVERY: Final = 10
"""Of the steps before the newest, those whose number it divides stay."""
_THREADS: Final = 2

Order = Literal["newest", "oldest"]
T = TypeVar("T")


class Rollouts:
    """Every look-up is confined to the caller's project. `refused`: why nothing is recorded here; None where it is."""

    def __init__(self, database: Database, blobs: AsyncBlobs, models: Models, *, refused: str | None = None) -> None:
        self._database, self._blobs, self._models, self._refused = database, blobs, models, refused
        self._turns = asyncio.Semaphore(_THREADS)

    async def add(self, p: Principal, run_id: str, step: int, body: bytes) -> RolloutStep:
        """Keep what a `RecordedStep` says of a step, from msgpack. The same again changes nothing; another one is a Conflict."""
        p.require("train")
        run = await self._run(p, run_id)
        if self._refused is not None:
            raise NotSupported(self._refused, field="record")
        packed = await self._on_thread(lambda: pack(body))
        key = f"rollouts/{run.id}/{step}-{packed.values['hash'][:32]}"
        if await self._database.read(lambda connection: _known(connection, run, step, packed)) is None:
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

    async def groups(self, p: Principal, run_id: str, step: int, wanted: RolloutFilter, *, limit: int, offset: int = 0) -> RolloutPage:
        """Groups of a step with what their tokens say, in the order in which they were recorded."""
        p.require("read", "train")
        run = await self._run(p, run_id)
        query = _of(run).where(rows.rollout_step.c.step == step)
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        if row is None:
            raise NotFound(f"no rollouts of step {step} of run `{run_id}` are kept: none were recorded, or their time is over", field="step")
        recorded, texts = await self._read(row), await self._texts(run)
        shown: Shown = await self._on_thread(lambda: page(recorded, wanted, texts, limit=limit, offset=offset))
        return RolloutPage(step=_shown(row), data=shown.groups, offset=offset, has_more=shown.has_more)

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
        texts = await self._texts(run)
        return self._exported(found, wanted, texts)

    async def _exported(self, found: Sequence[Row[Any]], wanted: RolloutFilter, texts: Texts) -> AsyncIterator[bytes]:
        for row in found:
            try:
                recorded = await self._read(row)
            except BloomeryError as error:
                yield _line({"run": row.run_id, "step": row.step, "error": error.message})
                continue
            lines = _lines(row, recorded, wanted, texts)
            while (some := await self._on_thread(partial(next, lines, None))) is not None:
                yield some

    async def _read(self, row: Row[Any]) -> RecordedStep:
        which = f"the rollouts of step {row.step} of run `{row.run_id}`"
        try:
            blob = await self._blobs.get(row.key)
        except NotFound:
            raise Gone(f"{which} are not there any more, though they are listed: their blob `{row.key}` is missing", field="step") from None
        try:
            return await self._on_thread(lambda: unpack(blob, row.hash))
        except Corrupt as error:
            raise Corrupt(f"{which} are damaged: of their blob `{row.key}`, {error.message}") from None

    async def _run(self, p: Principal, run_id: str) -> RunRow:
        return await self._database.read(lambda connection: one_run(connection, p, run_id))

    async def _texts(self, run: RunRow) -> Texts:
        with suppress(NotFound):
            return Texts(await asyncio.to_thread(self._models.tokenizer, run.base_hash))
        return Texts(None)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        async with self._turns:
            return await asyncio.to_thread(work)


def forget_old(connection: Connection, newest: int) -> list[str]:
    """Of every run all but the `newest` steps and every tenth of those before; the blobs that are nobody's then."""
    table = rows.rollout_step.c
    many = connection.scalars(select(table.run_id).group_by(table.run_id).having(func.count() > newest)).all()
    gone: list[str] = []
    for run_id in many:
        kept = select(table.step).where(table.run_id == run_id).order_by(table.step.desc()).limit(newest)
        oldest = min(connection.scalars(kept).all(), default=None)
        old = (table.run_id == run_id, table.step % KEPT_EVERY != 0, *([] if oldest is None else [table.step < oldest]))
        gone += connection.scalars(delete(rows.rollout_step).where(*old).returning(table.key)).all()
    return gone


def _of(run: RunRow) -> Select[Any]:
    return select(rows.rollout_step).where(rows.rollout_step.c.run_id == run.id, rows.rollout_step.c.project == run.project)


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


def _lines(row: Row[Any], recorded: RecordedStep, wanted: RolloutFilter, texts: Texts) -> Iterator[bytes]:
    """Of each group those of its rollouts."""
    for group in filtered(recorded, wanted, texts):
        shown = shown_group(group, texts)
        whose = {"run": row.run_id, "step": row.step, **shown.model_dump(exclude={"prompt_texts", "failures", "rollouts"})}
        # Texts of single tokens would be most of the line, and say nothing that the others do not.
        said = (rollout.model_dump(exclude={"segments": {"__all__": {"texts"}}}) for rollout in shown.rollouts)
        yield b"".join(_line(whose | each) for each in said)


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode() + b"\n"
