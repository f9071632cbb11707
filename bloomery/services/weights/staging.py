"""Weights are in memory and proved where they are to be served before a name is moved to them: `Staging.stage`."""

import asyncio
import logging

from bloomery.services.engines.fleet import Fleet
from bloomery.services.engines.link import EngineLink, EngineLost
from bloomery.services.weights.versions import Version
from bloomery.types.errors import BloomeryError

log = logging.getLogger(__name__)


class Staging:
    """Asks the processes that answer in production."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def stage(self, name: str, version: Version) -> None:
        """Have every process that would answer for `name` load the version, prove it and ask it the probe, while it serves on.

        The error of the first that cannot, of its kind: nothing is to be moved then. Unavailable where one does not say so in time. Whoever is not
        there, or goes meanwhile, proves the version when it is asked for an answer.
        """
        group = self._fleet.group(version.base_hash, production=True)
        links = [] if group is None else [link for link in group.links if link.ready]
        found = await asyncio.gather(*(self._stage(link, name, version) for link in links), return_exceptions=True)
        for error in found:
            if error is not None:
                raise error

    async def _stage(self, link: EngineLink, name: str, version: Version) -> None:
        try:
            await link.stage(version.weights)
        except EngineLost as lost:
            log.info("`%s` is moved to version %s without %s", name, version.weights.version, lost.message)
        except BloomeryError as error:
            what = f"version `{version.weights.version}` cannot be served, and `{name}` stays as it is"
            raise type(error)(f"{what}: {error.message}", field="version") from error
