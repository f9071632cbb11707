"""What nobody needs any more: traffic past its retention, checkpoints past their time to live, and blobs that no row refers to.

A blob is written before the row that refers to it, so unreferenced blobs are deleted only after a grace period.
"""

import asyncio
from typing import Final, NamedTuple

from sqlalchemy import Connection, delete, select

from bloomery.services.principal import Principal
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs, Blobs
from bloomery.store.database import Database
from bloomery.types.ids import now_us
from bloomery.types.resources import Collected

GRACE_US: Final = 24 * 3_600 * 1_000_000
_FOLDERS: Final = ("checkpoints", "snapshots", "manifests", "bodies", "datasets")
_KEYS: Final = (
    rows.checkpoint.c.key,
    rows.revision.c.key,
    rows.sampling_session.c.key,
    rows.span.c.body_ref,
    rows.dataset_version.c.key,
)
_VERSIONS: Final = (rows.checkpoint.c.version, rows.revision.c.version, rows.sampling_session.c.version)


class Garbage:
    """Collects for the whole server, whatever the project."""

    def __init__(self, database: Database, blobs: AsyncBlobs) -> None:
        self._database = database
        self._blobs = blobs

    async def expire(self) -> int:
        """Forget the traffic and the checkpoints that are past their time; says how many spans. Housekeeping does it now and then."""
        now = now_us()
        return await self._database.write(lambda connection: _expire(connection, now))

    async def collect(self, p: Principal, *, grace_us: int = GRACE_US) -> Collected:
        """Delete what is superfluous now, and say how much it was."""
        p.require_server()
        now = now_us()
        spans = await self.expire()
        referenced = await self._database.read(_referenced)
        swept = await asyncio.to_thread(_sweep, self._blobs.blobs, referenced, now - grace_us)
        return Collected(spans=spans, blobs=swept.blobs, bytes=swept.bytes)


class _Swept(NamedTuple):
    blobs: int
    bytes: int


def _expire(connection: Connection, now: int) -> int:
    """Spans go with the judgements of them, which may quote what was said."""
    expired = select(rows.span.c.id).where(rows.span.c.retention_until_us < now)
    connection.execute(delete(rows.feedback).where(rows.feedback.c.target_kind == "span", rows.feedback.c.target_id.in_(expired)))
    spans = connection.execute(delete(rows.span).where(rows.span.c.retention_until_us < now)).rowcount
    remaining = select(rows.span.c.episode_id).where(rows.span.c.episode_id.is_not(None), rows.span.c.project == rows.feedback.c.project)
    connection.execute(delete(rows.feedback).where(rows.feedback.c.target_kind == "episode", rows.feedback.c.target_id.not_in(remaining)))
    connection.execute(delete(rows.checkpoint).where(rows.checkpoint.c.expires_us < now))
    return spans


def _referenced(connection: Connection) -> frozenset[str]:
    keys = {key for column in _KEYS for key in connection.scalars(select(column).distinct()) if key}
    manifests = {f"manifests/{version}" for column in _VERSIONS for version in connection.scalars(select(column).distinct()) if version}
    return frozenset(keys | manifests)


def _sweep(blobs: Blobs, referenced: frozenset[str], before_us: int) -> _Swept:
    dead = [blob for folder in _FOLDERS for blob in blobs.list(folder) if blob.key not in referenced and blob.modified_us < before_us]
    for blob in dead:
        blobs.delete(blob.key)
    return _Swept(len(dead), sum(blob.size for blob in dead))
