"""Model cards of published versions, made of what the server knows: the manifest, the job that made it, its data, and what was measured.

Nothing in a card was written by anybody to recommend a model; what is not known stands in it, too.
"""

from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row, func, select

from bloomery.services.access.principal import Principal
from bloomery.services.data.datasets import Datasets
from bloomery.services.grading.calibrations import Calibrations
from bloomery.services.grading.graders import Graders
from bloomery.services.jobs.attacks import Attacks
from bloomery.services.jobs.job_rows import job_of
from bloomery.services.jobs.jobs import Jobs
from bloomery.services.weights.deployments import Deployments
from bloomery.services.weights.fidelity import Cards
from bloomery.services.weights.versions import Version, Versions
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs
from bloomery.store.database import Database
from bloomery.sync.manifest import Manifest
from bloomery.sync.publish import manifest_key
from bloomery.types.errors import Conflict, InvalidInput, NotFound
from bloomery.types.jobs import Job
from bloomery.types.methods import Reinforcement
from bloomery.types.model_cards import Ancestor, Figure, GradedBy, ModelCard, TrainedOn
from bloomery.types.resources import Fidelity

MAX_ANCESTORS: Final = 100
NEVER_MEASURED: Final = ("the license of the weights", "safety, bias, and whatever else the held-out rows do not ask")


class ModelCards:
    """Writes cards; whoever may read a version may read its card."""

    def __init__(
        self,
        database: Database,
        blobs: AsyncBlobs,
        *,
        jobs: Jobs,
        datasets: Datasets,
        graders: Graders,
        calibrations: Calibrations,
        attacks: Attacks,
        versions: Versions,
        deployments: Deployments,
        cards: Cards,
    ) -> None:
        self._database, self._blobs, self._jobs, self._datasets = database, blobs, jobs, datasets
        self._graders, self._calibrations, self._attacks = graders, calibrations, attacks
        self._versions, self._deployments, self._cards = versions, deployments, cards

    async def of_job(self, p: Principal, job: str) -> ModelCard:
        """Of the version that a job ended with."""
        p.require("read", "train")
        found = await self._jobs.get(p, job)
        if found.result is None:
            raise Conflict(f"job `{found.spec.name}` {found.state.words}, and no model has come of it", field="job")
        return await self.of_version(p, found.result.version)

    async def of_version(self, p: Principal, name: str) -> ModelCard:
        """Of a version, a `tinker://` path, or what a deployment serves now."""
        p.require("read", "train")
        found = await self._deployments.live_version(p, name) or await self._versions.find(p, name)
        if found.weights.key is None:
            raise InvalidInput(f"`{name}` is the base model itself: its card is with the files that the server was started with", field="version")
        manifest = Manifest.from_json(await self._blobs.get(manifest_key(found.weights.version)))
        told = await self._database.read(lambda connection: _told(connection, p.project, manifest))
        trained_on = None if told.job is None else await self._trained_on(p, told.job)
        graded = _Graded(None, None) if told.job is None else await self._graded(p, told.job, trained_on)
        return _card(found, manifest, told, trained_on, graded, await self._fidelity(p, found))

    async def _fidelity(self, p: Principal, of: Version) -> Fidelity | None:
        try:
            return await self._cards.get(p, of.weights.version)
        except NotFound:
            return None

    async def _trained_on(self, p: Principal, job: Job) -> TrainedOn | None:
        """None where the data set was deleted since."""
        try:
            dataset = await self._datasets.get(p, job.spec.data.dataset)
        except NotFound:
            return None
        version = next((each for each in dataset.versions if each.id == job.spec.data.version), None)
        if version is None:
            return None
        return TrainedOn(dataset=dataset.name, number=version.number, version=version.id, manifest=version.manifest, counts=version.counts)

    async def _graded(self, p: Principal, job: Job, trained_on: TrainedOn | None) -> "_Graded":
        method = job.spec.method
        if not isinstance(method, Reinforcement):
            return _Graded(None, None)
        asked = [(method.grader, method.grader_version), (method.held_out_grader, method.held_out_grader_version)]
        return _Graded(*[None if name is None else await self._graded_by(p, job, name, version, trained_on) for name, version in asked])

    async def _graded_by(self, p: Principal, job: Job, name: str, version: int | None, trained_on: TrainedOn | None) -> GradedBy:
        grader = await self._graders.get(p, name, version)
        card = await self._calibrations.gate_card(p, grader)
        attack = None if trained_on is None else await self._attacks.known(p, grader, trained_on.manifest, job.spec.data.train)
        return GradedBy(
            grader=grader.name,
            version=grader.version,
            hash=grader.hash,
            judges=grader.judges,
            calibrated=None if card is None else card.calibrated,
            verdict=None if attack is None else attack.verdict,
            why=None if attack is None else attack.why,
            exploits=[] if attack is None else [exploit.name for exploit in attack.exploits],
            waiver=grader.waiver,
        )


class _Graded(NamedTuple):
    """By whom a training was graded; `held_out` is whose scores it did not follow."""

    rewarded: GradedBy | None
    held_out: GradedBy | None


class _Told(NamedTuple):
    """What rows know of a run's weights at a step."""

    job: Job | None
    figures: list[Figure]
    lineage: list[Ancestor]


def _told(connection: Connection, project: str, manifest: Manifest) -> _Told:
    job = _job_of_run(connection, project, manifest.run_id)
    if job is None:
        return _Told(None, [], [])
    return _Told(job, _figures(connection, job.id, manifest.step), _lineage(connection, project, job))


def _job_of_run(connection: Connection, project: str, run_id: str) -> Job | None:
    row: Row[Any] | None = connection.execute(select(rows.job).where(rows.job.c.project == project, rows.job.c.run_id == run_id)).first()
    return None if row is None else job_of(row)


def _figures(connection: Connection, job_id: str, step: int) -> list[Figure]:
    table = rows.job_point.c
    newest = select(table.name, func.max(table.step).label("step")).where(table.job_id == job_id, table.step <= step).group_by(table.name).subquery()
    joined = rows.job_point.join(newest, (table.name == newest.c.name) & (table.step == newest.c.step))
    query = select(table.name, table.step, table.value).select_from(joined).where(table.job_id == job_id).order_by(table.name)
    return [Figure(name=row.name, step=row.step, value=row.value) for row in connection.execute(query)]


def _lineage(connection: Connection, project: str, job: Job) -> list[Ancestor]:
    found: list[Ancestor] = []
    above: Job | None = job
    while above is not None and (begin := above.spec.begin) is not None and len(found) < MAX_ANCESTORS:
        assert begin.run is not None
        assert begin.checkpoint is not None
        above = _job_of_run(connection, project, begin.run)
        known = (None, None, None, None) if above is None else (above.spec.name, above.spec.method.kind, above.spec.data.dataset, _version(above))
        name, method, dataset, version = known
        found.append(Ancestor(run=begin.run, checkpoint=begin.checkpoint, job=name, method=method, dataset=dataset, version=version))
    return found[::-1]


def _version(job: Job) -> str | None:
    return None if job.result is None else job.result.version


def _card(found: Version, manifest: Manifest, told: _Told, trained_on: TrainedOn | None, graded: _Graded, fidelity: Fidelity | None) -> ModelCard:
    job = told.job
    version = found.weights.version
    card = ModelCard(
        version=version,
        base_model=found.base_model,
        base_hash=manifest.base,
        kind=manifest.kind,
        rank=manifest.rank,
        alpha=manifest.alpha,
        targets=list(manifest.targets),
        run=manifest.run_id,
        step=manifest.step,
        parent=manifest.parent,
        numerics=manifest.numerics,
        lineage=told.lineage,
        figures=told.figures,
        fidelity=fidelity,
        not_measured=_not_measured(job, trained_on, graded, fidelity, version),
    )
    if job is None:
        return card
    of_the_job = {"job": job.spec.name, "spec": job.spec, "trained_on": trained_on}
    card = card.model_copy(update=of_the_job | {"rewarded_by": graded.rewarded, "held_out_by": graded.held_out})
    if (result := job.result) is None or result.version != version:
        return card
    of_the_end = {"digest": result.digest, "compared": result.compared, "compared_with": result.base_version, "finished_us": job.finished_us}
    return card.model_copy(update=of_the_end | {"tokens": job.progress.tokens, "seconds": job.progress.seconds})


def _not_measured(job: Job | None, trained_on: TrainedOn | None, graded: _Graded, fidelity: Fidelity | None, version: str) -> list[str]:
    """In the order of the card."""
    missing = []
    if job is None:
        missing.append("what it was trained on and how: no managed job made it")
    elif trained_on is None:
        missing.append(f"what it was trained on: data set `{job.spec.data.dataset}` was deleted")
    for which, by in (("grader", graded.rewarded), ("held-out grader", graded.held_out)):
        if by is not None and by.verdict in (None, "undecided"):
            missing.append(f"whether its {which} pays without competence: no attack on the prompts says so")
        if by is not None and by.judges and by.calibrated is None:
            missing.append(f"how far the judges of its {which} agree with people: nobody measured them")
    if job is None or job.result is None or job.result.version != version:
        missing.append("how it does beside what it began with: only what a job ends with is compared")
    elif not job.result.compared:
        missing.append("how it does beside what it began with: no rows were held out")
    if fidelity is None:
        missing.append("fidelity: whether the sampler says of its tokens what the trainer says of them")
    return [*missing, *NEVER_MEASURED]
