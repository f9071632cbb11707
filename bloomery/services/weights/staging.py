"""Weights are in memory and proved where they are to be served before a name is moved to them: `Staging.stage`.

`Staging.stage_ahead` has it begun before anybody asks for the move, which then finds it done, or joins it.
"""

import asyncio
import logging

from bloomery.obs import background
from bloomery.services.engines.fleet import Fleet
from bloomery.services.engines.link import EngineLink, EngineLost
from bloomery.services.weights.versions import Version
from bloomery.types.errors import BloomeryError
from bloomery.types.generation import Weights

log = logging.getLogger(__name__)


class Staging:
    """Asks the processes that answer in production."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._ahead: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Nobody waits for what was to be ahead any more."""
        await background.stop(*self._ahead)

    async def stage(self, name: str, version: Version) -> None:
        """Have every process that would answer for `name` load the version, prove it and ask it the probe, while it serves on.

        The error of the first that cannot, of its kind: nothing is to be moved then. Unavailable where one does not say so in time. Whoever is not
        there, or goes meanwhile, proves the version when it is asked for an answer.
        """
        found = await asyncio.gather(*(self._stage(link, name, version) for link in self._links(version.base_hash)), return_exceptions=True)
        for error in found:
            if error is not None:
                raise error

    def stage_ahead(self, base_hash: str, weights: Weights) -> None:
        """Have the same begun for a name that may be moved to them; where it fails, whoever moves a name is told."""
        for link in self._links(base_hash):
            task = background.start(self._stage_ahead(link, weights), f"stage-ahead-{weights.version[:8]}")
            self._ahead.add(task)
            task.add_done_callback(self._ahead.discard)

    def _links(self, base_hash: str) -> list[EngineLink]:
        """Whoever is there of those who answer in production."""
        group = self._fleet.group(base_hash, production=True)
        return [] if group is None else [link for link in group.links if link.ready]

    async def _stage_ahead(self, link: EngineLink, weights: Weights) -> None:
        try:
            await link.stage(weights)
        except BloomeryError as error:
            log.info("version %s is not in memory ahead: %s", weights.version, error.message)

    async def _stage(self, link: EngineLink, name: str, version: Version) -> None:
        try:
            await link.stage(version.weights)
        except EngineLost as lost:
            log.info("`%s` is moved to version %s without %s", name, version.weights.version, lost.message)
        except BloomeryError as error:
            what = f"version `{version.weights.version}` cannot be served, and `{name}` stays as it is"
            raise type(error)(f"{what}: {error.message}", field="version") from error
