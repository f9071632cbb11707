"""Which process answers: an engine, or one of the replicas of its base model: of those that serve, or of those for rollouts, where there are any.

Those of a `Group` hold the same base and answer alike, so a stream whose process dies goes on at another one. Replicas are started when they are
wanted for the first time: something is deployed on their base, or the base itself is asked as a served model. The supervisor learns that from
`/healthz`, and whoever asks meanwhile waits. Replicas for rollouts always run, and answer for whatever nobody deployed, so that training need not
wait for sampling and neither gets in the way of what is served. When no replica has answered for a while the engine of their base stands in for them.
"""

import asyncio
import logging
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Final, NamedTuple

from bloomery.obs import background
from bloomery.services.engines.link import READY_S, EngineLink
from bloomery.types.errors import Unavailable
from bloomery.types.generation import Generate

log = logging.getLogger(__name__)

AFFINITY_TOKENS: Final = 64
"""Prompts that begin with the same tokens go to the same replica, other things being equal: it may have the keys of them."""
PATIENCE_S: Final = 10.0
"""How long replicas may be away, all of them, before the engine of their base stands in: longer than one takes to start again."""


class Chosen(NamedTuple):
    """Who answers, and the numerics it samples with, which need not be those that it would train with."""

    link: EngineLink
    numerics: str


class Group:
    """Processes of which any may answer a request, or go on with one that another began.

    `stand_in` does so too when nobody of them has answered for `patience_s`, and for what it began itself.
    """

    def __init__(self, what: str, links: Sequence[EngineLink], stand_in: EngineLink | None = None, patience_s: float = PATIENCE_S) -> None:
        self.links = links
        self._what, self._stand_in, self._patience_s = what, stand_in, patience_s
        self._asked_since_s: float | None = None
        self._told = False
        """Whether the log says that there is a stand-in at work."""

    @property
    def stood_in(self) -> bool:
        """Whether a request that came now would be the stand-in's."""
        return self._stand_in is not None and self._stand_in.ready and not any(link.ready for link in self.links) and self._patience_left_s() <= 0

    async def choose(self, request: Generate, numerics: str | None, *, timeout_s: float = READY_S, with_stand_in: bool = True) -> Chosen:
        """The least loaded that answers, of those whose signs of life come; as soon as there is one with these numerics, unless they are None."""
        if self._asked_since_s is None:
            self._asked_since_s = time.monotonic()
        others = [] if self._stand_in is None or not with_stand_in else [self._stand_in]
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    # Asked for once a turn: who is told to be patient and then waits without an end would not hear of the stand-in.
                    patience_s = self._patience_left_s()
                    if (chosen := self._choice(request, numerics, others, patient=patience_s > 0)) is not None:
                        return chosen
                    await self._another_ready([*self.links, *others], patience_s)
        except TimeoutError:
            problems = ", ".join(link.problem for link in self.links if not link.ready)
            raise Unavailable(f"waited {timeout_s:g} s for {self._what}: {problems}") from None

    def _choice(self, request: Generate, numerics: str | None, others: Sequence[EngineLink], *, patient: bool) -> Chosen | None:
        """Who takes a request now, `others` if nobody else can and nobody is `patient` any more; None while somebody may still come."""
        if alike := _alike(self.links, numerics):
            self._note(stood_in=False)
            return min(alike, key=lambda chosen: (chosen.link.late, chosen.link.load, _affinity(request, self.links.index(chosen.link))))
        # Where all of them answer, and none with these numerics, to wait for them would be in vain.
        in_vain = all(link.ready for link in self.links)
        if (in_vain or not patient) and (alike := _alike(others, numerics)):
            self._note(stood_in=not in_vain)
            return alike[0]
        if in_vain and all(link.ready for link in others):
            raise Unavailable(f"nobody among {self._what} has the numerics of the one that began this answer; send the request again")
        return None

    def _patience_left_s(self) -> float:
        """Until the stand-in is asked: it counts from when they were asked for first, or the last of them went."""
        now_s = time.monotonic()
        since_s = [self._asked_since_s, *(link.away_since_s for link in self.links)]
        return max(now_s if each is None else each for each in since_s) + self._patience_s - now_s

    async def _another_ready(self, links: Sequence[EngineLink], patience_s: float) -> None:
        """One more of them answers, or it is time for the stand-in."""
        log.info("a request waits for %s", self._what)
        waits = [asyncio.create_task(link.connected()) for link in links if not link.ready]
        try:
            await asyncio.wait(waits, timeout=patience_s if patience_s > 0 else None, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await background.stop(*waits)

    def _note(self, *, stood_in: bool) -> None:
        if stood_in and not self._told:
            problems = ", ".join(link.problem for link in self.links)
            log.warning("the engine takes the requests of %s, nobody of whom has answered for %g s: %s", self._what, self._patience_s, problems)
        elif self._told and not stood_in:
            log.info("%s answer again, and take their requests themselves", self._what)
        self._told = stood_in


class Fleet:
    """The engines and replicas of this server; `replicas`, which serve, and `rollouts` by base hash, those of a base by their names."""

    def __init__(
        self,
        engines: Mapping[str, EngineLink],
        replicas: Mapping[str, Mapping[str, EngineLink]],
        deployed: Set[str],
        patience_s: float = PATIENCE_S,
        rollouts: Mapping[str, Mapping[str, EngineLink]] | None = None,
    ) -> None:
        """`deployed`: bases that something is deployed on, kept up to date by who deploys."""
        self.replicas, self.rollouts = replicas, rollouts or {}
        self._deployed = deployed
        self._patience_s = patience_s
        self._asked: set[str] = set()
        self._engines = {base_hash: Group(f"the engine of base model {base_hash}", [link]) for base_hash, link in engines.items()}
        self._served = {
            base_hash: Group(f"the replicas of base model {base_hash}", [*links.values()], engines[base_hash], patience_s)
            for base_hash, links in replicas.items()
            if links
        }
        self._sampled = {
            base_hash: Group(f"the replicas for rollouts of base model {base_hash}", [*links.values()], engines[base_hash], patience_s)
            for base_hash, links in self.rollouts.items()
            if links
        }

    def beside(self, base_hash: str) -> dict[str, EngineLink]:
        """All replicas of a base, by their names."""
        return {**self.replicas.get(base_hash, {}), **self.rollouts.get(base_hash, {})}

    @property
    def wanted(self) -> set[str]:
        """Bases whose replicas are to run."""
        return (self._deployed | self._asked) & self._served.keys()

    @property
    def ready(self) -> list[str]:
        """Names of the replicas that answer."""
        return [name for name, link in self._all() if link.ready]

    @property
    def silent(self) -> list[str]:
        """Names of the replicas that are there, and have said nothing for longer than one takes to start again."""
        gone_s = time.monotonic() - self._patience_s
        return [name for name, link in self._all() if link.silent and link.away_since_s is not None and link.away_since_s < gone_s]

    @property
    def stood_in(self) -> set[str]:
        """Bases whose engine takes what their replicas should."""
        served = {base_hash for base_hash in self.wanted if self._served[base_hash].stood_in}
        return served | {base_hash for base_hash, group in self._sampled.items() if group.stood_in}

    def want(self, base_hash: str) -> None:
        """Have the replicas of this base run from now on."""
        self._asked.add(base_hash)

    def group(self, base_hash: str, *, production: bool) -> Group | None:
        """Who answers for this base; None where it is not served here."""
        return (self._served if production else self._sampled).get(base_hash) or self._engines.get(base_hash)

    def _all(self) -> Iterator[tuple[str, EngineLink]]:
        for each in (self.replicas, self.rollouts):
            for links in each.values():
                yield from links.items()


def _alike(links: Sequence[EngineLink], numerics: str | None) -> list[Chosen]:
    """Those who answer, with these numerics unless they are None."""
    ready = [Chosen(link, link.welcome.sampling_numerics) for link in links if link.welcome is not None]
    return [chosen for chosen in ready if numerics in (None, chosen.numerics)]


def _affinity(request: Generate, number: int) -> int:
    """Rendezvous: each prompt has an order of replicas, which the loss of one leaves as it is."""
    head = request.prompt.numpy()[:AFFINITY_TOKENS].tobytes()
    return zlib.crc32(head + number.to_bytes(2, "little"))
