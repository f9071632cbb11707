"""Rows of jobs, as values, and the one place where a job's state changes.

A job's end decides about those that wait for it, in the same transaction: whoever dies between two stages, the next one begins or fails all the same.
"""

import json
from itertools import groupby
from typing import Any, Final, Literal

from sqlalchemy import Connection, Row, Select, func, insert, select, update

from bloomery.services.jobs.gates import obstacle
from bloomery.services.one_row import one_row
from bloomery.services.training.checkpoints import checkpoint_lasts
from bloomery.services.weights.versions import version_lasts
from bloomery.store import rows
from bloomery.types.errors import Conflict, NotFound, shown
from bloomery.types.ids import now_us
from bloomery.types.jobs import CHANGED_TO, JOB_NEXT, Job, JobEvent, JobPoint, JobPoints, JobProgress, JobResult, JobSpec, JobState
from bloomery.types.leases import MAX_REASON, NewJobEvent
from bloomery.types.methods import Distillation, Reinforcement

MAX_POINTS: Final = 50_000
"""Values in one answer; whoever wants more asks again behind the last step."""


def job_of(row: Row[Any]) -> Job:
    """As `/api/v1` shows it."""
    return Job(
        id=row.id,
        spec=_spec_of(row),
        state=JobState(row.state),
        reason=row.reason,
        run=row.run_id,
        progress=JobProgress.model_validate_json(row.progress),
        result=None if row.result is None else JobResult.model_validate_json(row.result),
        epoch=row.epoch,
        created_us=row.created_us,
        updated_us=row.updated_us,
        started_us=row.started_us,
        finished_us=row.finished_us,
    )


def listed(row: Row[Any]) -> Job:
    """The same without texts of rows: as lists have it, and whoever runs or follows jobs of all projects."""
    job = job_of(row)
    return job if job.result is None else job.model_copy(update={"result": job.result.model_copy(update={"samples": None})})


def _spec_of(row: Row[Any]) -> JobSpec:
    """What jobs of earlier releases have in it that counts for nothing is left out: a new job that is made from it would be refused for that."""
    spec = JobSpec.model_validate_json(row.spec)
    idle: dict[str, Any] = dict.fromkeys(spec.method.idle) if isinstance(spec.method, Reinforcement) else {}
    optimizer = spec.method.optimizer
    if optimizer.schedule.floor_is_idle:
        idle["optimizer"] = optimizer.model_copy(update={"schedule": optimizer.schedule.model_copy(update={"floor": 0.0})})
    return spec.model_copy(update={"method": spec.method.model_copy(update=idle)}) if idle else spec


def named(project: str, name: str) -> Select[Any]:
    """The job of a project with this id or name."""
    return select(rows.job).where(rows.job.c.project == project, (rows.job.c.id == name) | (rows.job.c.name == name))


def one_job(connection: Connection, project: str, name: str) -> Row[Any]:
    """The same; NotFound where there is none."""
    return one_row(connection, named(project, name), f"job `{shown(name)}`", field="job")


def add_job(connection: Connection, project: str, job_id: str, spec: JobSpec) -> Job:
    """Insert one that waits."""
    if connection.execute(named(project, spec.name)).first() is not None:
        raise Conflict(f"there is a job `{spec.name}` already: choose another name", field="name")
    _require_still_there(connection, project, spec)
    now = change_us(connection)
    before = None if spec.begin is None or spec.begin.job is None else one_job(connection, project, spec.begin.job)
    waits = spec.begin is not None and spec.begin.waits
    values: dict[str, Any] = {"id": job_id, "project": project, "name": spec.name, "method": spec.method.kind, "spec": spec.model_dump_json()}
    values |= {"state": JobState.WAITING if waits else JobState.QUEUED, "after_id": None if before is None else before.id}
    values |= {"wanted": "run", "epoch": 0, "deaths": 0, "progress": JobProgress().model_dump_json()}
    connection.execute(insert(rows.job).values(values | {"created_us": now, "updated_us": now, "queued_us": now}))
    if waits and before is not None:
        note(connection, project, job_id, NewJobEvent(message=f"waits for job `{before.name}`, where it begins"))
        # The other may have ended since the spec was checked.
        go_on(connection, one_job(connection, project, job_id))
    else:
        note(connection, project, job_id, NewJobEvent(message="waits for a process"))
    return job_of(one_job(connection, project, job_id))


def _require_still_there(connection: Connection, project: str, spec: JobSpec) -> None:
    """What the job needs may be gone, or have an end, since the spec was checked; from now on the job keeps it."""
    if connection.execute(select(rows.dataset_version.c.id).where(rows.dataset_version.c.id == spec.data.version)).first() is None:
        raise NotFound(f"no data set `{spec.data.dataset}`", field="data.dataset")
    begin, method = spec.begin, spec.method
    place = None if begin is None or begin.run is None or begin.checkpoint is None else (begin.run, begin.checkpoint)
    if place is not None and not checkpoint_lasts(connection, project, *place):
        problem = f"checkpoint `{place[1]}` of run `{place[0]}`, at which the job begins"
        raise NotFound(f"{problem}, was deleted meanwhile, or expires: name another", field="begin.checkpoint")
    if isinstance(method, Distillation) and method.teacher_version is not None and not version_lasts(connection, method.teacher_version):
        problem = f"the weights of `{method.teacher}`, from which the job learns"
        raise NotFound(f"{problem}, were deleted meanwhile, or expire: name others", field="method.teacher")


def switch(connection: Connection, row: Row[Any], state: JobState, *, reason: str | None = None, pause_s: float = 0.0, **values: Any) -> None:
    """Change a job's state, by compare-and-swap of state and lease, and note it as an event; unless it runs on, nobody has the lease any more. One
    that waits for a process is given none within `pause_s`."""
    before = JobState(row.state)
    if state not in JOB_NEXT[before]:
        wanted = "resumed" if state is JobState.QUEUED else state
        raise Conflict(f"job `{row.name}` {before.words}, and cannot be {wanted} after that")
    now = change_us(connection)
    changed = {"state": state, "reason": reason, "updated_us": now, **values}
    if state is not JobState.RUNNING:
        changed |= {"runner": None, "lease_until_us": None, "lease_hash": None}
    if state is JobState.QUEUED:
        changed |= {"queued_us": now, "due_us": now_us() + int(pause_s * 1e6) if pause_s else None, "wanted": "run"}
    if state.ended:
        changed |= {"finished_us": now_us()}
    statement = update(rows.job).where(rows.job.c.id == row.id, rows.job.c.state == before, rows.job.c.epoch == row.epoch).values(changed)
    if not rows.changed(connection, statement):
        raise Conflict(f"job `{row.name}` was changed meanwhile: look at it again")
    said = state.words if reason is None else f"{state.words}: {reason}"
    said += f", and gets a process in {pause_s:g} s" if pause_s else ""
    level: Literal["error", "info"] = "error" if state is JobState.FAILED else "info"
    note(connection, row.project, row.id, NewJobEvent(level=level, message=shown(said, MAX_REASON), data={CHANGED_TO: state}))
    if state.ended:
        table = rows.job.c
        for waiting in connection.execute(select(rows.job).where(table.after_id == row.id, table.state == JobState.WAITING)).all():
            go_on(connection, waiting)


def change_us(connection: Connection) -> int:
    """When a job changes that changes now: behind all others. Clocks are set back, and who follows jobs asks for what came since."""
    return _behind(connection.scalar(select(func.max(rows.job.c.updated_us))))


def _behind(last_us: int | None) -> int:
    """Now, but later than what was told last."""
    return max(now_us(), 1 + (last_us or 0))


def go_on(connection: Connection, row: Row[Any], **values: Any) -> None:
    """Have a job that is at rest wait for a process, or for the job that it begins with; it fails where that came to nothing to begin with."""
    spec = JobSpec.model_validate_json(row.spec)
    if spec.begin is None or not spec.begin.waits:
        return switch(connection, row, JobState.QUEUED, **values)
    before = job_of(connection.execute(select(rows.job).where(rows.job.c.id == row.after_id)).one())
    if not before.state.ended:
        # One that waits already goes on doing so.
        return None if row.state == JobState.WAITING else switch(connection, row, JobState.WAITING, **values)
    if (why := obstacle(before, spec.begin.gate)) is not None:
        return switch(connection, row, JobState.FAILED, reason=why)
    assert before.result is not None
    begin = spec.begin.model_copy(update={"run": before.result.run, "checkpoint": before.result.checkpoint})
    switch(connection, row, JobState.QUEUED, spec=spec.model_copy(update={"begin": begin}).model_dump_json(), **values)


def note(connection: Connection, project: str, job_id: str, event: NewJobEvent) -> None:
    """Add an event, unless one of its key is there."""
    table = rows.job_event.c
    if event.key is not None and connection.execute(select(table.number).where(table.job_id == job_id, table.key == event.key)).first() is not None:
        return
    last = connection.execute(select(func.max(table.number)).where(table.job_id == job_id)).scalar()
    values = {"project": project, "job_id": job_id, "number": (last or 0) + 1, "key": event.key, "level": event.level, "message": event.message}
    connection.execute(insert(rows.job_event).values(values | {"data": json.dumps(event.data), "created_us": now_us()}))


def put_points(connection: Connection, project: str, job_id: str, points: list[JobPoint]) -> None:
    """Store what was measured. A step that is told again, by a process that began again, keeps the time of the first."""
    table = rows.job_point
    # Behind all that was told before, whatever the clock says: who follows the job asks for what came since.
    now = _behind(connection.scalar(select(func.max(table.c.created_us)).where(table.c.job_id == job_id)))
    told = {(point.step, name): value for point in points for name, value in point.values.items()}
    steps = {step for step, _ in told}
    of_job = table.c.job_id == job_id
    known = {(row.step, row.name) for row in connection.execute(select(table.c.step, table.c.name).where(of_job, table.c.step.in_(steps)))}
    for step, name in known & told.keys():
        connection.execute(update(table).where(of_job, table.c.step == step, table.c.name == name).values(value=told[step, name]))
    place = {"project": project, "job_id": job_id, "created_us": now}
    new = [place | {"step": step, "name": name, "value": value} for (step, name), value in told.items() if (step, name) not in known]
    if new:
        connection.execute(insert(table), new)


def points_of(connection: Connection, job_id: str, after: int) -> JobPoints:
    """What was measured behind a step, in order, as much as goes into one answer."""
    table = rows.job_point.c
    query = select(rows.job_point).where(table.job_id == job_id, table.step > after).order_by(table.step, table.name).limit(MAX_POINTS + 1)
    found, points = list(connection.execute(query)), []
    for step, group in groupby(found, key=lambda row: row.step):
        values = list(group)
        points.append(JobPoint(step=step, created_us=values[0].created_us, values={row.name: row.value for row in values}))
    # The limit may have cut the last step in two; it is whole in the next answer.
    return JobPoints(data=points if len(found) <= MAX_POINTS else points[:-1])


def event_of(row: Row[Any]) -> JobEvent:
    """As `/api/v1` shows it."""
    return JobEvent(number=row.number, level=row.level, message=row.message, data=json.loads(row.data), created_us=row.created_us)
