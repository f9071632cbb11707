"""Weights that nobody keeps: a snapshot without a name, and what a sampler holds alone.

A training loop saves weights for a new sampler in every step and deletes none of them. So a snapshot without a name goes when the session of its
run is over, when many newer ones are there, or, where no session is to tell, after a while; unless a deployment or a sampler holds it. A sampler
lets go of weights that nothing else keeps once it was not asked for long enough. `Keeping` says how long, and docs/operate.md what that bounds.

The row of a sampler stays, so that who comes back is told what happened. Rows go first and blobs after them, in the hands of `Garbage`.
"""

from typing import Any, Final, NamedTuple

from sqlalchemy import CTE, Connection, Select, delete, func, or_, select, update

from bloomery.services.clients.sessions import SamplerKey, Sessions
from bloomery.services.held import let_go_blobs
from bloomery.services.kinds import READY, SNAPSHOT
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.ids import now_us

_HOUR_US: Final = 3_600 * 1_000_000


class Keeping(NamedTuple):
    """How long what nobody keeps is there all the same."""

    newest_per_run: int = 100
    """Snapshots without a name of a run whose session lives."""
    min_idle_us: int = _HOUR_US
    """After it was saved, and a sampler asked last; then what newer ones have superseded goes. Nothing goes earlier."""
    idle_us: int = 24 * _HOUR_US
    """After the session finished or fell silent, and after a sampler was asked last."""
    sessionless_us: int = 7 * 24 * _HOUR_US
    """For a run of no session: as long as the result of the operation tells the version."""
    rows_at_once: int = 500
    """Rows of a kind that go in one transaction: other writers wait for it."""


class Unkept(NamedTuple):
    """Blobs that no row names any more; one that was written since `before_us` is of a newer save, whose row may be on its way."""

    blobs: list[str]
    before_us: int


class Ephemeral:
    """Expires weights that nobody keeps. The `sessions` of this process know who asked meanwhile; without a server there are none."""

    def __init__(self, database: Database, sessions: Sessions | None, *, keeping: Keeping | None = None) -> None:
        self.keeping = keeping or Keeping()
        self._database, self._sessions = database, sessions

    async def expire(self) -> Unkept:
        """Forget what nobody can use any more; what is to be deleted behind its rows."""
        keeping, now = self.keeping, now_us()
        if self._sessions is not None:
            await self._sessions.store_asked()
        blobs: list[str] = []
        while await self._database.read(lambda connection: is_due(connection, keeping, now)):
            expired = await self._database.write(lambda connection: _expire(connection, keeping, now))
            if self._sessions is not None:
                self._sessions.forget(expired.samplers)
            blobs += expired.blobs
        return Unkept(blobs, now - keeping.min_idle_us)


class _Expired(NamedTuple):
    """Samplers that hold nothing any more, and blobs that no row names."""

    samplers: list[SamplerKey]
    blobs: list[str]


def is_due(connection: Connection, keeping: Keeping, now: int) -> bool:
    """Whether something is to go."""
    spare = _spare(keeping, now)
    return any(connection.execute(query.limit(1)).first() is not None for query in (_idle_samplers(spare, keeping, now), _unheld(spare)))


def _expire(connection: Connection, keeping: Keeping, now: int) -> _Expired:
    """Let some of it go: again while something is due."""
    spare = _spare(keeping, now)
    idle = connection.execute(_idle_samplers(spare, keeping, now).limit(keeping.rows_at_once)).all()
    table = rows.sampling_session
    connection.execute(update(table).where(table.c.id.in_([row.id for row in idle])).values(key=None, gone_us=now))
    unheld = connection.execute(_unheld(spare).limit(keeping.rows_at_once)).all()
    connection.execute(delete(rows.checkpoint).where(rows.checkpoint.c.id.in_([row.id for row in unheld])))
    return _Expired([(row.project, row.id) for row in idle], let_go_blobs(connection, [(row.key, row.version) for row in (*idle, *unheld)]))


def _spare(keeping: Keeping, now: int) -> CTE:
    """Snapshots without a name that stay only if somebody holds them; `superseded` are those behind the newest of their run."""
    table, run, session = rows.checkpoint.c, rows.run.c, rows.session.c
    place = func.row_number().over(partition_by=table.run_id, order_by=table.seq.desc()).label("place")
    nameless = select(table.id, table.run_id, table.key, table.version, table.created_us, place)
    ours = nameless.where(table.kind == SNAPSHOT, table.name.is_(None), table.state == READY).subquery()
    joined = ours.join(rows.run, ours.c.run_id == run.id).outerjoin(rows.session, run.session_id == session.id)
    superseded = ours.c.place > keeping.newest_per_run
    over = (_heard_us() < now - keeping.idle_us) & (ours.c.created_us < now - keeping.idle_us)
    unowned = session.id.is_(None) & (ours.c.created_us < now - keeping.sessionless_us)
    query = select(ours.c.id, ours.c.key, ours.c.version, superseded.label("superseded")).select_from(joined)
    return query.where(ours.c.created_us < now - keeping.min_idle_us, or_(superseded, over, unowned)).cte("spare")


def _idle_samplers(spare: CTE, keeping: Keeping, now: int) -> Select[Any]:
    """Samplers that nobody asks any more, of weights that nothing else keeps."""
    table, checkpoint = rows.sampling_session.c, rows.checkpoint.c
    asked_us = func.coalesce(table.asked_us, table.created_us)
    unnamed = ~select(checkpoint.id).where(checkpoint.key == table.key).exists()
    over = func.coalesce(_heard_us(), 0) < now - keeping.idle_us
    superseded = table.key.in_(select(spare.c.key).where(spare.c.superseded))
    idle = ((asked_us < now - keeping.idle_us) & or_(over, unnamed)) | ((asked_us < now - keeping.min_idle_us) & superseded)
    keeps = select(checkpoint.id).where(checkpoint.key == table.key, checkpoint.id.not_in(select(spare.c.id)))
    joined = rows.sampling_session.outerjoin(rows.session, table.session_id == rows.session.c.id)
    query = select(table.id, table.project, table.key, table.version).select_from(joined)
    # Above the empty text, and so not NULL: an index answers that, and rows that let go are not read again.
    return query.where(table.key > "", idle, ~keeps.exists(), ~_deployed(table.key))


def _unheld(spare: CTE) -> Select[Any]:
    held = select(rows.sampling_session.c.id).where(rows.sampling_session.c.key == spare.c.key).exists()
    return select(spare.c.id, spare.c.key, spare.c.version).where(~held, ~_deployed(spare.c.key))


def _heard_us() -> Any:
    """When the client of a session was heard of last."""
    return func.coalesce(rows.session.c.finished_us, rows.session.c.heartbeat_us)


def _deployed(key: Any) -> Any:
    return select(rows.revision.c.id).where(rows.revision.c.key == key).exists()
