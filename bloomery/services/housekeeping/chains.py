"""Chains of runs (`sync.run_chain`): what rows hold of them is claimed, and a chain that nobody writes to and no row needs goes.

The engine sweeps the chains that it writes, and leaves what is claimed. So the oldest version that a row names, and that has no blob, is claimed
again and again. One that many newer ones have left behind, and that is held all the same, gets a blob, because a claim keeps all that came since.

Nobody sweeps a chain to which nothing is published. What rows hold of it gets blobs, where these take less room, and then it is removed.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from bloomery.store.blobs import Blobs
from bloomery.sync.chain import lease as leases
from bloomery.sync.chain import objects as named
from bloomery.sync.chain import readers
from bloomery.sync.chain.keys import Verifier
from bloomery.sync.chain.lease import Lease
from bloomery.sync.manifest import Manifest
from bloomery.sync.publish import manifest_key
from bloomery.sync.run_chain import FOLDER, RunChain, chain_folder
from bloomery.types.errors import BloomeryError, Corrupt, Gone, NotFound

log = logging.getLogger(__name__)

CLAIMED: Final = 100
"""Newest versions of a run that stay in its chain: as many as rows without a name are kept of one that trains."""


class _Held(NamedTuple):
    """What is to be known of a version's manifest."""

    run_id: str
    version: str
    state: str
    key: str
    size_bytes: int


class _Lying(NamedTuple):
    """A chain as it lies there."""

    bytes: int
    """Of its objects."""
    written_us: int


class RunChains:
    """Of one store; on whatever thread, one at a time."""

    def __init__(self, blobs: Blobs, *, trusted: Sequence[Verifier]) -> None:
        self._blobs, self._trusted = blobs, trusted
        self._manifests: dict[str, _Held | None] = {}
        """Of the versions that rows hold, as far as they are whole models; None of others."""
        self._chains: dict[str, RunChain] = {}
        self._lost: set[str] = set()
        """Versions that cannot be read: to claim them would keep all that came since, and help nobody."""

    def claim(self, versions: Collection[str], before_us: int) -> None:
        """Have these, which rows hold, stay in the chains that they came by; or as blobs, if they were published before that moment, by when rows
        that nobody uses are gone. A store that does not answer is an error, and all that was claimed stays so."""
        for run_id, held in self._held(versions).items():
            try:
                self._claim(self._chain(run_id), held, before_us)
            except (BloomeryError, OSError) as error:
                log.warning("run %s: what is held of its chain cannot be claimed: %s", run_id, error)

    def spare(self, versions: Collection[str], before_us: int) -> list[str]:
        """Runs to whose chains nothing was written since that moment. What these versions hold of one gets blobs, where they take less room."""
        held, found = self._held(versions), []
        for run_id, lies in self._lying(FOLDER).items():
            if lies.bytes and lies.written_us < before_us:
                found.append(run_id)
                try:
                    self._store_smaller(self._chain(run_id), held[run_id], lies.bytes)
                except (BloomeryError, OSError) as error:
                    log.warning("run %s: what is held of its chain gets no blobs: %s", run_id, error)
        return found

    def fence(self, run_id: str) -> Lease | None:
        """Nobody publishes to the chain of a run until `remove` was asked to remove it; None where that cannot be had."""
        try:
            return self._chain(run_id).fence()
        except (BloomeryError, OSError) as error:
            log.warning("run %s: its chain cannot be removed: %s", run_id, error)
            return None

    def remove(self, run_id: str, fence: Lease, versions: Collection[str], before_us: int) -> None:
        """Remove the chain of a run, unless these versions, which rows hold since it was fenced, are nowhere else, or something was written to it."""
        try:
            try:
                chain, lies = self._chain(run_id), self._lying(chain_folder(run_id))[run_id]
                if lies.written_us < before_us and not self._unstored(chain.sequences(), self._held(versions)[run_id]):
                    chain.remove(fence)
                    del self._chains[run_id]
            finally:
                fence.release()
        except (BloomeryError, OSError) as error:
            log.warning("run %s: its chain was not removed: %s", run_id, error)

    def _lying(self, folder: str) -> Mapping[str, _Lying]:
        """By runs, what there is in a folder; without what is written to a chain on behalf of rows."""
        found: dict[str, _Lying] = defaultdict(lambda: _Lying(0, 0))
        for blob in self._blobs.list(folder):
            _, run_id, *places = blob.key.split("/")
            if places[0] not in (leases.KEY, readers.FOLDER):
                before, size = found[run_id], blob.size if places[0] == named.FOLDER else 0
                found[run_id] = _Lying(before.bytes + size, max(before.written_us, blob.modified_us))
        return found

    def _store_smaller(self, chain: RunChain, held: Iterable[_Held], chain_bytes: int) -> None:
        unstored = self._unstored(chain.sequences(), held)
        if sum(each.size_bytes for each in unstored) < chain_bytes:
            for each in unstored:
                self._store(chain, each)

    def _claim(self, chain: RunChain, held: Iterable[_Held], before_us: int) -> None:
        numbers = chain.sequences()
        unstored = {numbers[each.state]: each for each in self._unstored(numbers, held) if each.version not in self._lost}
        # Before blobs are written, which may fail, or take longer than a sweep gives.
        chain.claim(min(unstored, default=None))
        left_behind = [number for number in sorted(unstored) if max(numbers.values()) - number >= CLAIMED]
        for number in left_behind:
            if chain.published_us(number) < before_us:
                self._store(chain, unstored[number])

    def _unstored(self, numbers: Mapping[str, int], held: Iterable[_Held]) -> list[_Held]:
        """Those that are nowhere but in the chain."""
        return [each for each in held if each.state in numbers and not self._blobs.exists(each.key)]

    def _store(self, chain: RunChain, held: _Held) -> None:
        try:
            manifest = Manifest.from_json(self._blobs.get(manifest_key(held.version)))
            self._blobs.put(held.key, chain.whole(manifest, self._blobs.directory))
        except (Corrupt, Gone, NotFound) as error:
            self._lost.add(held.version)
            log.error("run %s: version %s, which is held, cannot be read any more: %s", held.run_id, held.version, error)
        except (BloomeryError, OSError) as error:
            log.warning("run %s: version %s stays in its chain, and what came since: %s", held.run_id, held.version, error)

    def _held(self, versions: Collection[str]) -> defaultdict[str, list[_Held]]:
        """Those of whole models, by their runs."""
        self._manifests = {version: self._manifests[version] if version in self._manifests else self._manifest(version) for version in versions}
        found: defaultdict[str, list[_Held]] = defaultdict(list)
        for held in self._manifests.values():
            if held is not None:
                found[held.run_id].append(held)
        return found

    def _manifest(self, version: str) -> _Held | None:
        try:
            found = Manifest.from_json(self._blobs.get(manifest_key(version)))
        except NotFound:
            return None
        except Corrupt as error:
            log.error("the manifest of version %s is damaged, so its weights are claimed nowhere: %s", version, error.message)
            return None
        return _Held(found.run_id, version, found.state, found.key, found.size_bytes) if found.kind == "full" else None

    def _chain(self, run_id: str) -> RunChain:
        if run_id not in self._chains:
            self._chains[run_id] = RunChain.among(self._blobs.objects, run_id, trusted=self._trusted)
        return self._chains[run_id]
