"""The verbs of managed jobs, for whoever wants something trained.

A job is checked whole before it is there: its base model, its rows, what it begins with. What was left open is decided then and kept with it.
"""

import asyncio
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import Connection, Row, select, update

from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import Repeatable, answer_before, once
from bloomery.services.data.datasets import Datasets
from bloomery.services.engines.models import Models, ServedBase
from bloomery.services.grading.calibrations import Calibrations
from bloomery.services.grading.graders import Graders
from bloomery.services.jobs.agents import RemoteAgents
from bloomery.services.jobs.attacks import Attacks
from bloomery.services.jobs.gates import check_gate, obstacle
from bloomery.services.jobs.job_rows import add_job, event_of, go_on, job_of, listed, note, one_job, points_of, switch
from bloomery.services.kinds import NAMED
from bloomery.services.listeners import Listeners
from bloomery.services.training.checkpoints import Checkpoints
from bloomery.services.training.runs import Runs
from bloomery.services.training.validate import check_lora
from bloomery.services.weights.deployments import Deployments
from bloomery.services.weights.versions import Version, Versions
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.checks import check_adam
from bloomery.types.datasets import DatasetVersion
from bloomery.types.errors import Conflict, InvalidInput, NotFound, naming
from bloomery.types.graders import GraderVersion
from bloomery.types.ids import new_id
from bloomery.types.jobs import Begin, Gate, Job, JobEvent, JobPoints, JobSpec, JobState
from bloomery.types.leases import NewJobEvent, Wanted
from bloomery.types.methods import Distillation, Method, Optimizer, Reinforcement, Supervised
from bloomery.types.operations import AdamParams, LoraSpec
from bloomery.types.resources import Page, Split

_SEED_BITS: Final = 31
_HELD_OUT: Final = "method.held_out_grader"


class Jobs:
    """Makes, shows and steers jobs; `queued` is told when one waits."""

    def __init__(
        self,
        *,
        database: Database,
        models: Models,
        datasets: Datasets,
        graders: Graders,
        agents: RemoteAgents,
        calibrations: Calibrations,
        attacks: Attacks,
        runs: Runs,
        checkpoints: Checkpoints,
        versions: Versions,
        deployments: Deployments,
    ) -> None:
        self._database, self._models, self._datasets, self._runs, self._checkpoints = database, models, datasets, runs, checkpoints
        self._graders, self._calibrations, self._attacks = graders, calibrations, attacks
        self._versions, self._deployments = versions, deployments
        self.agents = agents
        self.queued = Listeners()

    async def create(self, p: Principal, spec: JobSpec, *, request: Repeatable | None = None) -> Job:
        """A job that waits for a process. A `request` that comes again changes nothing and is answered what it was."""
        p.require("train")
        if (made := await answer_before(self._database, p, request, Job)) is not None:
            return made
        resolved = await self.resolve(p, spec)
        add = once(p, request, Job, lambda connection: add_job(connection, p.project, new_id("job"), resolved))
        made = await self._database.write(add)
        self.queued.tell()
        return made

    async def resolve(self, p: Principal, spec: JobSpec, *, earlier: Mapping[str, JobSpec] = MappingProxyType({})) -> JobSpec:
        """The spec with nothing left open, as a job would have it; what cannot be done is refused. `earlier`: those that are jobs before."""
        p.require("train")
        base = self._models.resolve(spec.base_model)
        seed = secrets.randbits(_SEED_BITS) if spec.seed is None else spec.seed
        lora = LoraSpec(rank=spec.rank, seed=seed, alpha=spec.alpha)
        check_lora(lora)
        _check_optimizer(spec.method.optimizer)
        _check_used(spec.method)
        if spec.rank == 0:
            self._models.check_room(base.base_hash, lora)
        context = self._models.size(base.base_hash).context
        if spec.max_context is not None and spec.max_context > context:
            raise InvalidInput(f"`max_context` is {spec.max_context}, and `{spec.base_model}` takes {context} tokens at most", field="max_context")
        version = await self._datasets.chosen(p, spec.data.dataset, spec.data.version, spec.data.train, split_field="data.train")
        if spec.evaluation.split == spec.data.train:
            problem = f"`evaluation.split` is `{spec.data.train}`, on which the job trains: what is held out lies in another"
            raise InvalidInput(problem, field="evaluation.split")
        _check_pace(spec, version)
        if version.kind not in spec.method.takes:
            takes = " or ".join(f"`{kind}`" for kind in spec.method.takes)
            problem = f"data set `{version.dataset}` has rows of `{version.kind}`, and `{spec.method.kind}` takes {takes}"
            raise InvalidInput(f"{problem}: docs/datasets.md shows the forms of each", field="data.dataset")
        data = spec.data.model_copy(update={"version": version.id})
        begin = None if spec.begin is None else await self._begin(p, spec, spec.begin, lora, base.base_hash, earlier)
        method = spec.method.resolved()
        if isinstance(method, Distillation):
            teacher = await self._teacher(p, method, base)
            # The teacher reads the same answers.
            context = min(context, self._models.size(teacher.base_hash).context)
            method = method.model_copy(update={"teacher_version": teacher.weights.version})
        if isinstance(method, Reinforcement):
            if method.agent is not None:
                self.agents.check(p, method.agent, field="method.agent")
            if method.grader is not None:
                method = await self._graded(p, method, method.grader, version.manifest, spec.data.train)
        changes = {"data": data, "begin": begin, "seed": seed, "max_context": min(spec.max_context or context, context), "method": method}
        resolved = spec.model_copy(update=changes)
        if isinstance(method, Reinforcement | Distillation) and resolved.room < 1:
            problem = f"`max_tokens` is {method.max_tokens}, and `{spec.base_model}` takes {resolved.max_context} tokens, prompts included"
            raise InvalidInput(problem, field="method.max_tokens")
        return resolved

    async def _graded(self, p: Principal, method: Reinforcement, name: str, manifest: str, split: Split) -> Reinforcement:
        """With the versions of its graders. What is not known yet of the attacks on them the job's process finds out, before it trains."""
        grader = await self._grader(p, name, method.grader_version, "method.grader")
        held_out = await self._held_out(p, method, grader)
        blocked: dict[str, str] = {}
        for each, field in ((grader, "method.grader"), (held_out, _HELD_OUT)):
            known = None if each is None else await self._attacks.known(p, each, manifest, split)
            if known is not None and known.blocks is not None:
                blocked[field] = known.blocks
        if blocked:
            # Whoever mends one of them is to know of the other.
            raise Conflict("; ".join(blocked.values()), field=next(iter(blocked)))
        versions = {"grader_version": grader.version} | ({} if held_out is None else {"held_out_grader_version": held_out.version})
        return method.model_copy(update=versions)

    async def get(self, p: Principal, job: str) -> Job:
        """One job, by its id or name."""
        p.require("read", "train")
        return await self._database.read(lambda connection: job_of(one_job(connection, p.project, job)))

    async def list(self, p: Principal, *, state: JobState | None = None, after: str | None = None, limit: int = 50, offset: int = 0) -> Page[Job]:
        """Jobs, newest first; of those alone that begin where the job `after` ends."""
        p.require("read", "train")

        def look(connection: Connection) -> list[Row[Any]]:
            query = select(rows.job).where(rows.job.c.project == p.project).order_by(rows.job.c.created_us.desc(), rows.job.c.id.desc())
            if state is not None:
                query = query.where(rows.job.c.state == state)
            if after is not None:
                query = query.where(rows.job.c.after_id == one_job(connection, p.project, after).id)
            return list(connection.execute(query.limit(limit + 1).offset(offset)))

        found = await self._database.read(look)
        return Page(data=[listed(row) for row in found[:limit]], offset=offset, has_more=len(found) > limit)

    async def points(self, p: Principal, job: str, *, after: int = -1) -> JobPoints:
        """What was measured behind step `after`, in order."""
        p.require("read", "train")

        return await self._database.read(lambda connection: points_of(connection, one_job(connection, p.project, job).id, after))

    async def events(self, p: Principal, job: str, *, limit: int = 50, offset: int = 0) -> Page[JobEvent]:
        """What happened to a job, oldest first."""
        p.require("read", "train")

        def look(connection: Connection) -> list[Row[Any]]:
            table = rows.job_event.c
            query = select(rows.job_event).where(table.job_id == one_job(connection, p.project, job).id).order_by(table.number)
            return list(connection.execute(query.limit(limit + 1).offset(offset)))

        found = await self._database.read(look)
        return Page(data=[event_of(row) for row in found[:limit]], offset=offset, has_more=len(found) > limit)

    async def pause(self, p: Principal, job: str, *, request: Repeatable | None = None) -> Job:
        """Have the job stand still: at once where it waits, within seconds where a process works at it."""
        return await self._steer(p, job, "pause", JobState.PAUSED, request)

    async def cancel(self, p: Principal, job: str, *, request: Repeatable | None = None) -> Job:
        """End the job without a result. What its run holds stays."""
        return await self._steer(p, job, "cancel", JobState.CANCELLED, request)

    async def resume(self, p: Principal, job: str, *, request: Repeatable | None = None) -> Job:
        """Have a paused job wait for a process again; it goes on where it was. A pause that was asked for and has not come yet is taken back."""
        p.require("train")

        def change(connection: Connection) -> Job:
            row = one_job(connection, p.project, job)
            if row.state != JobState.RUNNING:
                go_on(connection, row, deaths=0)
            elif row.wanted == "pause":
                connection.execute(update(rows.job).where(rows.job.c.id == row.id).values(wanted="run"))
            else:
                # Queued again, it would be given to another process beside the one that has it.
                asked = "asked to cancel" if row.wanted == "cancel" else "running"
                raise Conflict(f"job `{row.name}` is {asked}, and cannot be resumed")
            return job_of(one_job(connection, p.project, job))

        resumed = await self._database.write(once(p, request, Job, change))
        self.queued.tell()
        return resumed

    async def _steer(self, p: Principal, job: str, wanted: Wanted, at_rest: JobState, request: Repeatable | None) -> Job:
        p.require("train")

        def change(connection: Connection) -> Job:
            row = one_job(connection, p.project, job)
            if row.state != JobState.RUNNING:
                switch(connection, row, at_rest)
            elif row.wanted != wanted:
                connection.execute(update(rows.job).where(rows.job.c.id == row.id).values(wanted=wanted))
                note(connection, p.project, row.id, NewJobEvent(message=f"is asked to {wanted}"))
            return job_of(one_job(connection, p.project, job))

        return await self._database.write(once(p, request, Job, change))

    async def _teacher(self, p: Principal, method: Distillation, base: ServedBase) -> Version:
        """The weights that the name serves now, or the version that is asked for; token ids of both mean the same."""
        with naming("method.teacher", InvalidInput, NotFound):
            live = None if method.teacher_version is not None else await self._deployments.live_version(p, method.teacher)
            found = live or await self._versions.find(p, method.teacher_version or method.teacher)
        if found.base_hash != base.base_hash:
            mine, theirs = [await asyncio.to_thread(self._models.tokenizer, each) for each in (base.base_hash, found.base_hash)]
            if mine.vocabulary_hash != theirs.vocabulary_hash:
                problem = f"`{method.teacher}` is of base model `{found.base_model}`, whose tokenizer is another than that of `{base.alias}`"
                raise InvalidInput(f"{problem}: a student learns from a teacher with its own", field="method.teacher")
        if not await self._versions.stays(found):
            problem = f"the weights of `{method.teacher}` expire, or have no name and go after a while, and a job may need them for longer"
            raise InvalidInput(f"{problem}: save them under a name without an end, or take their end away", field="method.teacher")
        return found

    async def _grader(self, p: Principal, name: str, version: int | None, field: str) -> GraderVersion:
        with naming(field, NotFound):
            return await self._graders.get(p, name, version)

    async def _held_out(self, p: Principal, method: Reinforcement, grader: GraderVersion) -> GraderVersion | None:
        """The grader that nothing is trained on, where there is one; it sees nothing if it is the one that is."""
        if method.held_out_grader is None:
            return None
        found = await self._grader(p, method.held_out_grader, method.held_out_grader_version, _HELD_OUT)
        if found.hash == grader.hash:
            raise InvalidInput("`held_out_grader` scores as `grader` does, and would see what that sees: name another", field=_HELD_OUT)
        return found

    async def _begin(self, p: Principal, spec: JobSpec, begin: Begin, lora: LoraSpec, base_hash: str, earlier: Mapping[str, JobSpec]) -> Begin:
        """A named checkpoint that there is, or will be, of an adapter of the same shape."""
        if begin.job is not None:
            job = None if begin.job in earlier else await self._before(p, begin.job)
            before = earlier[begin.job] if job is None else job.spec
            if begin.gate is not None:
                if job is None or job.result is None:
                    data = await self._datasets.chosen(p, before.data.dataset, before.data.version, before.data.train, split_field="data.train")
                    check_gate(begin.gate, before, data.counts.get(f"{before.evaluation.split}.rows", 0))
                await self._require_trust(p, begin.gate, before)
            if job is None or job.result is None:
                self._check_fit(spec, lora, base_hash, before)
                return begin.model_copy(update={"run": None, "checkpoint": None})
            if (why := obstacle(job, begin.gate)) is not None:
                raise Conflict(why, field="begin.gate")
            begin = begin.model_copy(update={"run": job.result.run, "checkpoint": job.result.checkpoint})
        assert begin.run is not None
        assert begin.checkpoint is not None
        with naming("begin.checkpoint", NotFound):
            kept = await self._checkpoints.named(p, begin.run, NAMED, begin.checkpoint)
        if kept.expires_us is not None:
            raise InvalidInput(f"`{kept.path}` expires, and a job may need it for longer: take its end away first", field="begin.checkpoint")
        run = await self._runs.get(p, begin.run)
        if run.base_hash != base_hash:
            raise InvalidInput(f"run `{begin.run}` is of base model `{run.base_model}`: a job begins at weights of its own base model", field="begin")
        _check_shape(lora, run.lora, f"run `{begin.run}`")
        return begin

    async def _require_trust(self, p: Principal, gate: Gate, before: JobSpec) -> None:
        """What a gate lets through is not decided by judges that nobody measured."""
        if not isinstance(before.method, Reinforcement):
            return
        name, version = before.method.grader_of(gate.measure)
        if name is None:
            without = "`held_out_grader`" if gate.measure == "held_out_reward" else "`grader`: its agent's own rewards are no measure of a gate"
            raise InvalidInput(f"the gate asks for `{gate.measure}`, and job `{before.name}` has no {without}", field="begin.gate")
        with naming("begin.gate", Conflict):
            await self._calibrations.may_gate(p, await self._graders.get(p, name, version))

    async def _before(self, p: Principal, name: str) -> Job:
        """A job that another can begin with, now or later."""
        with naming("begin.job", NotFound):
            job = await self.get(p, name)
        if job.state.ended and job.result is None:
            raise Conflict(f"job `{job.spec.name}` {job.state.words}, and has come to nothing to begin with", field="begin.job")
        return job

    def _check_fit(self, spec: JobSpec, lora: LoraSpec, base_hash: str, before: JobSpec) -> None:
        """What will come of a job can be begun with."""
        if self._models.resolve(before.base_model).base_hash != base_hash:
            problem = f"job `{before.name}` is of base model `{before.base_model}`, and this one of `{spec.base_model}`"
            raise InvalidInput(f"{problem}: a job begins at weights of its own base model", field="begin.job")
        assert before.seed is not None
        _check_shape(lora, LoraSpec(rank=before.rank, seed=before.seed, alpha=before.alpha), f"job `{before.name}`")


def _check_optimizer(optimizer: Optimizer) -> None:
    """At its highest rate every update is one that a run takes."""
    try:
        check_adam(AdamParams(**optimizer.model_dump(exclude={"schedule"})))
    except InvalidInput as error:
        raise InvalidInput(error.message, field=f"method.optimizer.{error.field}") from None


def _check_used(method: Method) -> None:
    """What is asked for has something to be of."""
    schedule = method.optimizer.schedule
    if schedule.floor_is_idle:
        problem = f"`floor` is {schedule.floor:g}, and a `constant` learning rate never falls: leave it out, or choose a `kind` that does"
        raise InvalidInput(problem, field="method.optimizer.schedule.floor")
    if not isinstance(method, Reinforcement):
        return
    if "max_staleness" in method.idle:
        problem = f"`max_staleness` is {method.max_staleness}, and a job that is not `asynchronous` trains on the newest weights alone"
        raise InvalidInput(f"{problem}: leave it out, or set `asynchronous`", field="method.max_staleness")
    if "held_out_share" in method.idle:
        problem = f"`held_out_share` is {method.held_out_share:g}, and there is no `held_out_grader` to score it"
        raise InvalidInput(f"{problem}: leave it out, or name one", field="method.held_out_share")


def _check_shape(lora: LoraSpec, other: LoraSpec, whose: str) -> None:
    """Weights of one shape can be begun with by the other."""
    if (misfit := lora.misfit(other)) is None:
        return
    if misfit in ("rank", "alpha"):
        raise InvalidInput(f"`{misfit}` is {getattr(lora, misfit)}, and {getattr(other, misfit)} of {whose}: begin with the same", field=misfit)
    raise InvalidInput(f"`{misfit}` of {whose} is {getattr(other, misfit)}: a job begins at weights of which all layers were trained", field="begin")


def _check_pace(spec: JobSpec, version: DatasetVersion) -> None:
    """What is to happen between steps can happen."""
    held_out = version.counts.get(f"{spec.evaluation.split}.rows", 0)
    for name, every in (("evaluation.every", spec.evaluation.every), ("evaluation.served_every", spec.evaluation.served_every)):
        if every and not held_out:
            problem = f"`{name}` is {every}, and version {version.number} has no rows in `{spec.evaluation.split}`"
            raise InvalidInput(f"{problem}: hold some out (`bloomery dataset split`), or leave it at 0", field=name)
    if spec.evaluation.served_every and isinstance(spec.method, Supervised) and not spec.evaluation.answers:
        raise InvalidInput("`evaluation.served_every` looks at answers, and `evaluation.answers` is 0: set it", field="evaluation.answers")
    stopping = spec.method.early_stopping
    if stopping is not None and not spec.evaluation.every:
        raise InvalidInput("`early_stopping` looks at evaluations, and there are none: set `evaluation.every`", field="method.early_stopping")
    # Of the other methods the steps are known once the rows are dealt.
    if stopping is not None and isinstance(spec.method, Reinforcement | Distillation):
        looks = (spec.method.steps - 1) // spec.evaluation.every
        if stopping.patience >= looks:
            problem = f"`patience` is {stopping.patience}, and before the last of {spec.method.steps} steps there are {looks} evaluations"
            raise InvalidInput(f"{problem}, the first of which ends nothing", field="method.early_stopping.patience")
