"""What nobody needs any more: traffic past its retention, rollouts of old steps, checkpoints past their time to live, weights that nobody keeps,
what was proved of bases that nothing belongs to any more, and unreferenced blobs.

A blob is written before the row that refers to it, so one that no row refers to is deleted only after a grace period. Those of weights that were
let go or have expired are deleted behind their rows, at once. What is left then (of deleted and replaced checkpoints, of traffic, of a death between
row and blob) housekeeping finds when it looks through all blobs, which it does now and then; whoever cannot wait collects.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from sqlalchemy import Connection, delete, select

from bloomery.config import DEFAULT_KEEP_ROLLOUTS
from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import forget_old
from bloomery.services.data.span_sums import forget_spans
from bloomery.services.held import held_blobs, held_versions, let_go_blobs
from bloomery.services.housekeeping.chains import RunChains
from bloomery.services.housekeeping.ephemeral import Ephemeral
from bloomery.services.training.rollouts import forget_old as forget_old_rollouts
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs, Blobs
from bloomery.store.database import Database
from bloomery.sync.chain.keys import Verifier
from bloomery.sync.publish import base_blobs
from bloomery.types.ids import now_us
from bloomery.types.resources import Collected

GRACE_US: Final = 24 * 3_600 * 1_000_000
ROWS_AT_ONCE: Final = 500
"""Checkpoints that go in one transaction: other writers wait for it."""
SWEEP_EVERY_US: Final = 6 * 3_600 * 1_000_000
"""Housekeeping looks through all blobs: much less often than through rows, for it lists every file."""
_WRITING_US: Final = 60 * 1_000_000
"""Longer than a transaction takes."""
_LET_GO: Final = 2
"""Times as long as nothing goes: by then a sampler that was asked a few times has let go of what newer versions superseded."""
_FOLDERS: Final = (
    "checkpoints",
    "snapshots",
    "manifests",
    "fidelity",
    "probes",
    "bases",
    "bodies",
    "batches",
    "datasets",
    "evaluations",
    "files",
    "rollouts",
)
_OTHER_KEYS: Final = (
    rows.span.c.body_ref,
    rows.dataset_version.c.key,
    rows.dataset_version.c.rejected_key,
    rows.batch.c.input_key,
    rows.batch_line.c.key,
    rows.evaluation.c.rows_key,
    rows.file.c.key,
    rows.upload_part.c.key,
    rows.rollout_step.c.key,
)
"""Of blobs that are no weights."""
_BASES: Final = (rows.base_model.c.base_hash, rows.run.c.base_hash, rows.deployment.c.base_hash)
"""Of bases that are served, or that something belongs to: what was proved of them is what they are held against when they are served again."""


class Garbage:
    """Collects for the whole server, whatever the project."""

    def __init__(
        self,
        database: Database,
        blobs: AsyncBlobs,
        ephemeral: Ephemeral,
        *,
        trusted: Sequence[Verifier],
        keep_rollouts: int = DEFAULT_KEEP_ROLLOUTS,
    ) -> None:
        """`trusted`: who signs the chains of runs; `keep_rollouts`: of the newest steps of each run."""
        self.ephemeral, self._keep_rollouts = ephemeral, keep_rollouts
        self._database = database
        self._blobs = blobs
        self._chains = RunChains(blobs.blobs, trusted=trusted)
        self._swept_us = self._forgot_us = 0
        self._one_at_a_time = asyncio.Lock()

    async def tidy(self) -> Collected:
        """What housekeeping does now and then: `expire`, and less often `collect` too."""
        async with self._one_at_a_time:
            expired, now = await self.expire(), now_us()
            if now - self._swept_us < SWEEP_EVERY_US:
                return expired
            self._swept_us = now
            return _total(expired, await self._sweep(now - GRACE_US))

    async def expire(self) -> Collected:
        """Forget the traffic and the checkpoints that are past their time, rollouts of old steps, and weights that nobody keeps."""
        now = now_us()
        spans, gone = await self._database.write(lambda connection: (_expire(connection, now), _expire_checkpoints(connection, now)))
        blobs = await self._database.write(lambda connection: forget_old_rollouts(connection, self._keep_rollouts, self._forgot_us))
        # What was being written then may say that it is older.
        self._forgot_us = now - _WRITING_US
        while gone is not None:
            blobs += gone
            gone = await self._database.write(lambda connection: _expire_checkpoints(connection, now))
        unkept = await self.ephemeral.expire()
        swept = await asyncio.to_thread(_delete, self._blobs.blobs, [*blobs, *unkept.blobs], unkept.before_us)
        await self.claim()
        return Collected(spans=spans, blobs=swept.blobs, bytes=swept.bytes)

    async def claim(self) -> None:
        """Have versions that rows hold outlive the sweeps of the engines: before the first one, and behind what let rows go."""
        before_us = now_us() - _LET_GO * self.ephemeral.keeping.min_idle_us
        await asyncio.to_thread(self._chains.claim, await self._database.read(held_versions), before_us)

    async def collect(self, p: Principal, *, grace_us: int = GRACE_US) -> Collected:
        """Delete what is superfluous now, and say how much it was."""
        p.require_server()
        now = now_us()
        async with self._one_at_a_time:
            return _total(await self.expire(), await self._sweep(now - grace_us))

    async def _sweep(self, before_us: int) -> "_Swept":
        referenced = await self._database.read(_referenced)
        await self._remove_chains(before_us)
        return await asyncio.to_thread(_sweep, self._blobs.blobs, referenced, before_us)

    async def _remove_chains(self, before_us: int) -> None:
        for run_id in await asyncio.to_thread(self._chains.spare, await self._database.read(held_versions), before_us):
            if (fence := await asyncio.to_thread(self._chains.fence, run_id)) is not None:
                # What was published before the fence is seen by its age, or by its row.
                await asyncio.to_thread(self._chains.remove, run_id, fence, await self._database.read(held_versions), before_us)


class _Swept(NamedTuple):
    blobs: int
    bytes: int


def _total(expired: Collected, swept: _Swept) -> Collected:
    return Collected(spans=expired.spans, blobs=expired.blobs + swept.blobs, bytes=expired.bytes + swept.bytes)


def _expire(connection: Connection, now: int) -> int:
    """Spans go with the judgements of them, which may quote what was said; and files and uploads go whose time is over."""
    expired = select(rows.span.c.id).where(rows.span.c.retention_until_us < now)
    connection.execute(delete(rows.feedback).where(rows.feedback.c.target_kind == "span", rows.feedback.c.target_id.in_(expired)))
    spans = forget_spans(connection, rows.span.c.retention_until_us < now)
    remaining = select(rows.span.c.episode_id).where(rows.span.c.episode_id.is_not(None), rows.span.c.project == rows.feedback.c.project)
    connection.execute(delete(rows.feedback).where(rows.feedback.c.target_kind == "episode", rows.feedback.c.target_id.not_in(remaining)))
    connection.execute(delete(rows.file).where(rows.file.c.expires_us < now))
    over = select(rows.upload.c.id).where(rows.upload.c.expires_us < now)
    connection.execute(delete(rows.upload_part).where(rows.upload_part.c.upload_id.in_(over)))
    connection.execute(delete(rows.upload).where(rows.upload.c.expires_us < now))
    forget_old(connection, now)
    return spans


def _expire_checkpoints(connection: Connection, now: int) -> list[str] | None:
    """Some of those that are past their time, and the blobs that no row names any more; None where there are none."""
    checkpoint = rows.checkpoint.c
    query = select(checkpoint.id, checkpoint.key, checkpoint.version).where(checkpoint.expires_us < now).limit(ROWS_AT_ONCE)
    over = connection.execute(query).all()
    connection.execute(delete(rows.checkpoint).where(checkpoint.id.in_([row.id for row in over])))
    return let_go_blobs(connection, [(row.key, row.version) for row in over]) if over else None


def _referenced(connection: Connection) -> frozenset[str]:
    others = {key for column in _OTHER_KEYS for key in connection.scalars(select(column).distinct()) if key}
    bases = {base_hash for column in _BASES for base_hash in connection.scalars(select(column).distinct())}
    return held_blobs(connection).union(others, *map(base_blobs, bases))


def _sweep(blobs: Blobs, referenced: frozenset[str], before_us: int) -> _Swept:
    dead = [blob.key for folder in _FOLDERS for blob in blobs.list(folder) if blob.key not in referenced and blob.modified_us < before_us]
    return _delete(blobs, dead, before_us)


def _delete(blobs: Blobs, keys: Iterable[str], before_us: int) -> _Swept:
    """Those that were not written again meanwhile."""
    sizes = [size for key in keys if (size := blobs.delete_older(key, before_us)) is not None]
    return _Swept(len(sizes), sum(sizes))
