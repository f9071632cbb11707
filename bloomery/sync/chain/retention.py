"""What nobody can need any more, removed: mark what manifests name, sweep what none names, and never in a hurry.

Kept are the versions from the older one of the newest two bases on, and from the base behind whatever version a reader says that it holds; all of
them while it cannot be read what one says, which no reader repeats and which is so forgotten after a day. Manifests before that go first, the oldest
first, so that what is left is one chain at any moment; then objects that no manifest names which is there. Between being found and being removed lies
a tombstone of a day, and an object that was put again meanwhile is young and stays. So whatever a manifest names is there, wherever a sweep is
killed, and the next one goes on.

Only who has the lease sweeps, and takes turns with his own commits, so nobody commits while a key is looked at and removed. Times are the store's
own, which a sweep asks for by storing something.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bloomery.obs.failpoints import failpoint
from bloomery.sync.chain import manifest as manifests
from bloomery.sync.chain import objects as named
from bloomery.sync.chain.keys import Verifier
from bloomery.sync.chain.lease import Lease
from bloomery.sync.chain.plan import Versions, read_versions
from bloomery.sync.chain.readers import FOLDER as READERS
from bloomery.sync.chain.readers import Claims, held_by_others
from bloomery.types.errors import NotFound, Unavailable
from bloomery.types.objects import Objects, Stored

log = logging.getLogger(__name__)

FOLDER: Final = "gc"
_TOMBSTONES: Final = f"{FOLDER}/tombstones"
_CLOCK: Final = f"{FOLDER}/clock"
_RENEWED_EVERY: Final = 100
"""Removals between two looks at the lease."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetainConfig:
    """How long what is kept."""

    bases: int = 2
    grace_s: float = 24 * 3600.0
    """From the tombstone to the removal."""
    reader_s: float = 24 * 3600.0
    """A reader that told nothing for so long has left; infinite where readers say so when they leave."""


class Swept(NamedTuple):
    """Keys that got a tombstone, that lost theirs because they are needed again, and that were removed."""

    buried: list[str]
    kept: list[str]
    removed: list[str]


def sweep(objects: Objects, lease: Lease, *, trusted: Sequence[Verifier], config: RetainConfig | None = None) -> Swept:
    """One round. Conflict if the lease was lost; nothing is removed for a chain that cannot be read."""
    lease.renew()
    # Listings and manifests of a large store take longer than a term.
    with lease.kept():
        return _swept(objects, lease, trusted, config or RetainConfig())


def _swept(objects: Objects, lease: Lease, trusted: Sequence[Verifier], config: RetainConfig) -> Swept:
    now_us = touch(objects)
    doomed = {stored.key: stored for stored in _unneeded(objects, lease.run, trusted, config, now_us)}
    tombs = {_buried_key(stored.key): stored for stored in objects.list(_TOMBSTONES)}
    kept = [key for key in tombs if key not in doomed]
    for key in kept:
        objects.delete(_tombstone(key))
        failpoint("chain.sweep.kept")
    removed = []
    due = [key for key in _oldest_first(doomed) if key in tombs and tombs[key].modified_us <= now_us - int(config.grace_s * 1e6)]
    for place, key in enumerate(due):
        if place % _RENEWED_EVERY == 0:
            lease.renew()
        with lease.turn():
            # Its age of now: it may have been put again since it was listed.
            if (found := objects.head(key)) is not None and found.modified_us <= tombs[key].modified_us:
                objects.delete(key)
                failpoint("chain.sweep.removed")
                removed.append(key)
        objects.delete(_tombstone(key))
    buried = [key for key in _oldest_first(doomed) if key not in tombs]
    for key in buried:
        objects.create(_tombstone(key), key.encode())
        failpoint("chain.sweep.buried")
    for stored in objects.list(READERS):
        if stored.modified_us < now_us - config.reader_s * 1e6:
            objects.delete(stored.key)
    objects.tidy(now_us - int(config.grace_s * 1e6))
    return Swept(buried, kept, removed)


def _unneeded(objects: Objects, run: str, trusted: Sequence[Verifier], config: RetainConfig, now_us: int) -> Iterable[Stored]:
    try:
        versions = read_versions(objects, run, trusted)
    except NotFound:
        versions = {}
    held = held_by_others(objects, now_us - config.reader_s * 1e6)
    for key in held.unreadable:
        log.warning("%s: `%s` is not what a reader holds: all versions stay until it is removed, or was there for long", objects.name, key)
    first = _first_needed(versions, config.bases, held)
    old = [stored for stored in objects.list(manifests.FOLDER) if (number := manifests.sequence_of(stored.key)) is None or number < first]
    # Of all versions that are there, needed or not: none of them ever names what is not there.
    marked = {ref.key for ref in _named(versions)}
    stray = [stored for stored in objects.list(named.FOLDER) if stored.key not in marked]
    return [*old, *stray]


def _oldest_kept(versions: Versions, bases: int) -> int:
    """The oldest of so many newest bases, from which on all versions are kept; 0 where there is no base."""
    based = sorted((number for number, link in versions.items() if link.manifest.base == number), reverse=True)[:bases]
    return based[-1] if based else 0


def is_buried(objects: Objects, key: str) -> bool:
    """Whether a key has a tombstone: one that has none stays for a grace at least."""
    return objects.head(_tombstone(key)) is not None


def touch(objects: Objects) -> int:
    """Have it be seen that somebody uses a chain; when that was, by the store's clock."""
    objects.put(_CLOCK, b"now")
    if (found := objects.head(_CLOCK)) is None:
        raise Unavailable(f"{objects.name}: `{_CLOCK}` was put, and is not there: nothing was removed")
    return found.modified_us


def _first_needed(versions: Versions, bases: int, held: Claims) -> int:
    kept = _oldest_kept(versions, bases)
    if kept and held.unreadable:
        # To keep all for a day costs room; to guess could cost a reader its way.
        return min(versions)
    # A reader behind the chain's end, or before its beginning, needs nothing that could be kept.
    behind = (versions[number].manifest.base for number in held.versions if number in versions)
    return min((kept, *behind))


def _named(versions: Versions) -> Iterable[named.Ref]:
    for link in versions.values():
        for step in link.manifest.steps:
            yield step.object
            if step.parts is not None:
                yield step.parts


def _oldest_first(keys: Iterable[str]) -> list[str]:
    """Manifests in the order of their numbers, then objects."""
    return sorted(keys, key=lambda key: (not key.startswith(f"{manifests.FOLDER}/"), key))


def _tombstone(key: str) -> str:
    return f"{_TOMBSTONES}/{key}"


def _buried_key(tombstone: str) -> str:
    return tombstone.removeprefix(f"{_TOMBSTONES}/")
