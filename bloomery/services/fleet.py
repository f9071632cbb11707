"""Which process answers: an engine, or for what is served one of the replicas of its base model, where there are any.

Those of a `Group` hold the same base and answer alike, so a stream whose process dies goes on at another one. Replicas are started when they are
wanted for the first time: something is deployed on their base, or the base itself is asked as a served model. The supervisor learns that from
`/healthz`, and whoever asks meanwhile waits.
"""

import asyncio
import logging
import zlib
from collections.abc import Mapping, Sequence, Set
from typing import Final, NamedTuple

from sqlalchemy import Connection, select

from bloomery.services.engines import READY_S, EngineLink
from bloomery.store import rows
from bloomery.types.errors import Unavailable
from bloomery.types.generation import Generate

log = logging.getLogger(__name__)

AFFINITY_TOKENS: Final = 64
"""Prompts that begin with the same tokens go to the same replica, other things being equal: it may have the keys of them."""


class Chosen(NamedTuple):
    """Who answers, and the numerics it computes with."""

    link: EngineLink
    numerics: str


class Group:
    """Processes of which any may answer a request, or go on with one that another began."""

    def __init__(self, what: str, links: Sequence[EngineLink]) -> None:
        self.links = links
        self._what = what

    async def choose(self, request: Generate, numerics: str | None, *, timeout_s: float = READY_S) -> Chosen:
        """The least loaded that answers, as soon as there is one; of those with these numerics, unless they are None."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    ready = [Chosen(link, link.welcome.numerics) for link in self.links if link.welcome is not None]
                    alike = [chosen for chosen in ready if numerics in (None, chosen.numerics)]
                    if alike:
                        return min(alike, key=lambda chosen: (chosen.link.load, _affinity(request, self.links.index(chosen.link))))
                    if len(ready) == len(self.links):
                        raise Unavailable(f"nobody among {self._what} has the numerics of the one that began this answer; send the request again")
                    await self._another_ready()
        except TimeoutError:
            problems = ", ".join(link.problem for link in self.links if not link.ready)
            raise Unavailable(f"waited {timeout_s:g} s for {self._what}: {problems}") from None

    async def _another_ready(self) -> None:
        log.info("a request waits for %s", self._what)
        waits = [asyncio.create_task(link.connected()) for link in self.links if not link.ready]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


class Fleet:
    """The engines and replicas of this server; `replicas` by base hash, those of a base by their names."""

    def __init__(self, engines: Mapping[str, EngineLink], replicas: Mapping[str, Mapping[str, EngineLink]], deployed: Set[str]) -> None:
        """`deployed`: bases that something is deployed on, kept up to date by who deploys."""
        self.replicas = replicas
        self._deployed = deployed
        self._asked: set[str] = set()
        self._engines = {base_hash: Group(f"the engine of base model {base_hash}", [link]) for base_hash, link in engines.items()}
        self._served = {
            base_hash: Group(f"the replicas of base model {base_hash}", [*links.values()]) for base_hash, links in replicas.items() if links
        }

    @property
    def wanted(self) -> set[str]:
        """Bases whose replicas are to run."""
        return (self._deployed | self._asked) & self._served.keys()

    @property
    def ready(self) -> list[str]:
        """Names of the replicas that answer."""
        return [name for links in self.replicas.values() for name, link in links.items() if link.ready]

    def group(self, base_hash: str, *, production: bool) -> Group | None:
        """Who answers for this base; None where it is not served here."""
        if not production or base_hash not in self._served:
            return self._engines.get(base_hash)
        self._asked.add(base_hash)
        return self._served[base_hash]


def deployed_bases(connection: Connection) -> set[str]:
    """Bases that something is deployed on."""
    return set(connection.scalars(select(rows.deployment.c.base_hash).distinct()))


def _affinity(request: Generate, number: int) -> int:
    """Rendezvous: each prompt has an order of replicas, which the loss of one leaves as it is."""
    head = request.prompt.numpy()[:AFFINITY_TOKENS].tobytes()
    return zlib.crc32(head + number.to_bytes(2, "little"))
