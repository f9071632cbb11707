"""All services of an api process, composed once.

`Services.open` owns everything: the database, the links to the engines, the runs in use, the recorder of traffic, and the housekeeping between
them. Leaving it is a clean stop: engines checkpoint their runs, and what they said is journaled before anything is closed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from bloomery.config import ApiConfig, stopping
from bloomery.config.data_dir import DataDir
from bloomery.obs import background
from bloomery.services.access.auth import Auth
from bloomery.services.access.identity import Identity
from bloomery.services.access.limits import RateLimits
from bloomery.services.access.tokens import Tokens, signing_key
from bloomery.services.clients.custom_losses import CustomLosses
from bloomery.services.clients.session_search import SessionSearch
from bloomery.services.clients.sessions import Sessions
from bloomery.services.data.curation import Curation
from bloomery.services.data.datasets import Datasets
from bloomery.services.data.feedback import Judgements
from bloomery.services.data.traffic import Traffic
from bloomery.services.engines.connection import Inbox
from bloomery.services.engines.fleet import Fleet
from bloomery.services.engines.link import EngineLink
from bloomery.services.engines.models import Models
from bloomery.services.housekeeping.audit import Audit
from bloomery.services.housekeeping.ephemeral import Ephemeral
from bloomery.services.housekeeping.garbage import Garbage
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
    garbage: Garbage

    @classmethod
    @asynccontextmanager
    async def open(cls, config: ApiConfig, *, patience: Patience | None = None) -> AsyncIterator[Self]:
        """Compose and start; stop cleanly at the end. `patience`: of runs, if not the usual one."""
        data = DataDir(Path(config.data_dir))
        inbox: Inbox = asyncio.Queue()
        links = {model.base_hash: EngineLink(model.base_hash, Path(model.socket), inbox) for model in config.models}
        replicas = {
            model.base_hash: {replica.name: EngineLink(model.base_hash, Path(replica.socket), None) for replica in model.replicas}
            for model in config.models
        }
        rollouts = {
            model.base_hash: {replica.name: EngineLink(model.base_hash, Path(replica.socket), None) for replica in model.rollout_replicas}
            for model in config.models
        }
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
            exports = Exports(blobs=blobs.blobs, versions=versions, deployments=deployments, models=models)
            cards = Cards(database=database, blobs=blobs, models=models, versions=versions, deployments=deployments, fleet=fleet, engines=links)
            services = cls(
                started_us=now_us(),
                auth=auth,
                identity=Identity(auth, tokens),
                audit=Audit(database),
                models=models,
                links=links,
                fleet=fleet,
                runs=Runs(database=database, models=models, checkpoints=checkpoints, activity=activity),
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
                rendering=Rendering(models),
                sampling=Sampling(fleet, models, deployments, versions, meters),
                limits=RateLimits(meters.refused),
                meters=meters,
                traffic=traffic,
                feedback=Judgements(database, traffic),
                datasets=Datasets(database, blobs, Curation(database, blobs, traffic)),
                garbage=Garbage(database, blobs, Ephemeral(database, sessions)),
            )
            for link in (link for each in processes.values() for link in each.values()):
                await stack.enter_async_context(link)
            await stack.enter_async_context(cards)
            await stack.enter_async_context(_housekeeping(services, activity))
            yield services
            await _drain(links, activity)


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
        await services.auth.note_use()
        await services.sessions.store_asked()


async def _tidy_now_and_then(services: Services, activity: Activity) -> None:
    while True:
        await asyncio.sleep(TIDY_EVERY_S)
        try:
            await activity.tidy()
            await services.garbage.tidy()
            await services.auth.note_use()
        except Exception:
            log.exception("housekeeping failed; it is tried again in %g s", TIDY_EVERY_S)
