"""Jobs and the processes that work at them: at any time one process has a job, and it knows when it has lost it.

A runner takes a job that waits and is given a key, with which the job's process does all that it does. The key is good while the process reports in
time. When the process ends, is silent, or the job is steered away from it, the key is refused from then on, so that a process which comes back late
can change nothing: neither the job nor its run. Keys and deadlines are in rows, and an api that starts again knows them.
"""

import asyncio
import time
from collections import Counter
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, func, select, update

from bloomery.services.access.auth import Auth, fingerprint
from bloomery.services.access.principal import Principal
from bloomery.services.jobs.job_rows import change_us, job_of, listed, note, one_job, put_points, switch
from bloomery.services.jobs.jobs import Jobs
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import Conflict, Forbidden, NotFound, shown
from bloomery.types.ids import now_us
from bloomery.types.jobs import Job, JobProgress, JobState
from bloomery.types.keys import Scope, new_key
from bloomery.types.leases import MAX_REASON, FinishJob, Lease, NewJobEvent, Reported, ReportJob, Wanted
from bloomery.types.methods import Reinforcement

LEASE_S: Final = 60.0
HEARD_S: Final = 60.0
"""A runner that said nothing for so long is taken for gone; it asks for a job again after half a minute at most."""
MAX_DEATHS: Final = 5
"""A job whose processes died so often in a row, without one step between two, will not get better by itself."""
FIRST_PAUSE_S: Final = 2.0
"""Behind the second death in a row."""
SCOPES_OF_A_JOB: Final[frozenset[Scope]] = frozenset({"infer", "read", "train"})


class Leases:
    """Gives jobs out and takes them back; `load` first."""

    def __init__(self, database: Database, auth: Auth, jobs: Jobs, *, lease_s: float = LEASE_S, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._database, self._auth, self._jobs, self._lease_s, self._first_pause_s = database, auth, jobs, lease_s, first_pause_s
        self._lives: Counter[str] = Counter()
        """How often each runner has started, as far as this process knows."""
        self._heard_s: dict[str, float] = {}
        """When each runner, or a process of it, last said something."""

    @property
    def runners(self) -> list[str]:
        """Those that are there."""
        since_s = time.monotonic() - HEARD_S
        return sorted(runner for runner, heard_s in self._heard_s.items() if heard_s > since_s)

    async def load(self) -> None:
        """Take for good the keys of processes that work, and give them their time anew: nobody could report while no api was there."""

        def renew(connection: Connection) -> list[Row[Any]]:
            connection.execute(update(rows.job).where(rows.job.c.state == JobState.RUNNING).values(lease_until_us=self._until_us()))
            return list(connection.execute(select(rows.job).where(rows.job.c.state == JobState.RUNNING)))

        for row in await self._database.write(renew):
            self._auth.lend(row.lease_hash, _borrower(row.project, row.id))

    async def claim(self, p: Principal, runner: str, wait_s: float, *, token: str | None = None) -> Lease | None:
        """The job that has waited the longest, of the project for which the fewest run; None where none waits within `wait_s`. A runner that did not
        hear what it was given asks again with the same `token`, and has it."""
        p.require_server()
        self._hear(runner)
        arrived, life, token = asyncio.Event(), self._lives[runner], token or new_key()
        with self._jobs.queued.calling(arrived.set):
            if (lease := await self._claim_now(runner, life, token)) is not None or not wait_s:
                return lease
            until_s = asyncio.get_running_loop().time() + wait_s
            while lease is None and self._lives[runner] == life:
                due_in_s = await self._due_in_s()
                due_s = until_s if due_in_s is None else asyncio.get_running_loop().time() + due_in_s
                try:
                    async with asyncio.timeout_at(min(until_s, due_s)):
                        await arrived.wait()
                except TimeoutError:
                    if until_s <= due_s:
                        return None
                arrived.clear()
                if self._lives[runner] == life:
                    # Not within the time: a job that was given out, and of which nobody heard, would wait for its lease to end.
                    lease = await self._claim_now(runner, life, token)
        return lease

    async def release(self, p: Principal, runner: str) -> list[str]:
        """What this runner's processes worked at waits again: it has just started, so none of them lives."""
        p.require_server()
        self._hear(runner)
        self._lives[runner] += 1
        given_back = await self._requeue((rows.job.c.runner == runner,), "its runner started again", deadly=False)
        # Those of the life before wait for nothing any more.
        self._jobs.queued.tell()
        return given_back

    async def ended(self, p: Principal, job: str, epoch: int, words: str) -> Job:
        """The process that had this lease ended, as `words` say. Where it has said itself how the job ended, nothing changes."""
        p.require_server()
        await self._requeue((rows.job.c.id == job, rows.job.c.epoch == epoch), f"its process {words}", deadly=True)
        row = await self._database.read(lambda connection: connection.execute(select(rows.job).where(rows.job.c.id == job)).one_or_none())
        if row is None:
            raise NotFound(f"no job `{job}`", field="job")
        return listed(row)

    async def expire(self) -> list[str]:
        """What processes have that are silent for too long waits again."""
        return await self._requeue((rows.job.c.lease_until_us < now_us(),), f"its process was silent for {self._lease_s:g} s", deadly=True)

    async def report(self, p: Principal, job: str, said: ReportJob) -> Reported:
        """What the process of a job did; it may go on for another `lease_s`."""

        def change(connection: Connection) -> Reported:
            row = self._held(connection, p, job)
            self._hear(row.runner)
            values: dict[str, Any] = {"lease_until_us": self._until_us(), "updated_us": change_us(connection)}
            if said.run is not None:
                values["run_id"] = said.run
            if said.cursor is not None:
                values["cursor"] = said.cursor
            if said.progress is not None:
                values["progress"] = said.progress.model_dump_json()
                if said.progress.step > JobProgress.model_validate_json(row.progress).step:
                    values["deaths"] = 0
            connection.execute(update(rows.job).where(rows.job.c.id == row.id).values(values))
            put_points(connection, p.project, row.id, said.points)
            for event in said.events:
                note(connection, p.project, row.id, event)
            return Reported(wanted=row.wanted)

        return await self._database.write(change)

    async def finish(self, p: Principal, job: str, said: FinishJob) -> Job:
        """How the job ended, or that it stands still; the process has it no longer."""

        def change(connection: Connection) -> tuple[Job, str]:
            row = self._held(connection, p, job)
            result = None if said.result is None else said.result.model_dump_json()
            switch(connection, row, _came_to(said, row.wanted), reason=said.reason, result=result)
            return job_of(one_job(connection, p.project, row.id)), row.lease_hash

        finished, lease_hash = await self._database.write(change)
        self._auth.take_back(lease_hash)
        # Those that waited for it may wait for a process now.
        self._jobs.queued.tell()
        return finished

    def _hear(self, runner: str) -> None:
        self._heard_s[runner] = time.monotonic()

    def _held(self, connection: Connection, p: Principal, job: str) -> Row[Any]:
        row = one_job(connection, p.project, job)
        if p.key_id != row.id:
            raise Forbidden(f"only the process that has job `{row.name}` reports of it")
        if row.state != JobState.RUNNING:
            raise Conflict(f"job `{row.name}` {JobState(row.state).words}: nobody works at it")
        return row

    async def _claim_now(self, runner: str, life: int, token: str) -> Lease | None:
        await self.expire()
        lease_hash = fingerprint(token)

        def change(connection: Connection) -> tuple[Row[Any], Job] | None:
            given = connection.execute(select(rows.job).where(rows.job.c.state == JobState.RUNNING, rows.job.c.lease_hash == lease_hash)).first()
            if given is not None:
                return given, job_of(given)
            row = _next(connection, self._due(now_us()))
            if row is None:
                return None
            values = {"runner": runner, "lease_until_us": self._until_us(), "lease_hash": lease_hash, "epoch": row.epoch + 1}
            switch(connection, row, JobState.RUNNING, **values, started_us=row.started_us or now_us())
            return row, job_of(one_job(connection, row.project, row.id))

        claimed = await self._database.write(change)
        if claimed is None:
            return None
        row, job = claimed
        if self._lives[runner] != life:
            # Whoever asked is dead, and nobody would hear what he was given.
            await self._requeue((rows.job.c.id == job.id, rows.job.c.epoch == job.epoch), "its runner started again", deadly=False)
            return None
        self._auth.lend(lease_hash, _borrower(row.project, job.id))
        method = job.spec.method
        wanted = method.agent if isinstance(method, Reinforcement) else None
        agent = None if wanted is None else self._jobs.agents.lent(row.project, wanted)
        return Lease(job=job, token=token, cursor=row.cursor, lease_s=self._lease_s, agent=agent)

    async def _requeue(self, conditions: tuple[Any, ...], why: str, *, deadly: bool) -> list[str]:
        def change(connection: Connection) -> list[Row[Any]]:
            found = list(connection.execute(select(rows.job).where(rows.job.c.state == JobState.RUNNING, *conditions)))
            for row in found:
                deaths = row.deaths + deadly
                _let_go(connection, row, why, deaths=deaths, pause_s=pause_s(deaths, self._first_pause_s) if deadly else 0.0)
            return found

        let_go = await self._database.write(change)
        for row in let_go:
            self._auth.take_back(row.lease_hash)
        if let_go:
            self._jobs.queued.tell()
        return [row.id for row in let_go]

    async def _due_in_s(self) -> float | None:
        """When the next of the jobs that pause may have a process; None where none pauses."""
        now, table = now_us(), rows.job.c
        query = select(func.min(table.due_us)).where(table.state == JobState.QUEUED, ~self._due(now))
        next_us: int | None = await self._database.read(lambda connection: connection.scalar(query))
        return None if next_us is None else (next_us - now) / 1e6

    def _due(self, now: int) -> ColumnElement[bool]:
        """What pauses no more. A pause that is longer than any is of a clock that was set back since."""
        due_us, longest_s = rows.job.c.due_us, pause_s(MAX_DEATHS - 1, self._first_pause_s)
        return due_us.is_(None) | (due_us <= now) | (due_us > now + int(longest_s * 1e6))

    def _until_us(self) -> int:
        return now_us() + int(self._lease_s * 1e6)


def pause_s(deaths: int, first_s: float = FIRST_PAUSE_S) -> float:
    """None behind the first, which something from outside may have been; four times as long behind each that follows without a step between."""
    return 0.0 if deaths < 2 else first_s * 4.0 ** (deaths - 2)


def _borrower(project: str, job_id: str) -> Principal:
    """Whoever works at a job may do what training takes, in its project."""
    return Principal(project, job_id, SCOPES_OF_A_JOB)


def _next(connection: Connection, due: ColumnElement[bool]) -> Row[Any] | None:
    table = rows.job
    other = table.alias("other")
    running = (
        select(func.count())
        .select_from(other)
        .where(other.c.project == table.c.project, other.c.state == JobState.RUNNING)
        .correlate(table)
        .scalar_subquery()
    )
    query = select(table).where(table.c.state == JobState.QUEUED, due).order_by(running, table.c.queued_us, table.c.id).limit(1)
    return connection.execute(query).first()


def _came_to(said: FinishJob, wanted: Wanted) -> JobState:
    """As its process says; of one that stopped for a pause, as is wanted by now: it did not hear that somebody thought better of it."""
    if said.state != "paused":
        return JobState(said.state)
    if wanted == "cancel":
        return JobState.CANCELLED
    # With a reason it stands still by itself.
    return JobState.QUEUED if wanted == "run" and said.reason is None else JobState.PAUSED


def _let_go(connection: Connection, row: Row[Any], why: str, *, deaths: int, pause_s: float) -> None:
    """Nobody has the job any more: it does what it was asked to do, and otherwise waits again, for a process in `pause_s`."""
    last_words = _last_words(connection, row.id)
    note(connection, row.project, row.id, NewJobEvent(level="warning", message=shown(why, MAX_REASON)))
    if row.wanted == "cancel":
        switch(connection, row, JobState.CANCELLED)
    elif row.wanted == "pause":
        switch(connection, row, JobState.PAUSED)
    elif deaths >= MAX_DEATHS:
        reason = f"{why}, {deaths} times in a row without a step between{last_words}"
        switch(connection, row, JobState.FAILED, reason=shown(reason, MAX_REASON))
    else:
        switch(connection, row, JobState.QUEUED, pause_s=pause_s, deaths=deaths)


def _last_words(connection: Connection, job: str) -> str:
    """What a process said went wrong, where that was the last thing that happened."""
    table = rows.job_event.c
    last = connection.execute(select(table.level, table.message).where(table.job_id == job).order_by(table.number.desc()).limit(1)).first()
    return f": {last.message}" if last is not None and last.level == "error" else ""
