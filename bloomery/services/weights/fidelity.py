"""Fidelity cards of published versions: measured where they are served, by and by, and kept beside their manifests.

`Cards` asks whoever serves a version for answers, and the engine of its base for what the trainer says of them. What is deployed comes first, and is
measured as soon as its processes have nothing else to do, or after a while although they have; other snapshots with a name wait until they have been
idle for longer, and the newest few without a name for longest; the rest is measured when somebody asks. A version whose card cannot be made is tried
twice: it may be what kills engines. Whoever deploys, publishes, or has nothing more to do says so: in between nothing is looked for.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from pydantic import ValidationError
from sqlalchemy import Connection, select

from bloomery.obs import background
from bloomery.services.access.principal import Principal
from bloomery.services.engines.fleet import Fleet
from bloomery.services.engines.link import EngineLink
from bloomery.services.engines.models import Models
from bloomery.services.kinds import READY, SNAPSHOT
from bloomery.services.listeners import Listeners
from bloomery.services.weights.deployments import Deployments, RevisionState
from bloomery.services.weights.versions import Versions
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs
from bloomery.store.database import Database
from bloomery.sync.publish import card_key
from bloomery.types.deployments import Deployment, ProvedOn
from bloomery.types.errors import BloomeryError, NotFound
from bloomery.types.fidelity import TEXT_TOKENS, Mode, Sampled, answers, prompts, request
from bloomery.types.fidelity_text import TEXT
from bloomery.types.generation import Generate, Weights
from bloomery.types.ids import new_id
from bloomery.types.kept import apart
from bloomery.types.protocol import Compare
from bloomery.types.resources import Fidelity

log = logging.getLogger(__name__)

PROMPT_LENGTHS: Final = (3, 15, 40, 490)
"""Tokens of a card's prompts, fewer than `bloomery fidelity` asks of a process that nobody else uses; the last answer goes beyond 512."""
TOKENS: Final = 32
"""In each of seven answers."""
TRIES: Final = 2
LOOK_S: Final = 3600.0
"""After so long it looks although nobody said that anything changed."""
_LISTED: Final = 256
"""So many snapshots with a name are looked at, the newest first."""
NAMELESS: Final = 8
"""So many without one, the newest too: a loop publishes one in every step, and nobody asks for those that later ones have superseded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """When versions are measured."""

    idle_s: float = 2.0
    """How long their processes had nothing to do before what is deployed is measured."""
    patience_s: float = 60.0
    """After which it is measured although they have."""
    long_idle_s: float = 10.0
    """The same for what has a name and is not deployed."""
    nameless_idle_s: float = 60.0
    """The same for what has none: longer than a loop waits for anything between two steps."""
    pause_s: float = 2.0
    """Between two that are measured, and before what failed is tried again."""
    look_s: float = 0.5
    """How long after something was deployed or published it looks what there is: then nobody waits for the processor any more who did that."""


class Candidate(NamedTuple):
    """A version to measure, and whether it is live in some deployment, or has a name at least."""

    weights: Weights
    base_hash: str
    deployed: bool
    named: bool = True


class _Choice(NamedTuple):
    """A version to measure now, or None and when there is time for one."""

    candidate: Candidate | None
    due_s: float


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
        self.measured = Listeners()
        """When there is a card that was not there before."""
        self._cards: dict[str, Fidelity | None] = {}
        """Of every version that was looked at; None where there is none yet."""
        self._tries: Counter[str] = Counter()
        self._wanted_since_s: dict[str, float] = {}
        self._idle_since_s: dict[str, float] = {}
        """By base, of those whose processes have nothing to do."""
        self._found: list[Candidate] = []
        """What there was when it was looked for last; `_outdated` once something was deployed or published since."""
        self._outdated, self._changed = True, asyncio.Event()
        self._sources = ExitStack()
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        for base_hash, engine in self._engines.items():
            for link in (engine, *self._fleet.beside(base_hash).values()):
                self._sources.enter_context(link.turned.calling(self._note_turn))
        for source in (self._deployments.moved, self._versions.published):
            self._sources.enter_context(source.calling(self._note_more))
        self._task = background.start(self._work(), "fidelity")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sources.close()
        await background.stop(self._task)

    async def on(self, deployment: Deployment) -> Deployment:
        """A deployment with the card of its live version, as far as there is one, and with whoever has proved that version."""
        version, base_hash = deployment.live.version, deployment.base_hash
        links = {"engine": self._engines[base_hash]} if base_hash in self._engines else {}
        roots = {name: link.proved_root(version) for name, link in {**links, **self._fleet.beside(base_hash)}.items()}
        proved = [ProvedOn(process=name, root=root) for name, root in roots.items() if root is not None]
        return deployment.model_copy(update={"fidelity": await self._stored(version), "proved": proved})

    async def get(self, p: Principal, name: str) -> Fidelity:
        """The card of a version, a `tinker://` path, or what a deployment serves now."""
        p.require("read", "train", "deploy")
        candidate = await self._find(p, name)
        found = await self._stored(candidate.weights.version)
        if found is None:
            raise NotFound(f"the fidelity of `{name}` was not measured yet: POST to the same path measures it now", field="version")
        return found

    async def measure(self, p: Principal, name: str) -> Fidelity:
        """The same, measured now."""
        p.require("train", "deploy")
        return await self._measure(await self._find(p, name))

    async def next(self) -> Candidate | None:
        """What is to be measured now; what is deployed comes first."""
        self._outdated = False
        self._found = await self._database.read(_candidates)
        return (await self._choice()).candidate

    async def _choice(self) -> "_Choice":
        """The same of what was found last, and when it is time for the next if nobody begins to work until then."""
        self._note_who_is_busy()
        due_s = math.inf
        for candidate in self._found:
            version, engine = candidate.weights.version, self._engines.get(candidate.base_hash)
            if engine is None or engine.welcome is None or self._tries[version] >= TRIES:
                continue
            card = await self._stored(version)
            if card is None or (candidate.deployed and card.numerics != engine.welcome.numerics):
                time_s = self._time_for(candidate)
                if time_s <= time.monotonic():
                    return _Choice(candidate, time_s)
                due_s = min(due_s, time_s)
        return _Choice(None, due_s)

    def _note_more(self) -> None:
        """Something was deployed or published."""
        self._outdated = True
        self._changed.set()

    def _note_turn(self) -> None:
        """A process came, went, began to work, or ended all it had."""
        self._note_who_is_busy()
        self._changed.set()

    def _note_who_is_busy(self) -> None:
        for base_hash, engine in self._engines.items():
            # Who is not there yet is starting, and not idle.
            if not engine.ready or any(link.works for link in (engine, *self._fleet.beside(base_hash).values())):
                self._idle_since_s.pop(base_hash, None)
            else:
                self._idle_since_s.setdefault(base_hash, time.monotonic())

    async def _find(self, p: Principal, name: str) -> Candidate:
        live = await self._deployments.live_version(p, name)
        found = live if live is not None else await self._versions.find(p, name)
        return Candidate(found.weights, found.base_hash, live is not None)

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
            if self._outdated:
                await asyncio.sleep(self._pace.look_s)
            self._changed.clear()
            wait_s = self._pace.pause_s
            try:
                choice = await self._choice()
                # What is chosen may have gone since it was found.
                if self._outdated or choice.candidate is not None:
                    if (candidate := await self.next()) is not None:
                        await self._try(candidate)
                    continue
                wait_s = choice.due_s - time.monotonic()
            except Exception:
                log.exception("fidelity is measured again in %g s", wait_s)
                self._outdated = True
            try:
                async with asyncio.timeout(min(max(wait_s, 0.0), LOOK_S)):
                    await self._changed.wait()
            except TimeoutError:
                self._outdated = True

    async def _try(self, candidate: Candidate) -> None:
        self._tries[candidate.weights.version] += 1
        try:
            await self._measure(candidate)
        except BloomeryError as error:
            log.warning("no fidelity card of version %s: %s", candidate.weights.version, error.message)
        await asyncio.sleep(self._pace.pause_s)

    def _time_for(self, candidate: Candidate) -> float:
        """By the clock, as far as nobody begins to work."""
        idle_since_s = self._idle_since_s.get(candidate.base_hash, math.inf)
        if not candidate.deployed:
            return idle_since_s + (self._pace.long_idle_s if candidate.named else self._pace.nameless_idle_s)
        since_s = self._wanted_since_s.setdefault(candidate.weights.version, time.monotonic())
        return min(idle_since_s + self._pace.idle_s, since_s + self._pace.patience_s)

    async def _measure(self, candidate: Candidate) -> Fidelity:
        async with self._one_at_a_time:
            version, engine = candidate.weights.version, self._engines.get(candidate.base_hash)
            group = self._fleet.group(candidate.base_hash, production=candidate.deployed)
            if engine is None or group is None:
                what = f"the base model {candidate.base_hash} of version {version} is not served"
                raise NotFound(f"{what}: start the server with `--model DIR` of that base", field="version")
            tokens = (await asyncio.to_thread(self._models.tokenizer(candidate.base_hash).encode, TEXT))[:TEXT_TOKENS]
            asked = prompts(tokens, self._models.size(candidate.base_hash).context, TOKENS, PROMPT_LENGTHS)
            requests = [request(prompt, candidate.weights, TOKENS, new_id("generate"), priority="evaluation") for prompt in asked]
            sampler, numerics = await group.choose(requests[0], None, with_stand_in=False)
            answered = await asyncio.gather(*(_answers(sampler, each) for each in requests))
            trainer = (await engine.wait_ready()).welcome
            # A card compares forwards: for their bits equal numerics of sampling are promise enough.
            exact = trainer.bit_exact and sampler.welcome is not None and sampler.welcome.bit_exact and numerics == trainer.sampling_numerics
            mode: Mode = "exact" if exact else "plain"
            sampled = tuple(each for some in answered for each in some)
            order = Compare(request_id=new_id("compare"), weights=candidate.weights, answers=sampled, mode=mode)
            card = await engine.compare(order)
            await self._blobs.put(card_key(version), card.model_dump_json().encode())
            self._cards[version] = card
            self.measured.tell()
            del self._tries[version]
            (log.info if card.verdict == "pass" else log.error)("fidelity of %s: %s", version, card.model_dump_json())
            return card


def _candidates(connection: Connection) -> list[Candidate]:
    """Every live version, and the newest snapshots: those that have a name, and behind them a few that have none."""
    revision = rows.revision.c
    deployed = rows.revision.join(rows.deployment, revision.deployment_id == rows.deployment.c.id)
    live = select(revision.version, revision.key, rows.deployment.c.base_hash).select_from(deployed).where(revision.state == RevisionState.LIVE)
    found = [Candidate(Weights(version=row.version, key=row.key), row.base_hash, deployed=True) for row in connection.execute(live.distinct())]
    return found + _snapshots(connection, _LISTED, named=True) + _snapshots(connection, NAMELESS, named=False)


def _snapshots(connection: Connection, limit: int, *, named: bool) -> list[Candidate]:
    checkpoint = rows.checkpoint.c
    # Filtered before it is cut: else enough snapshots without a name hide all that have one.
    wanted = checkpoint.kind == SNAPSHOT, checkpoint.state == READY, checkpoint.name.is_not(None) if named else checkpoint.name.is_(None)
    saved = select(rows.checkpoint).where(*wanted).order_by(checkpoint.id.desc()).limit(limit).subquery()
    query = select(saved.c.version, saved.c.key, rows.run.c.base_hash).join_from(saved, rows.run, saved.c.run_id == rows.run.c.id)
    found = connection.execute(query.order_by(saved.c.id.desc()))
    return [Candidate(Weights(version=row.version, key=row.key), row.base_hash, deployed=False, named=named) for row in found]


async def _answers(link: EngineLink, asked: Generate) -> list[Sampled]:
    async with aclosing(link.generate(asked)) as events:
        return answers(asked, [event async for told in events for event in apart(told)])
