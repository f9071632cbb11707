"""Managed jobs as OpenAI's contract asks for them: files become a data set, a grader becomes a version, and `auto` what a job does by itself.

The job is one of `Jobs`, with a row beside it that says how it was asked for; only those that have one are shown here.
"""

import asyncio
import csv
import hashlib
import io
import json
import math
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryFile
from typing import Any, Final, NamedTuple

import msgspec
from blake3 import blake3
from sqlalchemy import Connection, Row, Select, func, insert, select, tuple_, update

from bloomery.grade.grader import Grader
from bloomery.services.access.principal import Principal
from bloomery.services.data.datasets import Datasets
from bloomery.services.data.files import Content, Files, add_file
from bloomery.services.engines.models import Models
from bloomery.services.grading.graders import Graders
from bloomery.services.jobs.job_rows import add_job, event_of, job_of
from bloomery.services.jobs.jobs import Jobs
from bloomery.services.kinds import NAMED, SNAPSHOT
from bloomery.services.one_row import one_row
from bloomery.services.training.checkpoints import owned
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.datasets import DatasetVersion, RowKind
from bloomery.types.errors import BloomeryError, InvalidInput, NotFound, shown
from bloomery.types.files import File
from bloomery.types.fine_tuning import (
    FineTune,
    FineTuned,
    FineTunedCheckpoint,
    FineTunedCheckpointPage,
    FineTunedPage,
    FineTuningMethod,
    Happened,
    HappenedPage,
    renamed,
)
from bloomery.types.graders import CreateGrader
from bloomery.types.ids import new_id, now_us
from bloomery.types.jobs import Begin, Data, Evaluation, Job, JobPoint, JobSpec, JobState
from bloomery.types.methods import Batches, DirectPreference, Distillation, Method, Reinforcement, Supervised
from bloomery.types.operations import LoraSpec
from bloomery.types.resources import Split

GRADER: Final = "method.reinforcement.grader"
_KINDS: Final[Mapping[FineTuningMethod, tuple[RowKind, ...]]] = {
    "supervised": ("chat", "completion"),
    "dpo": ("preference",),
    "reinforcement": ("prompt",),
}
_FIELDS: Final[Mapping[str | None, str]] = {
    "base_model": "model",
    "begin": "model",
    "begin.checkpoint": "model",
    "data.train": "training_file",
    "splits.train": "training_file",
    "splits.eval": "validation_file",
    "method.max_tokens": "model",
    "method.grader": GRADER,
}
"""What a field of a job is called here."""
_KEPT: Final = re.compile(r"final|step-\d+")
"""Names of what a job keeps to be served."""
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_HAPPENED: Final = re.compile(r"ftevent-(?P<time>[0-9a-f]{1,16})-(?P<point>[01])-(?P<number>[0-9a-f]{1,16})")


class _Start(NamedTuple):
    """Where training begins: at a base model, or at what was made of it before."""

    base_model: str
    begin: Begin | None = None
    lora: LoraSpec | None = None


class FineTuning:
    """Makes jobs of files and shows them; what is steered is the job."""

    def __init__(self, database: Database, files: Files, datasets: Datasets, graders: Graders, models: Models, jobs: Jobs) -> None:
        self._database, self._files, self._datasets = database, files, datasets
        self._graders, self._models, self._jobs = graders, models, jobs

    async def create(self, p: Principal, asked: FineTune) -> FineTuned:
        """A job that waits for a process. All that can be refused is refused before anything is made."""
        p.require("train")
        start = await self._start(p, asked.model)
        if asked.grader is not None:
            self._graders.check(p, asked.grader, field=GRADER)
        version = await self._version(p, asked)
        job_id = new_id("ftjob")
        method = await self._method(p, asked, version.counts.get("train.rows", 0))
        with _in_these_words():
            spec = await self._jobs.resolve(p, _spec(asked, job_id, start, version, method))

        def add(connection: Connection) -> Job:
            job = add_job(connection, p.project, job_id, spec)
            connection.execute(insert(rows.fine_tuning).values(job_id=job_id, project=p.project, asked=asked.model_dump_json()))
            return job

        job = await self._database.write(add)
        self._jobs.queued.tell()
        return FineTuned(asked=asked, job=job, result_file=None)

    async def get(self, p: Principal, job: str) -> FineTuned:
        """One job."""
        p.require("read", "train")
        return await self._settled(p, await self._database.read(lambda connection: _tuned(_one(connection, p, job))))

    async def list(self, p: Principal, *, after: str | None = None, limit: int = 20, metadata: Mapping[str, str] | None = None) -> FineTunedPage:
        """Jobs, newest first, behind the one that is called `after`; of those alone that have all of this metadata."""
        p.require("read", "train")

        def look(connection: Connection) -> list[FineTuned]:
            query = _tuned_rows(p).order_by(rows.fine_tuning.c.job_id.desc())
            if after is not None:
                query = query.where(rows.fine_tuning.c.job_id < _one(connection, p, after, field="after").id)
            found = []
            for row in connection.execute(query):
                tuned = _tuned(row)
                if (metadata or {}).items() <= (tuned.asked.metadata or {}).items():
                    found.append(tuned)
                if len(found) > limit:
                    break
            return found

        found = await self._database.read(look)
        return FineTunedPage(data=[await self._settled(p, each) for each in found[:limit]], has_more=len(found) > limit)

    async def pause(self, p: Principal, job: str) -> FineTuned:
        """Have it stand still."""
        p.require("train")
        await self._jobs.pause(p, (await self.get(p, job)).job.id)
        return await self.get(p, job)

    async def resume(self, p: Principal, job: str) -> FineTuned:
        """Have it go on."""
        p.require("train")
        await self._jobs.resume(p, (await self.get(p, job)).job.id)
        return await self.get(p, job)

    async def cancel(self, p: Principal, job: str) -> FineTuned:
        """End it without a result."""
        p.require("train")
        await self._jobs.cancel(p, (await self.get(p, job)).job.id)
        return await self.get(p, job)

    async def events(self, p: Principal, job: str, *, after: str | None = None, limit: int = 20) -> HappenedPage:
        """What happened and what was measured, newest first."""
        p.require("read", "train")
        before = _LAST if after is None else _place(after)

        def look(connection: Connection) -> list[Happened]:
            job_id = _one(connection, p, job).id
            told = [*_told(connection, job_id, before, limit + 1), *_measured(connection, job_id, before, limit + 1)]
            return sorted(told, key=lambda each: _place(each.id), reverse=True)

        found = await self._database.read(look)
        return HappenedPage(data=found[:limit], has_more=len(found) > limit)

    async def checkpoints(self, p: Principal, job: str, *, after: str | None = None, limit: int = 10) -> FineTunedCheckpointPage:
        """What the job kept and published, newest first."""
        p.require("read", "train")

        def look(connection: Connection) -> FineTunedCheckpointPage:
            row = _one(connection, p, job)
            table = rows.checkpoint.c
            query = select(rows.checkpoint).where(owned(p.project), table.run_id == row.run_id, table.kind == SNAPSHOT, table.name.is_not(None))
            kept = [each for each in connection.execute(query.order_by(table.seq.desc())) if _KEPT.fullmatch(each.name)]
            ids = [_checkpoint_id(each) for each in kept]
            if after is not None and after not in ids:
                raise InvalidInput(f"`after` is `{shown(after)}`, which is not in the list: give the `last_id` of a page", field="after")
            rest = kept[0 if after is None else ids.index(after) + 1 :]
            return FineTunedCheckpointPage(data=[_kept(connection, row.id, each) for each in rest[:limit]], has_more=len(rest) > limit)

        return await self._database.read(look)

    async def _start(self, p: Principal, model: str) -> _Start:
        """A base model by its name, or by its version what a run published and kept a checkpoint beside."""
        if self._models.named(model) is not None:
            return _Start(model)
        snapshot, named = rows.checkpoint.c, rows.checkpoint.alias("named")
        beside = (named.c.run_id == snapshot.run_id) & (named.c.name == snapshot.name) & (named.c.kind == NAMED)
        columns = (snapshot.run_id, snapshot.name, rows.run.c.base_model, rows.run.c.lora)
        query = (
            select(*columns)
            .select_from(rows.checkpoint.join(named, beside).join(rows.run, rows.run.c.id == snapshot.run_id))
            .where(owned(p.project), snapshot.version == model, snapshot.kind == SNAPSHOT)
            .limit(1)
        )
        row = await self._database.read(lambda connection: connection.execute(query).first())
        if row is None:
            known = ", ".join(f"`{base.alias}`" for base in self._models.all())
            problem = f"no model `{shown(model)}` to train: there are {known}, and what was trained here, by its version"
            raise NotFound(problem, field="model")
        begin = Begin(run=row.run_id, checkpoint=row.name)
        return _Start(row.base_model, begin, msgspec.json.decode(row.lora, type=LoraSpec))

    async def _version(self, p: Principal, asked: FineTune) -> DatasetVersion:
        """The rows of both files. One name belongs to one content, so jobs that train on the same share a version."""
        contents: dict[Split, Content] = {"train": await self._content(p, asked, asked.training_file, "training_file")}
        if asked.validation_file is not None:
            contents["eval"] = await self._content(p, asked, asked.validation_file, "validation_file")
        kinds = {content.file.kind for content in contents.values()}
        if len(kinds) > 1:
            raise InvalidInput("`validation_file` has rows of another kind than `training_file`: give both the same", field="validation_file")
        (kind,) = kinds
        name = f"files-{blake3(json.dumps([each.key for each in contents.values()]).encode()).hexdigest()[:32]}"
        with ExitStack() as stack, _in_these_words():
            files = {split: stack.enter_context(TemporaryFile(dir=self._datasets.scratch)) for split in contents}
            for split, content in contents.items():
                await asyncio.to_thread(content.copy, files[split])
            return await self._datasets.of_files(p, name, files, kind)

    async def _content(self, p: Principal, asked: FineTune, file: str, field: str) -> Content:
        content, kinds = await self._files.content(p, file, field=field), _KINDS[asked.method]
        if content.file.kind is None:
            raise InvalidInput(f"`{field}` is a file for `{content.file.purpose}`: upload one for `fine-tune`", field=field)
        if content.file.kind not in kinds:
            takes = " or ".join(f"`{kind}`" for kind in kinds)
            problem = f"`{field}` has rows of the kind `{content.file.kind}`, and `{asked.method}` takes {takes}"
            raise InvalidInput(f"{problem}: docs/datasets.md shows the forms of each", field=field)
        return content

    async def _method(self, p: Principal, asked: FineTune, count: int) -> Method:
        """What is `auto` is what the method has by itself."""
        chosen, times = asked.hyperparameters, asked.hyperparameters.learning_rate_multiplier or 1.0
        if asked.method == "reinforcement":
            assert asked.grader is not None
            parsed = Grader.parse(asked.grader, field=GRADER)
            grader = await self._graders.create(p, CreateGrader(name=f"grader-{parsed.hash[:32]}", spec=asked.grader))
            usual = Reinforcement(grader=grader.name, grader_version=grader.version)
            groups = chosen.batch_size or usual.groups_per_step
            steps = usual.steps if chosen.n_epochs is None else math.ceil(chosen.n_epochs * count / groups)
            size = max(2, round(usual.group_size * (chosen.compute_multiplier or 1.0)))
            optimizer = usual.optimizer.model_copy(update={"learning_rate": usual.optimizer.learning_rate * times})
            return usual.model_copy(update={"optimizer": optimizer, "groups_per_step": groups, "steps": steps, "group_size": size})
        usual_one: Supervised | DirectPreference = Supervised() if asked.method == "supervised" else DirectPreference()
        optimizer = usual_one.optimizer.model_copy(update={"learning_rate": usual_one.optimizer.learning_rate * times})
        batches = Batches(epochs=chosen.n_epochs or usual_one.batches.epochs, rows=chosen.batch_size)
        held_to = {"beta": chosen.beta} if chosen.beta is not None else {}
        return usual_one.model_copy(update={"optimizer": optimizer, "batches": batches, **held_to}).resolved()

    async def _settled(self, p: Principal, tuned: FineTuned) -> FineTuned:
        """With the file of what was measured, which is written for whoever looks first at a job that succeeded."""
        if tuned.job.state is not JobState.SUCCEEDED or tuned.result_file is not None:
            return tuned
        points = [point async for point in self._points(p, tuned.job.id)]
        data = (await asyncio.to_thread(_results, points)).encode()
        key, now = f"files/{hashlib.sha256(data).hexdigest()}", now_us()
        await self._files.put(key, data)
        file = File(
            id=new_id("file"),
            filename="step_metrics.csv",
            purpose="fine-tune-results",
            kind=None,
            size_bytes=len(data),
            created_us=now,
            expires_us=None,
        )

        def add(connection: Connection) -> FineTuned:
            mine = rows.fine_tuning.c.job_id == tuned.job.id
            if rows.changed(connection, update(rows.fine_tuning).where(mine, rows.fine_tuning.c.result_file.is_(None)).values(result_file=file.id)):
                add_file(connection, p.project, file, key)
            return _tuned(_one(connection, p, tuned.job.id))

        return await self._database.write(add)

    async def _points(self, p: Principal, job: str) -> AsyncIterator[JobPoint]:
        after = -1
        while points := (await self._jobs.points(p, job, after=after)).data:
            for point in points:
                yield point
            after = points[-1].step


def _epoch(spec: JobSpec, count: int) -> tuple[int, bool]:
    """Steps of an epoch over so many rows, and whether there is more than one."""
    assert not isinstance(spec.method, Distillation)
    if isinstance(spec.method, Reinforcement):
        steps = math.ceil(count / spec.method.groups_per_step)
        return steps, steps < spec.method.steps
    batches = spec.method.batches
    return max(1, round(count / (batches.rows or 1))), batches.epochs > 1


def _spec(asked: FineTune, job_id: str, start: _Start, version: DatasetVersion, method: Method) -> JobSpec:
    """Weights are kept and held-out rows are looked at behind every epoch, as users of the contract know it."""
    suffix = "" if asked.suffix is None else f"{_NO_NAME.sub('-', asked.suffix)}-"
    spec = JobSpec(
        name=f"ft-{suffix}{job_id[-12:]}",
        base_model=start.base_model,
        data=Data(dataset=version.dataset, version=version.id),
        method=method,
        begin=start.begin,
        seed=asked.seed,
        metadata=asked.metadata or {},
    )
    if start.lora is not None:
        spec = spec.model_copy(update={"rank": start.lora.rank, "alpha": start.lora.alpha})
    epoch, several = _epoch(spec, version.counts.get("train.rows", 0))
    interval = asked.hyperparameters.eval_interval
    held_out = version.counts.get("eval.rows", 0)
    if interval is not None and not held_out:
        problem = "`eval_interval` says how often the validation file is looked at, and there is none: give `validation_file`, or leave it `auto`"
        raise InvalidInput(problem, field="method.reinforcement.hyperparameters.eval_interval")
    looked_at = Evaluation(every=(interval or epoch) if held_out else 0)
    return spec.model_copy(update={"checkpoint_every": epoch if several else 0, "evaluation": looked_at})


@contextmanager
def _in_these_words() -> Iterator[None]:
    """Errors of jobs and data sets name the fields of this contract."""
    try:
        yield
    except BloomeryError as error:
        if error.field not in _FIELDS:
            raise
        raise type(error)(error.message, field=_FIELDS[error.field]) from None


def _tuned_rows(p: Principal) -> Select[Any]:
    joined = rows.fine_tuning.join(rows.job, rows.job.c.id == rows.fine_tuning.c.job_id)
    columns = (rows.job, rows.fine_tuning.c.asked, rows.fine_tuning.c.result_file)
    return select(*columns).select_from(joined).where(rows.fine_tuning.c.project == p.project)


def _one(connection: Connection, p: Principal, job: str, *, field: str = "job") -> Row[Any]:
    return one_row(connection, _tuned_rows(p).where(rows.fine_tuning.c.job_id == job), f"fine-tuning job `{shown(job)}`", field=field)


def _tuned(row: Row[Any]) -> FineTuned:
    return FineTuned(asked=FineTune.model_validate_json(row.asked), job=job_of(row), result_file=row.result_file)


class _Place(NamedTuple):
    """Of something that happened: events come before what was measured in the same microsecond."""

    time_us: int
    point: int
    number: int

    @property
    def id(self) -> str:
        return f"ftevent-{self.time_us:x}-{self.point}-{self.number:x}"


def _place(event: str) -> _Place:
    found = _HAPPENED.fullmatch(event)
    if found is None or (place := _Place(int(found["time"], 16), int(found["point"]), int(found["number"], 16))) > _LAST:
        raise InvalidInput(f"`after` is `{shown(event)}`, which is no event: give the `last_id` of a page", field="after")
    return place


_LAST: Final = _Place((1 << 63) - 1, 1, (1 << 63) - 1)


def _told(connection: Connection, job_id: str, before: _Place, limit: int) -> list[Happened]:
    table = rows.job_event.c
    earlier = table.created_us <= before.time_us if before.point else tuple_(table.created_us, table.number) < (before.time_us, before.number)
    query = select(rows.job_event).where(table.job_id == job_id, earlier).order_by(table.created_us.desc(), table.number.desc()).limit(limit)
    return [Happened(id=_Place(row.created_us, 0, row.number).id, created_us=row.created_us, what=event_of(row)) for row in connection.execute(query)]


def _measured(connection: Connection, job_id: str, before: _Place, limit: int) -> list[Happened]:
    table = rows.job_point.c
    began = select(table.step, func.min(table.created_us).label("at")).where(table.job_id == job_id).group_by(table.step).subquery()
    at, step = began.c.at, began.c.step
    earlier = tuple_(at, step) < (before.time_us, before.number) if before.point else at < before.time_us
    found = list(connection.execute(select(step, at).where(earlier).order_by(at.desc(), step.desc()).limit(limit)))
    values: dict[int, dict[str, float | None]] = {row.step: {} for row in found}
    for row in connection.execute(select(rows.job_point).where(table.job_id == job_id, table.step.in_(values))):
        values[row.step][row.name] = row.value
    return [
        Happened(id=_Place(row.at, 1, row.step).id, created_us=row.at, what=JobPoint(step=row.step, values=values[row.step], created_us=row.at))
        for row in found
    ]


def _checkpoint_id(row: Row[Any]) -> str:
    return f"ftckpt-{row.id}"


def _kept(connection: Connection, job_id: str, row: Row[Any]) -> FineTunedCheckpoint:
    # Steps of a run are updates, and of reinforcement not every step of a job has one.
    table, behind = rows.job_point.c, row.name.removeprefix("step-")
    last = connection.execute(select(func.max(table.step)).where(table.job_id == job_id)).scalar()
    step = int(behind) if behind.isdigit() else row.step if last is None else last
    found = connection.execute(select(table.name, table.value).where(table.job_id == job_id, table.step == step))
    values = {each.name: each.value for each in found}
    return FineTunedCheckpoint(id=_checkpoint_id(row), created_us=row.created_us, step=step, version=row.version, values=values)


def _results(points: Sequence[JobPoint]) -> str:
    """What was measured, a line for each step."""
    told = [renamed(point.values) for point in points]
    names = list(dict.fromkeys(name for values in told for name in values))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["step", *names])
    for point, values in zip(points, told, strict=True):
        table.writerow([point.step, *map(values.get, names)])
    return text.getvalue()
