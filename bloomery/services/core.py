"""All services of an api process, composed once.

`Services.open` owns everything: the database, the links to the engines, the runs in use, the recorder of traffic, and the housekeeping between
them. Leaving it is a clean stop: engines checkpoint their runs, and what they said is journaled before anything is closed.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from bloomery.config import ApiConfig, ReplicaConfig, stopping
from bloomery.config.data_dir import DataDir
from bloomery.grade import pool
from bloomery.obs import background
from bloomery.services.access.auth import Auth
from bloomery.services.access.identity import Identity
from bloomery.services.access.limits import RateLimits
from bloomery.services.access.tokens import Tokens, signing_key
from bloomery.services.batches.answers import Finisher
from bloomery.services.batches.batches import Batches
from bloomery.services.batches.runner import BatchRunner
from bloomery.services.clients.custom_losses import CustomLosses
from bloomery.services.clients.session_search import SessionSearch
from bloomery.services.clients.sessions import Sessions
from bloomery.services.data.curation import Curation
from bloomery.services.data.datasets import Datasets
from bloomery.services.data.feedback import Judgements
from bloomery.services.data.files import Files
from bloomery.services.data.row_tokens import RowTokens
from bloomery.services.data.traffic import Traffic
from bloomery.services.data.uploads import Uploads
from bloomery.services.engines.connection import Inbox
from bloomery.services.engines.fleet import Fleet
from bloomery.services.engines.link import EngineLink
from bloomery.services.engines.models import Models
from bloomery.services.evaluations.answering import Askable
from bloomery.services.evaluations.evals import Evals
from bloomery.services.evaluations.evaluations import Evaluations
from bloomery.services.evaluations.running import Evaluating
from bloomery.services.grading.calibrations import Calibrations
from bloomery.services.grading.endpoints import Endpoints
from bloomery.services.grading.graders import Graders
from bloomery.services.grading.own_models import Served
from bloomery.services.housekeeping.audit import Audit
from bloomery.services.housekeeping.ephemeral import Ephemeral
from bloomery.services.housekeeping.garbage import Garbage
from bloomery.services.jobs.agents import RemoteAgents
from bloomery.services.jobs.attacks import Attacks
from bloomery.services.jobs.chains import Chains
from bloomery.services.jobs.estimates import Estimates
from bloomery.services.jobs.fine_tuning import FineTuning
from bloomery.services.jobs.followed import Followed
from bloomery.services.jobs.jobs import Jobs
from bloomery.services.jobs.leases import Leases
from bloomery.services.jobs.model_cards import ModelCards
from bloomery.services.serving.meters import Meters
from bloomery.services.serving.rendering import Rendering
from bloomery.services.serving.sampling import Sampling
from bloomery.services.training.active import Patience
from bloomery.services.training.activity import Activity
from bloomery.services.training.checkpoints import Checkpoints
from bloomery.services.training.run_metrics import RunMetricsReader
from bloomery.services.training.runs import Runs
from bloomery.services.weights.deployments import Deployments
from bloomery.services.weights.exports import Exports
from bloomery.services.weights.external import External
from bloomery.services.weights.fidelity import Cards
from bloomery.services.weights.publishing import Publishing
from bloomery.services.weights.staging import Staging
from bloomery.services.weights.versions import Versions
from bloomery.store.blobs import AsyncBlobs, Blobs
from bloomery.store.database import Database
from bloomery.types.ids import now_us

log = logging.getLogger(__name__)

TIDY_EVERY_S: Final = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """What routes call."""

    started_us: int
    auth: Auth
    identity: Identity
    audit: Audit
    models: Models
    links: Mapping[str, EngineLink]
    """By base hash."""
    fleet: Fleet
    runs: Runs
    checkpoints: Checkpoints
    publishing: Publishing
    external: External
    exports: Exports
    run_metrics: RunMetricsReader
    custom_losses: CustomLosses
    sessions: Sessions
    session_search: SessionSearch
    versions: Versions
    deployments: Deployments
    cards: Cards
    rendering: Rendering
    sampling: Sampling
    limits: RateLimits
    meters: Meters
    traffic: Traffic
    feedback: Judgements
    datasets: Datasets
    files: Files
    uploads: Uploads
    batches: Batches
    batch_runner: BatchRunner
    jobs: Jobs
    leases: Leases
    followed: Followed
    chains: Chains
    estimates: Estimates
    fine_tuning: FineTuning
    model_cards: ModelCards
    graders: Graders
    calibrations: Calibrations
    attacks: Attacks
    endpoints: Endpoints
    evaluations: Evaluations
    evals: Evals
    row_tokens: RowTokens
    garbage: Garbage

    @classmethod
    @asynccontextmanager
    async def open(cls, config: ApiConfig, *, patience: Patience | None = None) -> AsyncIterator[Self]:
        """Compose and start; stop cleanly at the end. `patience`: of runs, if not the usual one."""
        data = DataDir(Path(config.data_dir))
        inbox: Inbox = asyncio.Queue()
        links = {model.base_hash: EngineLink(model.base_hash, Path(model.socket), inbox) for model in config.models}
        replicas = {model.base_hash: _links_to(model.replicas, model.base_hash) for model in config.models}
        rollouts = {model.base_hash: _links_to(model.rollout_replicas, model.base_hash) for model in config.models}
        async with AsyncExitStack() as stack:
            database = stack.enter_context(Database(data.database))
            blobs = AsyncBlobs(Blobs(data.blobs))
            models = stack.enter_context(Models(config.models, links))
            await models.load(database)
            auth = Auth(database)
            await auth.load(data.api_key.read_text().strip())
            tokens = Tokens(signing_key(data.signing_key))
            checkpoints, versions, sessions = Checkpoints(database), Versions(database, models), Sessions(database)
            activity = await stack.enter_async_context(
                Activity(
                    database=database, blobs=blobs, directory=data.runs, links=links, inbox=inbox, patience=patience, published=versions.published
                )
            )
            traffic = await stack.enter_async_context(Traffic(database, blobs, config.record))
            deployed: set[str] = set()
            fleet = Fleet(links, replicas, deployed, rollouts=rollouts)
            deployments = Deployments(database, models, versions, Staging(fleet), deployed)
            await deployments.load()
            processes = {base_hash: {"engine": link, **fleet.beside(base_hash)} for base_hash, link in links.items()}
            meters = Meters(models, processes, config.max_waiting)
            datasets = Datasets(database, blobs, Curation(database, blobs, traffic), scratch=data.root)
            exports = Exports(blobs=blobs.blobs, versions=versions, deployments=deployments, models=models)
            cards = Cards(database=database, blobs=blobs, models=models, versions=versions, deployments=deployments, fleet=fleet, engines=links)
            runs = Runs(database=database, models=models, checkpoints=checkpoints, activity=activity)
            rendering, limits = Rendering(models), RateLimits(meters.refused)
            sampling = Sampling(fleet, models, deployments, versions, meters)
            jail = await stack.enter_async_context(pool.Graders(level=config.graders))
            endpoints = await stack.enter_async_context(Endpoints(config.endpoints, os.environ, limits))
            served = Served(models=models, rendering=rendering, sampling=sampling, limits=limits)
            graders = Graders(database, jail, served, endpoints)
            evaluations = Evaluations(database, datasets, graders, sampling, endpoints)
            attacks = Attacks(database, datasets, graders)
            calibrations = Calibrations(database, graders)
            jobs = Jobs(
                database=database,
                models=models,
                datasets=datasets,
                graders=graders,
                agents=RemoteAgents(config.agents),
                calibrations=calibrations,
                attacks=attacks,
                runs=runs,
                checkpoints=checkpoints,
                versions=versions,
                deployments=deployments,
            )
            files, leases = Files(database, blobs, datasets), Leases(database, auth, jobs)
            await leases.load()
            row_tokens, batches = RowTokens(datasets, models), Batches(database, files)
            services = cls(
                started_us=now_us(),
                auth=auth,
                identity=Identity(auth, tokens),
                audit=Audit(database),
                models=models,
                links=links,
                fleet=fleet,
                runs=runs,
                checkpoints=checkpoints,
                publishing=Publishing(database, checkpoints),
                external=External(checkpoints, exports, tokens),
                exports=exports,
                run_metrics=RunMetricsReader(database),
                custom_losses=CustomLosses(database, offered=config.custom_losses),
                sessions=sessions,
                session_search=SessionSearch(database),
                versions=versions,
                deployments=deployments,
                cards=cards,
                rendering=rendering,
                sampling=sampling,
                limits=limits,
                meters=meters,
                traffic=traffic,
                feedback=Judgements(database, traffic),
                datasets=datasets,
                files=files,
                uploads=Uploads(database, blobs.blobs, files, data.root),
                batches=batches,
                batch_runner=BatchRunner(database, blobs, auth, sampling, batches, Finisher(database, files, blobs, data.root)),
                jobs=jobs,
                leases=leases,
                followed=Followed(database),
                fine_tuning=FineTuning(database, files, datasets, graders, models, jobs),
                model_cards=ModelCards(
                    database,
                    blobs,
                    jobs=jobs,
                    datasets=datasets,
                    graders=graders,
                    calibrations=calibrations,
                    attacks=attacks,
                    versions=versions,
                    deployments=deployments,
                    cards=cards,
                ),
                graders=graders,
                calibrations=calibrations,
                attacks=attacks,
                endpoints=endpoints,
                evaluations=evaluations,
                evals=Evals(database, blobs, datasets, files, graders, evaluations),
                row_tokens=row_tokens,
                chains=Chains(database, jobs, row_tokens),
                estimates=Estimates(database, jobs, row_tokens),
                garbage=Garbage(database, blobs, Ephemeral(database, sessions)),
            )
            for link in (link for each in processes.values() for link in each.values()):
                await stack.enter_async_context(link)
            await stack.enter_async_context(cards)
            await stack.enter_async_context(Evaluating(database, evaluations, datasets, graders, Askable(served, endpoints)))
            await stack.enter_async_context(_housekeeping(services, activity))
            yield services
            await _drain(links, activity)


def _links_to(replicas: Sequence[ReplicaConfig], base_hash: str) -> dict[str, EngineLink]:
    """By name."""
    return {replica.name: EngineLink(base_hash, Path(replica.socket), None) for replica in replicas}


async def _drain(links: Mapping[str, EngineLink], activity: Activity) -> None:
    """Checkpoints make the next start quick; without them the journal is replayed, and nothing is lost either way."""
    drained = await asyncio.gather(*(link.drain(stopping.DRAIN_S) for link in links.values()))
    for base_hash, done in zip(links, drained, strict=True):
        if not done:
            log.warning("the engine of base model %s was not drained: its runs will be replayed from their last checkpoints", base_hash)
    await activity.stored(stopping.STORED_S)


@asynccontextmanager
async def _housekeeping(services: Services, activity: Activity) -> AsyncIterator[None]:
    try:
        async with background.running(_tidy_now_and_then(services, activity), "housekeeping"):
            yield
    finally:
        await _each(services.auth.note_use, services.sessions.store_asked)


async def _tidy_now_and_then(services: Services, activity: Activity) -> None:
    while True:
        await asyncio.sleep(TIDY_EVERY_S)
        await _each(activity.tidy, services.leases.expire, services.garbage.tidy, services.auth.note_use)


async def _each(*chores: Callable[[], Awaitable[object]]) -> None:
    """One after the other: what goes wrong with one keeps no other from being done."""
    for chore in chores:
        try:
            await chore()
        except Exception:
            log.exception("housekeeping failed in `%s`; it is tried again every %g s", chore.__qualname__, TIDY_EVERY_S)
