"""All services of an api process, composed once.

`Services.open` owns everything: the database, the links to the engines, the runs in use, the recorder of traffic, and the housekeeping between
them. Leaving it is a clean stop: engines checkpoint their runs, and what they said is journaled before anything is closed.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
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
from bloomery.services.clients.live import Live
from bloomery.services.clients.session_search import SessionSearch
from bloomery.services.clients.sessions import Sessions
from bloomery.services.data.curation import Curation
from bloomery.services.data.datasets import Datasets
from bloomery.services.data.feedback import Judgements
from bloomery.services.data.files import Files
from bloomery.services.data.row_tokens import RowTokens
from bloomery.services.data.span_texts import Spelling
from bloomery.services.data.traffic import Traffic
from bloomery.services.data.uploads import Uploads
from bloomery.services.engines.connection import Inbox
from bloomery.services.engines.fleet import Fleet
from bloomery.services.engines.link import EngineLink
from bloomery.services.engines.models import Models
from bloomery.services.evaluations.answering import Askable
from bloomery.services.evaluations.evals import Evals
from bloomery.services.evaluations.evaluations import Evaluations
from bloomery.services.evaluations.paired import Pairs
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
from bloomery.services.jobs.leases import FIRST_PAUSE_S, Leases
from bloomery.services.jobs.model_cards import ModelCards
from bloomery.services.serving.meters import Meters
from bloomery.services.serving.rendering import Rendering
from bloomery.services.serving.sampling import Sampling
from bloomery.services.training.active import Patience
from bloomery.services.training.activity import Activity
from bloomery.services.training.checkpoints import Checkpoints
from bloomery.services.training.rollouts import Rollouts
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
from bloomery.sync.chain.keys import read_keys
from bloomery.types.ids import now_us

log = logging.getLogger(__name__)

TIDY_EVERY_S: Final = 300.0


class Services:
    """What routes call.

    The packages are composed in the order of their layers: each is made of what stands before it. `versions`
    alone is made before its package, because runs publish through it.
    """

    started_us: int
    public_hosts: frozenset[str]
    """Names under which browsers may ask for this server, beside its own."""
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
    rollouts: Rollouts
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
    spelling: Spelling
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
    pairs: Pairs
    evals: Evals
    row_tokens: RowTokens
    garbage: Garbage
    live: Live

    def __init__(self, config: ApiConfig, stack: AsyncExitStack) -> None:
        self._config, self._data, self._stack = config, DataDir(Path(config.data_dir)), stack
        self._database = stack.enter_context(Database(self._data.database))
        self._blobs = AsyncBlobs(Blobs(self._data.blobs))
        self.public_hosts = frozenset(config.public_hosts)

    @classmethod
    @asynccontextmanager
    async def open(cls, config: ApiConfig, *, patience: Patience | None = None, first_pause_s: float = FIRST_PAUSE_S) -> AsyncIterator[Self]:
        """Compose and start; stop cleanly at the end. `patience`: of runs, if not the usual one; `first_pause_s`: of jobs whose processes die."""
        async with AsyncExitStack() as stack:
            services = cls(config, stack)
            await services._compose(patience, first_pause_s)
            await services._start()
            yield services
            await _drain(services.links, services._activity)

    async def _compose(self, patience: Patience | None, first_pause_s: float) -> None:
        inbox: Inbox = asyncio.Queue()
        self.links = {model.base_hash: EngineLink(model.base_hash, Path(model.socket), inbox) for model in self._config.models}
        self.models = self._stack.enter_context(Models(self._config.models, self.links))
        await self.models.load(self._database)
        await self._compose_access()
        await self._compose_training(inbox, patience)
        await self._compose_weights()
        await self._compose_data()
        self._compose_serving()
        self._compose_clients()
        await self._compose_grading()
        self._compose_batches()
        self._compose_evaluations()
        await self._compose_jobs(first_pause_s)
        self.garbage = Garbage(
            self._database,
            self._blobs,
            Ephemeral(self._database, self.sessions),
            keep_rollouts=self._config.keep_rollouts,
            trusted=read_keys(self._data.chain_key).trusted,
        )
        self.live = Live()
        self.started_us = now_us()

    async def _compose_access(self) -> None:
        self.auth = Auth(self._database)
        await self.auth.load(self._data.api_key.read_text().strip())
        self._tokens = Tokens(signing_key(self._data.signing_key))
        self.identity = Identity(self.auth, self._tokens)
        self.audit = Audit(self._database)

    async def _compose_training(self, inbox: Inbox, patience: Patience | None) -> None:
        # Of `weights`, and yet the first: what runs have saved is published through it.
        self.versions = Versions(self._database, self.models)
        self._activity = await self._stack.enter_async_context(
            Activity(
                database=self._database,
                blobs=self._blobs,
                directory=self._data.runs,
                links=self.links,
                inbox=inbox,
                patience=patience,
                published=self.versions.published,
                # Called once engines are connected, which is when all this is there.
                succeeded=lambda successor: self.deployments.expect(successor),
            )
        )
        self.checkpoints = Checkpoints(self._database)
        self.runs = Runs(database=self._database, models=self.models, checkpoints=self.checkpoints, activity=self._activity)
        self.run_metrics = RunMetricsReader(self._database)
        self.rollouts = Rollouts(self._database, self._blobs, self.models, refused=_why_no_rollouts(self._config))

    async def _compose_weights(self) -> None:
        replicas = {model.base_hash: _links_to(model.replicas, model.base_hash) for model in self._config.models}
        rollouts = {model.base_hash: _links_to(model.rollout_replicas, model.base_hash) for model in self._config.models}
        deployed: set[str] = set()
        self.fleet = Fleet(self.links, replicas, deployed, rollouts=rollouts)
        staging = Staging(self.fleet)
        self._stack.push_async_callback(staging.close)
        self.deployments = Deployments(self._database, self.models, self.versions, staging, deployed)
        await self.deployments.load()
        self.exports = Exports(
            blobs=self._blobs.blobs,
            versions=self.versions,
            deployments=self.deployments,
            models=self.models,
            trusted=read_keys(self._data.chain_key).trusted,
        )
        self.publishing = Publishing(self._database, self.checkpoints)
        self.external = External(self.checkpoints, self.exports, self._tokens)
        self.cards = Cards(
            database=self._database,
            blobs=self._blobs,
            models=self.models,
            versions=self.versions,
            deployments=self.deployments,
            fleet=self.fleet,
            engines=self.links,
        )

    async def _compose_data(self) -> None:
        self.traffic = await self._stack.enter_async_context(Traffic(self._database, self._blobs, self._config.record))
        self.spelling = Spelling(self.models)
        self.feedback = Judgements(self._database, self.traffic)
        curation = Curation(self._database, self._blobs, self.traffic)
        self.datasets = Datasets(self._database, self._blobs, curation, scratch=self._data.root)
        self.files = Files(self._database, self._blobs, self.datasets)
        self.uploads = Uploads(self._database, self._blobs.blobs, self.files, self._data.root)
        self.row_tokens = RowTokens(self.datasets, self.models)

    def _compose_serving(self) -> None:
        self._processes = {base_hash: {"engine": link, **self.fleet.beside(base_hash)} for base_hash, link in self.links.items()}
        self.meters = Meters(self.models, self._processes, self._config.max_waiting)
        self.limits = RateLimits(self.meters.refused)
        self.rendering = Rendering(self.models)
        self.sampling = Sampling(self.fleet, self.models, self.deployments, self.versions, self.meters)

    def _compose_clients(self) -> None:
        self.custom_losses = CustomLosses(self._database, offered=self._config.custom_losses)
        self.sessions = Sessions(self._database)
        self.session_search = SessionSearch(self._database)

    async def _compose_grading(self) -> None:
        jail = await self._stack.enter_async_context(pool.Graders(level=self._config.graders))
        self.endpoints = await self._stack.enter_async_context(Endpoints(self._config.endpoints, os.environ, self.limits))
        self._served = Served(models=self.models, rendering=self.rendering, sampling=self.sampling, limits=self.limits)
        self.graders = Graders(self._database, jail, self._served, self.endpoints)
        self.calibrations = Calibrations(self._database, self.graders)

    def _compose_batches(self) -> None:
        self.batches = Batches(self._database, self.files)
        finisher = Finisher(self._database, self.files, self._blobs, self._data.root)
        self.batch_runner = BatchRunner(self._database, self._blobs, self.auth, self.sampling, self.batches, finisher)

    def _compose_evaluations(self) -> None:
        self.evaluations = Evaluations(self._database, self.datasets, self.graders, self.sampling, self.endpoints)
        self.pairs = Pairs(self._database, self.datasets)
        self.evals = Evals(self._database, self._blobs, self.datasets, self.files, self.graders, self.evaluations)

    async def _compose_jobs(self, first_pause_s: float) -> None:
        self.attacks = Attacks(self._database, self.datasets, self.graders)
        self.jobs = Jobs(
            database=self._database,
            models=self.models,
            datasets=self.datasets,
            graders=self.graders,
            agents=RemoteAgents(self._config.agents),
            calibrations=self.calibrations,
            attacks=self.attacks,
            runs=self.runs,
            checkpoints=self.checkpoints,
            versions=self.versions,
            deployments=self.deployments,
        )
        self.leases = Leases(self._database, self.auth, self.jobs, first_pause_s=first_pause_s)
        await self.leases.load()
        self.followed = Followed(self._database)
        self.chains = Chains(self._database, self.jobs, self.row_tokens)
        self.estimates = Estimates(self._database, self.jobs, self.datasets, self.row_tokens)
        self.fine_tuning = FineTuning(self._database, self.files, self.datasets, self.graders, self.models, self.jobs)
        self.model_cards = ModelCards(
            self._database,
            self._blobs,
            jobs=self.jobs,
            datasets=self.datasets,
            graders=self.graders,
            calibrations=self.calibrations,
            attacks=self.attacks,
            versions=self.versions,
            deployments=self.deployments,
            cards=self.cards,
        )

    async def _start(self) -> None:
        """What works beside the routes, once everything is there."""
        links = [link for each in self._processes.values() for link in each.values()]
        self._stack.enter_context(
            self.live.told_by(self._database, {"processes": [link.changed for link in links], "deployments": [self.cards.measured]})
        )
        for link in links:
            await self._stack.enter_async_context(link)
        await self._stack.enter_async_context(self.cards)
        askable = Askable(self._served, self.endpoints)
        await self._stack.enter_async_context(Evaluating(self._database, self.evaluations, self.datasets, self.graders, askable))
        await self._stack.enter_async_context(_housekeeping(self, self._activity))


def _why_no_rollouts(config: ApiConfig) -> str | None:
    """Whoever has no texts of traffic kept wants none of rollouts on the disk either."""
    if config.record != "full":
        return f"no rollouts are kept: the server was started with `--record {config.record}`, and rollouts are texts"
    return None if config.keep_rollouts else "no rollouts are kept: the server was started with `--keep-rollouts 0`"


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
    # What a backup brought back may be claimed by nobody, and engines sweep from here on.
    await _each(services.garbage.claim)
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
