"""Jobs of all projects for who follows them: what trackers elsewhere are told is asked for here, by the server itself."""

from itertools import groupby
from typing import Final

from sqlalchemy import Connection, func, select

from bloomery.services.access.principal import Principal
from bloomery.services.jobs.job_rows import listed
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import NotFound, shown
from bloomery.types.jobs import JobPoint, JobPoints
from bloomery.types.leases import FollowedJob, FollowedJobs

AT_ONCE: Final = 500
"""Jobs in one answer."""
REPORTS_AT_ONCE: Final = 500
"""What their processes said so often, in one answer."""


class Followed:
    """Shows them to whoever administers the server."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def changed(self, p: Principal, *, since_us: int) -> FollowedJobs:
        """Those that changed then or later, in the order in which they did."""
        p.require_server()
        table = rows.job.c
        query = select(rows.job).where(table.updated_us >= since_us).order_by(table.updated_us, table.id).limit(AT_ONCE)

        def look(connection: Connection) -> FollowedJobs:
            return FollowedJobs(data=[FollowedJob(project=row.project, job=listed(row)) for row in connection.execute(query)])

        return await self._database.read(look)

    async def points(self, p: Principal, job: str, *, since_us: int) -> JobPoints:
        """What a job of any project was told to have measured after that, in the order in which it was: more of a step may come behind the next."""
        p.require_server()

        def look(connection: Connection) -> JobPoints:
            if connection.execute(select(rows.job.c.id).where(rows.job.c.id == job)).first() is None:
                raise NotFound(f"no job `{shown(job)}`", field="job")
            return told_since(connection, job, since_us)

        return await self._database.read(look)


def told_since(connection: Connection, job: str, since_us: int) -> JobPoints:
    """What some reports behind that time say, each whole."""
    table = rows.job_point.c
    later = (table.job_id == job, table.created_us > since_us)
    times = select(table.created_us).where(*later).distinct().order_by(table.created_us).limit(REPORTS_AT_ONCE).subquery()
    until_us = select(func.max(times.c.created_us)).scalar_subquery()
    query = select(rows.job_point).where(*later, table.created_us <= until_us).order_by(table.created_us, table.step, table.name)
    told = groupby(connection.execute(query), key=lambda row: (row.created_us, row.step))
    points = [JobPoint(step=step, created_us=time_us, values={row.name: row.value for row in values}) for (time_us, step), values in told]
    return JobPoints(data=points)
