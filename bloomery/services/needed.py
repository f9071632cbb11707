"""What jobs that have not ended need: it stays until they have it no longer."""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, Protocol

from sqlalchemy import Connection, Row, select

from bloomery.services.kinds import NAMED, SNAPSHOT
from bloomery.store import rows
from bloomery.types.jobs import JobResult, JobSpec, JobState
from bloomery.types.methods import Distillation


class Unended(NamedTuple):
    """A job that waits, runs or is paused."""

    row: Row[Any]
    spec: JobSpec


class Needed(NamedTuple):
    """Which job needs something, and for what; its `str` ends a refusal."""

    job: Row[Any]
    what_for: str

    def __str__(self) -> str:
        return f"is what job `{self.job.name}` ({self.job.state}) {self.what_for}: cancel the job, or wait for its end"


class Saved(Protocol):
    """A saved state or published weights, as far as jobs name them."""

    @property
    def run_id(self) -> str: ...
    @property
    def tinker_id(self) -> str | None: ...
    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def version(self) -> str | None: ...


def unended_jobs(connection: Connection, project: str) -> Iterator[Unended]:
    """Those of a project."""
    table = rows.job.c
    query = select(rows.job).where(table.project == project, table.state.in_([state for state in JobState if not state.ended]))
    for row in connection.execute(query).all():
        yield Unended(row, JobSpec.model_validate_json(row.spec))


def needs_dataset(connection: Connection, project: str, name: str) -> Needed | None:
    """The first job that needs the rows of a data set."""
    return next((Needed(row, "trains on") for row, spec in unended_jobs(connection, project) if spec.data.dataset == name), None)


def needs_saved(connection: Connection, project: str, saved: Saved) -> Needed | None:
    """The first job that needs what a run saved."""
    for row, spec in unended_jobs(connection, project):
        if row.run_id == saved.run_id and saved.kind in (NAMED, SNAPSHOT):
            return Needed(row, "has saved, and goes on with")
        if isinstance(spec.method, Distillation) and saved.kind == SNAPSHOT and spec.method.teacher_version == saved.version:
            return Needed(row, "learns from")
    return None if saved.kind != NAMED else needs_name(connection, project, (saved.run_id, saved.tinker_id), saved.name)


def needs_name(connection: Connection, project: str, run: Collection[str | None], name: str | None) -> Needed | None:
    """The first job that begins at the checkpoint of this name of a run, which is called by any of its own."""
    for row, spec in unended_jobs(connection, project):
        place = _beginning(connection, row, spec)
        if place is not None and place[0] in run and place[1] == name:
            return Needed(row, "begins at")
    return None


def _beginning(connection: Connection, row: Row[Any], spec: JobSpec) -> tuple[str, str] | None:
    """The run and the checkpoint; None at the base model, and where the job before has nothing to begin with yet."""
    if spec.begin is None:
        return None
    if spec.begin.run is not None and spec.begin.checkpoint is not None:
        return spec.begin.run, spec.begin.checkpoint
    # One that was paused while it waited is told only when it is resumed.
    before = connection.scalar(select(rows.job.c.result).where(rows.job.c.id == row.after_id))
    if before is None:
        return None
    result = JobResult.model_validate_json(before)
    return result.run, result.checkpoint
