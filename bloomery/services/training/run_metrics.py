"""Metrics of runs, as curves are drawn from them. Settling a result writes them (`settle`); this reads."""

from itertools import groupby

from sqlalchemy import select

from bloomery.services.access.principal import Principal
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.resources import RunMetric, RunMetrics

MAX_POINTS = 50_000
"""Values in one answer; whoever wants more asks again behind the last operation."""


class RunMetricsReader:
    """Reads `run_metric` rows."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def series(self, p: Principal, run_id: str, *, after: int = -1) -> RunMetrics:
        """Metrics of the operations behind number `after`, in order; of a run that has none yet, nothing."""
        p.require("read", "train")
        table = rows.run_metric.c
        query = select(rows.run_metric).where(table.project == p.project, table.run_id == run_id, table.seq > after)
        query = query.order_by(table.seq, table.name).limit(MAX_POINTS + 1)
        found = await self._database.read(lambda connection: connection.execute(query).all())
        points = []
        for seq, group in groupby(found, key=lambda row: row.seq):
            values = list(group)
            points.append(RunMetric(seq=seq, step=values[0].step, created_us=values[0].created_us, values={row.name: row.value for row in values}))
        # The limit may have cut the last operation in two; it is whole in the next answer.
        return RunMetrics(data=points if len(found) <= MAX_POINTS else points[:-1])
