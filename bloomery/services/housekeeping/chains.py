"""Chains of runs (`sync.run_chain`): what rows hold of them is claimed, and a chain of which no row holds anything goes.

The engine sweeps the chains that it writes, and leaves what is claimed. So every version that a row names is claimed again and again; one that many
newer ones have left behind gets a blob instead, because a claim keeps all that came since.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Final

from bloomery.store.blobs import Blobs
from bloomery.sync.manifest import Manifest
from bloomery.sync.publish import manifest_key
from bloomery.sync.run_chain import FOLDER, RunChain, chain_folder
from bloomery.types.errors import BloomeryError, NotFound

log = logging.getLogger(__name__)

CLAIMED: Final = 100
"""Newest versions of a run that stay in its chain: as many as rows without a name are kept of one that trains."""


class RunChains:
    """Of one store; on whatever thread, one at a time."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._manifests: dict[str, Manifest | None] = {}
        """Of the versions that rows hold, as far as they are whole models; None of others."""
        self._chains: dict[str, RunChain] = {}

    def claim(self, versions: Collection[str]) -> None:
        """Have these, which rows hold, stay in the chains that they came by, or as blobs."""
        for run_id, held in self._held(versions).items():
            try:
                self._claim(self._chain(run_id), held)
            except BloomeryError as error:
                log.warning("run %s: what is held of its chain cannot be claimed: %s", run_id, error.message)

    def remove(self, versions: Collection[str], before_us: int) -> None:
        """Remove the chains of which these, which rows hold, are none, and to which nothing was written since."""
        held, newest_us = self._held(versions), dict[str, int]()
        for blob in self._blobs.list(FOLDER):
            run_id = blob.key.split("/")[1]
            newest_us[run_id] = max(newest_us.get(run_id, 0), blob.modified_us)
        for run_id, written_us in newest_us.items():
            if run_id not in held and written_us < before_us:
                self._chain(run_id).remove()
                del self._chains[run_id]

    def _claim(self, chain: RunChain, held: Mapping[str, Manifest]) -> None:
        numbers = chain.sequences()
        newest, claimed = max(numbers.values(), default=0), []
        for manifest in held.values():
            if (number := numbers.get(manifest.state)) is None or self._blobs.exists(manifest.key):
                continue
            if newest - number < CLAIMED:
                claimed.append(number)
            else:
                self._blobs.put(manifest.key, chain.whole(manifest))
        if claimed:
            chain.claim(min(claimed))

    def _held(self, versions: Collection[str]) -> Mapping[str, Mapping[str, Manifest]]:
        """Those of whole models, by their runs."""
        self._manifests = {version: self._manifests[version] if version in self._manifests else self._manifest(version) for version in versions}
        found: dict[str, dict[str, Manifest]] = defaultdict(dict)
        for version, manifest in self._manifests.items():
            if manifest is not None:
                found[manifest.run_id][version] = manifest
        return found

    def _manifest(self, version: str) -> Manifest | None:
        try:
            found = Manifest.from_json(self._blobs.get(manifest_key(version)))
        except NotFound:
            return None
        except BloomeryError as error:
            log.warning("the manifest of version %s cannot be read, so its weights are claimed nowhere: %s", version, error.message)
            return None
        return found if found.kind == "full" else None

    def _chain(self, run_id: str) -> RunChain:
        if run_id not in self._chains:
            self._chains[run_id] = RunChain(self._blobs.objects(chain_folder(run_id)), run_id)
        return self._chains[run_id]
