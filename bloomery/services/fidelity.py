"""Fidelity cards of published versions: measured where they are served, by and by, and kept beside their manifests.

`Cards` asks whoever serves a version for answers, and the engine of its base for what the trainer says of them. What is deployed comes first, and is
measured as soon as its processes have nothing else to do, or after a while although they have; other snapshots with a name wait until they have been
idle for longer; what has no name is measured when somebody asks. A version whose card cannot be made is tried twice: it may be what kills engines.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np
from pydantic import ValidationError
from sqlalchemy import Connection, select

from bloomery.services.checkpoints import SNAPSHOT
from bloomery.services.deployments import Deployments, RevisionState
from bloomery.services.engines import EngineLink
from bloomery.services.fleet import Fleet
from bloomery.services.models import Models
from bloomery.services.principal import Principal
from bloomery.services.versions import Versions
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs
from bloomery.store.database import Database
from bloomery.sync.publish import card_key
from bloomery.types.arrays import Array
from bloomery.types.errors import BloomeryError, NotFound, WorkerError
from bloomery.types.fidelity import TEXT_TOKENS, Mode, Prompt, prompts, text
from bloomery.types.generation import Generate, GenerateFailed, SampledToken, SamplerEvent, SamplingParams, Weights
from bloomery.types.ids import new_id
from bloomery.types.protocol import Answer, Compare
from bloomery.types.resources import Deployment, Fidelity

log = logging.getLogger(__name__)

LENGTHS: Final = (3, 15, 40, 490)
"""Tokens of a card's prompts; the last answer goes beyond 512."""
TOKENS: Final = 32
"""In each of seven answers."""
TRIES: Final = 2
_LISTED: Final = 256
"""Of what runs saved, so much is looked at for snapshots with a name, the newest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """When versions are measured."""

    poll_s: float = 2.0
    idle_s: float = 2.0
    """How long their processes had nothing to do before what is deployed is measured."""
    patience_s: float = 60.0
    """After which it is measured although they have."""
    long_idle_s: float = 10.0
    """The same for what is not deployed."""


class Wanted(NamedTuple):
    """A version, and whether it is live in some deployment."""

    weights: Weights
    base_hash: str
    deployed: bool


class Cards:
    """Measures, keeps and shows cards; works while it is entered."""

    def __init__(
        self,
        *,
        database: Database,
        blobs: AsyncBlobs,
        models: Models,
        versions: Versions,
        deployments: Deployments,
        fleet: Fleet,
        engines: Mapping[str, EngineLink],
        pace: Pace = Pace(),
    ) -> None:
        self._database, self._blobs, self._models, self._versions, self._deployments = database, blobs, models, versions, deployments
        self._fleet, self._engines, self._pace = fleet, engines, pace
        self._cards: dict[str, Fidelity | None] = {}
        """Of every version that was looked at; None where there is none yet."""
        self._tries: Counter[str] = Counter()
        self._wanted_since_s: dict[str, float] = {}
        self._idle_since_s: dict[str, float] = {}
        """By base, of those whose processes have nothing to do."""
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._work(), name="fidelity")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})

    async def on(self, deployment: Deployment) -> Deployment:
        """A deployment with the card of its live version, as far as there is one."""
        return deployment.model_copy(update={"fidelity": await self._stored(deployment.live.version)})

    async def get(self, p: Principal, name: str) -> Fidelity:
        """The card of a version, a `tinker://` path, or what a deployment serves now."""
        p.require("read", "train", "deploy")
        wanted = await self._find(p, name)
        found = await self._stored(wanted.weights.version)
        if found is None:
            raise NotFound(f"the fidelity of `{name}` was not measured yet: POST to the same path measures it now", field="version")
        return found

    async def measure(self, p: Principal, name: str) -> Fidelity:
        """The same, measured now."""
        p.require("train", "deploy")
        return await self._measure(await self._find(p, name))

    async def next(self) -> Wanted | None:
        """What is to be measured now; what is deployed comes first."""
        found = await self._database.read(_wanted)
        self._note_who_is_busy()
        for wanted in found:
            version, engine = wanted.weights.version, self._engines.get(wanted.base_hash)
            if engine is None or engine.welcome is None or self._tries[version] >= TRIES:
                continue
            card = await self._stored(version)
            if (card is None or (wanted.deployed and card.numerics != engine.welcome.numerics)) and self._has_time_for(wanted):
                return wanted
        return None

    def _note_who_is_busy(self) -> None:
        for base_hash, engine in self._engines.items():
            if any(_works(link) for link in (engine, *self._fleet.replicas.get(base_hash, {}).values())):
                self._idle_since_s.pop(base_hash, None)
            else:
                self._idle_since_s.setdefault(base_hash, time.monotonic())

    async def _find(self, p: Principal, name: str) -> Wanted:
        live = await self._deployments.live_version(p, name)
        found = live if live is not None else await self._versions.find(p, name)
        return Wanted(found.weights, found.base_hash, live is not None)

    async def _stored(self, version: str) -> Fidelity | None:
        if version not in self._cards:
            try:
                self._cards[version] = Fidelity.model_validate_json(await self._blobs.get(card_key(version)))
            except (NotFound, ValidationError):
                # One of another form, which an earlier server wrote, is none: it is measured again.
                self._cards[version] = None
        return self._cards[version]

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(self._pace.poll_s)
            try:
                if (wanted := await self.next()) is not None:
                    await self._try(wanted)
            except Exception:
                log.exception("fidelity is measured again in %g s", self._pace.poll_s)

    async def _try(self, wanted: Wanted) -> None:
        self._tries[wanted.weights.version] += 1
        try:
            await self._measure(wanted)
        except BloomeryError as error:
            log.warning("no fidelity card of version %s: %s", wanted.weights.version, error.message)

    def _has_time_for(self, wanted: Wanted) -> bool:
        now_s = time.monotonic()
        idle_since_s = self._idle_since_s.get(wanted.base_hash, math.inf)
        if not wanted.deployed:
            return now_s - idle_since_s >= self._pace.long_idle_s
        since_s = self._wanted_since_s.setdefault(wanted.weights.version, now_s)
        return now_s - idle_since_s >= self._pace.idle_s or now_s - since_s >= self._pace.patience_s

    async def _measure(self, wanted: Wanted) -> Fidelity:
        async with self._one_at_a_time:
            version, engine = wanted.weights.version, self._engines.get(wanted.base_hash)
            group = self._fleet.group(wanted.base_hash, production=wanted.deployed)
            if engine is None or group is None:
                what = f"the base model {wanted.base_hash} of version {version} is not served"
                raise NotFound(f"{what}: start the server with `--model DIR` of that base", field="version")
            tokens = (await asyncio.to_thread(self._models.tokenizer(wanted.base_hash).encode, text()))[:TEXT_TOKENS]
            asked = prompts(tokens, self._models.size(wanted.base_hash).context, TOKENS, LENGTHS)
            requests = [_request(prompt, wanted.weights) for prompt in asked]
            sampler, numerics = await group.choose(requests[0], None)
            answers = await asyncio.gather(*(_answers(sampler, request) for request in requests))
            trainer = (await engine.wait_ready()).welcome
            # Equal bits are promised between processes with equal numerics alone.
            exact = trainer.bit_exact and sampler.welcome is not None and sampler.welcome.bit_exact and numerics == trainer.numerics
            mode: Mode = "exact" if exact else "plain"
            order = Compare(request_id=new_id("compare"), weights=wanted.weights, answers=tuple(each for some in answers for each in some), mode=mode)
            card = await engine.compare(order)
            await self._blobs.put(card_key(version), card.model_dump_json().encode())
            self._cards[version] = card
            del self._tries[version]
            (log.info if card.verdict == "pass" else log.error)("fidelity of %s: %s", version, card.model_dump_json())
            return card


def _wanted(connection: Connection) -> list[Wanted]:
    """Every live version, and the newest snapshots that have a name."""
    revision, checkpoint = rows.revision.c, rows.checkpoint.c
    deployed = rows.revision.join(rows.deployment, revision.deployment_id == rows.deployment.c.id)
    live = select(revision.version, revision.key, rows.deployment.c.base_hash).select_from(deployed).where(revision.state == RevisionState.LIVE)
    saved = select(rows.checkpoint).order_by(checkpoint.id.desc()).limit(_LISTED).subquery()
    named = select(saved.c.version, saved.c.key, rows.run.c.base_hash).join_from(saved, rows.run, saved.c.run_id == rows.run.c.id)
    named = named.where(saved.c.kind == SNAPSHOT, saved.c.state == "ready", saved.c.name.is_not(None)).order_by(saved.c.id.desc())
    found = [Wanted(Weights(version=row.version, key=row.key), row.base_hash, deployed=True) for row in connection.execute(live.distinct())]
    return found + [Wanted(Weights(version=row.version, key=row.key), row.base_hash, deployed=False) for row in connection.execute(named)]


def _works(link: EngineLink) -> bool:
    status = link.status
    return link.load > 0 or (status is not None and status.running_sequences + status.waiting_sequences + status.queued_operations > 0)


def _request(prompt: Prompt, weights: Weights) -> Generate:
    """Behind everything else that the process has to do."""
    return Generate(
        request_id=new_id("generate"),
        weights=weights,
        prompt=Array.of(np.asarray(prompt.tokens, np.int32)),
        params=SamplingParams(max_tokens=TOKENS, seed=prompt.seed),
        num_samples=prompt.num_samples,
        priority="evaluation",
    )


async def _answers(link: EngineLink, request: Generate) -> list[Answer]:
    tokens: list[list[SampledToken]] = [[] for _ in range(request.num_samples)]
    events: AsyncGenerator[SamplerEvent, None] = link.generate(request)
    async with aclosing(events):
        async for event in events:
            match event:
                case GenerateFailed(message=message):
                    raise WorkerError(f"the sampler of version {request.weights} could not answer: {message}")
                case SampledToken():
                    tokens[event.sample].append(event)
    return [_answer(request, sampled) for sampled in tokens]


def _answer(request: Generate, sampled: list[SampledToken]) -> Answer:
    continued = np.array([event.token for event in sampled], np.int32)
    logprobs = np.array([event.logprob for event in sampled], np.float32)
    return Answer(tokens=Array.of(np.concatenate([request.prompt.numpy(), continued])), logprobs=Array.of(logprobs))
