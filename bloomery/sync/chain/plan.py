"""What a chain is to a reader: its manifests, each held against the one before it, and the shortest way to one of its versions.

Nothing here decodes anything, and nothing is decoded before this was asked.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from bloomery.sync.chain import manifest as manifests
from bloomery.sync.chain.keys import Verifier, check_signed
from bloomery.sync.chain.manifest import Manifest, Step
from bloomery.sync.codec.ordered import in_order
from bloomery.types.errors import Conflict, Corrupt, Gone, NotFound
from bloomery.types.objects import Objects

AT_ONCE: Final = 16
"""Small objects that are read side by side: manifests, and what readers say."""


class Known(NamedTuple):
    """The newest version that a reader has taken, which nothing that it takes later may contradict."""

    run: str
    epoch: int
    sequence: int
    hash: str


class Link(NamedTuple):
    """A manifest and its hash."""

    manifest: Manifest
    hash: str


class Move(NamedTuple):
    """A step of a way: an object that leads from version `start`, or from anything, to version `stop`."""

    start: int | None
    stop: int
    step: Step


Versions = Mapping[int, Link]
"""Neighbouring versions by their numbers, up to the newest."""


def read_versions(objects: Objects, run: str, trusted: Sequence[Verifier], *, known: Known | None = None, read: Versions | None = None) -> Versions:
    """All versions that the store has, checked; those in `read` are not read again.

    One that is removed meanwhile is left out, and so is what came before it. Forbidden for a signature that is not asked for, Corrupt for a chain
    that contradicts itself or what is known, Gone for a version that is missing between two that are there, NotFound for a store without a chain.
    """
    read = read or {}
    found = [number for stored in objects.list(manifests.FOLDER) if (number := manifests.sequence_of(stored.key)) is not None]
    if not found:
        raise NotFound(f"{objects.name} holds no version of run `{run}` yet")
    numbers = _neighbouring(objects, found, known)
    fresh = dict(_read_all(objects, [number for number in numbers if number not in read], run, trusted))
    versions: dict[int, Link] = {}
    for number in numbers:
        link = read[number] if number in read else fresh[number]
        if link is None:
            versions.clear()
            continue
        if number - 1 in versions:
            check_successor(versions[number - 1], link.manifest, objects.name)
        versions[number] = link
    if not versions:
        raise NotFound(f"{objects.name}: all versions of run `{run}` were removed while they were read")
    if known is not None:
        _check_known(versions, known, objects.name)
    return versions


def check_successor(before: Link, manifest: Manifest, store: str) -> None:
    """Refuse a manifest that does not follow the one before it."""
    where, old = f"{store}: `{manifest.key}`", before.manifest
    if manifest.parent != before.hash:
        raise Corrupt(f"{where} follows another version {old.sequence} than the one that is there: it is of another chain, or was replaced")
    if manifest.epoch < old.epoch:
        raise Corrupt(f"{where} has epoch {manifest.epoch}, and the version before it {old.epoch}: its writer had lost the lease")
    if manifest.old_root not in (None, old.new_root):
        raise Corrupt(f"{where} starts from state {manifest.old_root}, and the version before it has {old.new_root}")
    if manifest.layout != old.layout and manifest.old_root is not None:
        raise Corrupt(f"{where} is a delta between two layouts")
    if manifest.base not in (old.base, manifest.sequence):
        raise Corrupt(f"{where} says that its newest base is that of version {manifest.base}, and the version before it says {old.base}")


def shortest(versions: Versions, to: int, *, have: int | None, only_deltas: bool = False) -> list[Move]:
    """The way to a version, from version `have` or from a base, on which the fewest bytes are fetched; none where `have` is `to`.

    `only_deltas` leaves bases out. Gone where there is none.
    """
    cost: dict[int, int] = {} if have is None else {have: 0}
    last: dict[int, Move] = {}
    for number in sorted(number for number in versions if number <= to):
        for step in versions[number].manifest.steps:
            if (only_deltas and step.kind == "base") or number == have:
                continue
            before = 0 if step.start is None else cost.get(step.start)
            if before is not None and before + step.object.size < cost.get(number, before + step.object.size + 1):
                cost[number], last[number] = before + step.object.size, Move(step.start, number, step)
    if to not in cost:
        raise Gone(
            f"no way leads to version {to}{'' if have is None else f' from version {have}'}: there is no base on it, or what lies between is gone"
        )
    return _walked_back(last, to, have)


def _walked_back(last: Mapping[int, Move], to: int, have: int | None) -> list[Move]:
    way: list[Move] = []
    at: int | None = to
    while at is not None and at != have:
        way.append(last[at])
        at = last[at].start
    return way[::-1]


def _read_all(objects: Objects, numbers: Sequence[int], run: str, trusted: Sequence[Verifier]) -> Iterator[tuple[int, Link | None]]:
    """Several at a time, each by the deadline of the store; of those that are refused the first is told."""
    return in_order(lambda number: _read(objects, number, run, trusted), numbers, max(1, min(AT_ONCE, len(numbers))))


def _read(objects: Objects, number: int, run: str, trusted: Sequence[Verifier]) -> Link | None:
    """None where it is not there any more."""
    key = manifests.key(number)
    where = f"{objects.name}: `{key}`"
    try:
        data, _ = objects.get(key, at_most=manifests.MAX_BYTES)
    except NotFound:
        return None
    found = Manifest.from_json(data, where)
    check_signed(found.to_sign, found.signed_by, found.signature, trusted, where)
    if found.sequence != number:
        raise Corrupt(f"{where} is version {found.sequence}: it was put where another one belongs")
    if found.run != run:
        raise Conflict(f"{where} is of run `{found.run}`, not of `{run}`")
    return Link(found, found.hash)


def _neighbouring(objects: Objects, found: Iterable[int], known: Known | None) -> range:
    """From the newest version back to the first one that is missing; what lies before that is left over, unless the known version does."""
    there = set(found)
    newest = oldest = max(there)
    while oldest - 1 in there:
        oldest -= 1
    if known is not None and known.sequence in there and known.sequence < oldest:
        raise Gone(f"{objects.name}: `{manifests.key(oldest - 1)}` is missing, and there are versions before and behind it")
    return range(oldest, newest + 1)


def _check_known(versions: Versions, known: Known, store: str) -> None:
    newest, oldest = max(versions), versions[min(versions)].manifest
    if newest < known.sequence:
        raise Corrupt(f"{store} ends with version {newest}, and version {known.sequence} was taken before: an old copy of the chain was put back")
    if known.sequence in versions and versions[known.sequence].hash != known.hash:
        raise Corrupt(f"{store}: `{manifests.key(known.sequence)}` is another one than was taken before: it was replaced")
    if known.sequence not in versions and oldest.epoch < known.epoch:
        raise Corrupt(f"{store}: `{oldest.key}` has epoch {oldest.epoch}, and epoch {known.epoch} was seen before: its writer had lost the lease")
    if versions[newest].manifest.run != known.run:
        raise Conflict(f"{store} holds run `{versions[newest].manifest.run}`, and `{known.run}` was taken before")
