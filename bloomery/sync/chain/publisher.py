"""The writer of a chain: a step of the weights becomes a delta, and that a version.

    with Publisher.open(objects, "run-7", holder="trainer-0") as publisher:
        publisher.publish(None, weights)      # the first version is a base
        publisher.publish(before, weights)    # from then on what changed

Objects first, each seen to be there, then the manifest under the next number, which nobody else may have created: that is the commit, and whatever
dies before it has published nothing. A step that was committed, and whose answer was lost, is found as the newest version when it is published again.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
import numpy as np

from bloomery.disk.mapped import mapped_file, nameless_file
from bloomery.obs.failpoints import failpoint
from bloomery.sync.chain import lease as leases
from bloomery.sync.chain import parts, plan
from bloomery.sync.chain.keys import Signer, Verifier
from bloomery.sync.chain.lease import Lease
from bloomery.sync.chain.manifest import LEVELS, MAX_BYTES, Manifest, Step
from bloomery.sync.chain.objects import keep
from bloomery.sync.chain.plan import Link
from bloomery.sync.chain.published import AsPublished, ChunkHashes, NotAsPublished, Summed
from bloomery.sync.chain.spans import Following, Piece, Reverted, Spans
from bloomery.sync.codec.container import Head
from bloomery.sync.codec.delta import Choice, Delta, write
from bloomery.sync.codec.layout import Weights
from bloomery.sync.codec.states import States
from bloomery.types.errors import BloomeryError, Conflict, NotFound
from bloomery.types.objects import Objects


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishConfig:
    """When there is a base beside a delta, and how deltas are encoded."""

    codec: Choice = "auto"
    """Of deltas."""
    base_codec: Choice = "auto"
    """Of bases: byte planes, or `raw` where the store is as near as a disk."""
    base_every: int = 200
    """Versions from one base to the next."""
    base_after_s: float = 1800.0
    """Seconds after which the next version has a base, however few versions there were."""
    base_share: float = 0.5
    """A base is due when what a reader fetches behind the last one is this much of it."""
    span_share: float = 0.5
    """Of the weights' bytes, what may be kept in memory for merged deltas (`spans`)."""
    workers: int = 1
    """Threads that encode."""
    parts: bool = True
    """Whether the parts of a base are listed beside it, for readers who fetch one of them alone."""
    merged: bool = True
    """Whether there are deltas over 4, 16 and 64 steps for those who come late."""
    scratch: Path | None = None
    """Where objects lie until they are stored; the system's place for temporary files without."""
    term_s: float = leases.TERM_S
    """Of the lease."""
    patience_s: float | None = None
    """How long another writer's lease is waited for; three terms without."""


class Published(NamedTuple):
    """A version that is committed."""

    sequence: int
    hash: str
    manifest: Manifest
    put_bytes: int
    """Of the objects that were stored for it; none where it was there already."""
    base: Delta | None = None
    """The object that it is alone, where it was given without an old version, as it lies in a file without a name: the weights can be read of it."""


class Publisher:
    """The one writer of a run's chain. `open` makes it."""

    def __init__(self, objects: Objects, lease: Lease, config: PublishConfig, signer: Signer | None, clock: Callable[[], float]) -> None:
        self.lease = lease
        self._objects, self._config, self._signer, self._clock = objects, config, signer, clock
        self._versions: dict[int, Link] = {}
        self._spans = Spans(share=config.span_share, workers=config.workers)
        self._known: ChunkHashes | None = None
        """What the newest version's weights were; None where this writer has not seen them."""
        self._based_at = clock()
        self._base_wanted = False

    @classmethod
    def open(
        cls,
        objects: Objects,
        run: str,
        *,
        holder: str,
        config: PublishConfig | None = None,
        signer: Signer | None = None,
        trusted: Sequence[Verifier] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Take the lease, and read what there is; `trusted` must have signed it, where keys are named.

        `holder` names the one who writes: a former life of his gives way at once, so no two that live have one name.
        """
        config = config or PublishConfig()
        before = _read(objects, run, trusted)
        lease = leases.take(objects, run, holder, above=_epoch(before), term_s=config.term_s, patience_s=config.patience_s, clock=clock)
        found = cls(objects, lease, config, signer, clock)
        # Looked at again: until the lease was taken another one may have written.
        found._versions = dict(_read(objects, run, trusted, before))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.lease.release()
        except BloomeryError:
            # The next one waits for a term then, and why the block ended is more than that.
            if error is None:
                raise

    @property
    def newest(self) -> Link | None:
        """The version that the next one follows."""
        return self._versions[max(self._versions)] if self._versions else None

    def want_base(self) -> None:
        """Have the next version bring a base: for readers who cannot repair what they have."""
        self._base_wanted = True

    def publish(self, old: Weights | None, new: Weights) -> Published:
        """Commit `new` as the next version. Conflict if another writer took over.

        Where `old` is not what the newest version is (None says that nobody knows), or has another layout, the chain starts anew from a base. Weights
        that were given as `new` and are given as `old` next may have changed meanwhile: what did is seen, and is no part of the version before.
        """
        self.lease.renew()
        # To encode and store large weights takes longer than a term.
        with self.lease.turn(), self.lease.kept():
            return self._published(old, new)

    def _published(self, old: Weights | None, new: Weights) -> Published:
        newest = self.newest
        if newest is not None and old is not None and old.layout.hash == new.layout.hash:
            made = self._step(newest, old, new)
            if _is_step(newest.manifest, made.head):
                return self._there_already(newest, made)
            if str(made.head.old_root) == newest.manifest.new_root:
                return self._follow(newest, old, new, made)
        return self._start_anew(new)

    def _follow(self, newest: Link, old: Weights, new: Weights, made: "_Made") -> Published:
        sequence = newest.manifest.sequence + 1
        steps = [Step(kind="delta", start=sequence - 1, object=keep(self._objects, made.data))]
        failpoint("chain.publish.delta")
        following = None
        if self._config.merged:
            changed = np.flatnonzero(made.head.records.array["changed"]).tolist()
            following = self._spans.following(old, new, changed, sequence)
            steps += self._merged(following.ended, new, made.known.states, newest.manifest.sequence, steps[0].object.size)
        failpoint("chain.publish.merged")
        based = self._base_wanted or self._base_due(newest.manifest, steps[0].object.size)
        if based:
            steps.append(self._base(self._encoded(None, new)))
        failpoint("chain.publish.base")
        manifest = Manifest(
            run=self.lease.run,
            epoch=self.lease.epoch,
            sequence=sequence,
            parent=newest.hash,
            base=sequence if based else newest.manifest.base,
            old_root=str(made.head.old_root),
            new_root=str(made.head.new_root),
            layout=new.layout.hash,
            steps=tuple(steps),
        )
        return self._commit(manifest, made.known, following)

    def _start_anew(self, new: Weights) -> Published:
        newest = self.newest
        made = self._encoded(None, new)
        root, layout = str(made.head.new_root), new.layout.hash
        if newest is not None and newest.manifest.new_root == root and newest.manifest.layout == layout and not self._base_wanted:
            return self._there_already(newest, made)._replace(base=made.delta)
        sequence = 0 if newest is None else newest.manifest.sequence + 1
        step = self._base(made)
        failpoint("chain.publish.base")
        manifest = Manifest(
            run=self.lease.run,
            epoch=self.lease.epoch,
            sequence=sequence,
            parent=None if newest is None else newest.hash,
            base=sequence,
            old_root=None,
            new_root=root,
            layout=layout,
            steps=(step,),
        )
        return self._commit(manifest, made.known, None)._replace(base=made.delta)

    def _there_already(self, newest: Link, made: "_Made") -> Published:
        self._known = made.known
        return Published(newest.manifest.sequence, newest.hash, newest.manifest, 0)

    def _step(self, newest: Link, old: Weights, new: Weights) -> "_Made":
        """A delta. What `old` hashes to is known where it is still what was published last, and else computed."""
        if self._known is not None and newest.manifest.layout == old.layout.hash:
            with suppress(NotAsPublished):
                return self._encoded(AsPublished(old, self._known), new, self._known.states)
        return self._encoded(old, new)

    def _encoded(self, old: Weights | None, new: Weights, states: States | None = None) -> "_Made":
        """An object in a file that has no name, mapped: as large as it is, it is not in memory. `states`: of `old`, where they are known."""
        summed = Summed(new)
        with nameless_file(self._config.scratch) as file:
            codec = self._config.base_codec if old is None else self._config.codec
            head = write(file, old, summed, codec=codec, states=states, workers=self._config.workers).head
            data = mapped_file(file)
        return _Made(data, head, ChunkHashes(head.records.array["new"].copy(), summed.checksums))

    def _merged(self, pieces: Sequence[Piece], new: Weights, states: States, newest: int, delta_bytes: int) -> list[Step]:
        """A delta for every span that ended, unless what lies within it is no more bytes to fetch. `states`: of `new`."""
        found = []
        for piece in pieces:
            within = plan.shortest(self._versions, newest, have=piece.start, only_deltas=True)
            before = Reverted(new, piece)
            made = self._encoded(before, new, before.states(states))
            if len(made.data) < delta_bytes + sum(move.step.object.size for move in within):
                found.append(Step(kind="merged", start=piece.start, object=keep(self._objects, made.data)))
        return found

    def _base_due(self, newest: Manifest, delta_bytes: int) -> bool:
        if newest.sequence + 1 - newest.base >= self._config.base_every or self._clock() - self._based_at >= self._config.base_after_s:
            return True
        if newest.base not in self._versions:
            return True
        base = next(step.object.size for step in self._versions[newest.base].manifest.steps if step.kind == "base")
        behind = plan.shortest(self._versions, newest.sequence, have=newest.base, only_deltas=True)
        return sum(move.step.object.size for move in behind) + delta_bytes > self._config.base_share * base

    def _base(self, made: "_Made") -> Step:
        stored = keep(self._objects, made.data)
        listed = keep(self._objects, parts.listed(made.data, made.head)) if self._config.parts else None
        return Step(kind="base", start=None, object=stored, parts=listed)

    def _commit(self, manifest: Manifest, known: ChunkHashes, following: Following | None) -> Published:
        """Have it be the newest version; what is `known` of its weights and `following` are remembered then, and without the latter none before."""
        if self._signer is not None:
            manifest = manifest.signed(self._signer)
        # What was encoded meanwhile took its time: somebody may have given this writer up.
        self.lease.renew()
        failpoint("chain.publish.committing")
        put = sum(step.object.size + (step.parts.size if step.parts else 0) for step in manifest.steps)
        if self._objects.create(manifest.key, manifest.to_json()) is None:
            manifest, put = self._there(manifest), 0
        failpoint("chain.publish.committed")
        self._known = known
        if following is None:
            self._spans.clear()
        else:
            self._spans.take(following)
        link = Link(manifest, manifest.hash)
        self._versions[manifest.sequence] = link
        if manifest.base == manifest.sequence:
            self._based_at, self._base_wanted = self._clock(), False
        needed = min(manifest.base, manifest.sequence - max(LEVELS))
        self._versions = {number: link for number, link in self._versions.items() if number >= needed}
        return Published(manifest.sequence, link.hash, manifest, put)

    def _there(self, wanted: Manifest) -> Manifest:
        """The version of this number, if it is this step of this writer, who was not answered; other objects may lead to it. Else Conflict."""
        data, _ = self._objects.get(wanted.key, at_most=MAX_BYTES)
        found = Manifest.from_json(data, f"{self._objects.name}: `{wanted.key}`")
        same = msgspec.structs.replace(wanted, base=found.base, steps=found.steps)
        if found != (same if self._signer is None else same.signed(self._signer)):
            raise Conflict(f"{self._objects.name}: another writer has created `{wanted.key}`: open the chain anew")
        return found


class _Made(NamedTuple):
    """An object that was encoded."""

    data: memoryview
    head: Head
    known: ChunkHashes
    """Of the weights that it leads to."""

    @property
    def delta(self) -> Delta:
        """As readers have it."""
        return Delta(self.head, self.data)


def _read(objects: Objects, run: str, trusted: Sequence[Verifier], read: plan.Versions | None = None) -> plan.Versions:
    try:
        return plan.read_versions(objects, run, trusted, read=read)
    except NotFound:
        return {}


def _epoch(versions: plan.Versions) -> int:
    return versions[max(versions)].manifest.epoch if versions else 0


def _is_step(newest: Manifest, head: Head) -> bool:
    """Whether the newest version is this very step: the one that this writer committed before it was started again."""
    return newest.old_root == str(head.old_root) and newest.new_root == str(head.new_root) and newest.old_root != newest.new_root
