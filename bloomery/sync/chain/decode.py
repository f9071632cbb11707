"""One chunk, through the objects of a way: what it is in the version at the end.

Every change of it is held against the hashes that the objects have of the chunk, before and after, at the cost of what changed. What does not agree
is refused, and nothing was written anywhere.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bloomery.disk.mapped import mapped
from bloomery.sync.chain.plan import Move, Versions
from bloomery.sync.codec.delta import Delta
from bloomery.sync.codec.layout import Chunk, Layout
from bloomery.sync.codec.numbers import Changes
from bloomery.sync.state_hash import Bits, StateHash
from bloomery.types.errors import Corrupt


class Decoded(NamedTuple):
    """A chunk: its bits [count], and their hash."""

    bits: Bits
    state: StateHash


class Hop(NamedTuple):
    """A move, and the object that was fetched for it, checked against the manifests."""

    move: Move
    delta: Delta


def opened(move: Move, path: Path, layout: Layout, versions: Versions, held_root: str | None) -> Hop:
    """A verified file as what its manifest says that it is. Corrupt if it leads from or to other weights, or is of other ones altogether."""
    with path.open("rb") as file:
        delta = Delta.parse(mapped(file.fileno()), trusted=True)
    what = f"the {move.step.kind} `{move.step.object.key}` of version {move.stop}"
    if (delta.head.kind == "base") != (move.start is None):
        raise Corrupt(f"{what} is a {delta.head.kind}")
    if difference := delta.layout.difference(layout):
        raise Corrupt(f"{what} is of another model: {difference}")
    if move.start is not None:
        before = versions[move.start].manifest.new_root if move.start in versions else held_root
        if str(delta.old_root) != before:
            raise Corrupt(f"{what} starts from state {delta.old_root}, and version {move.start} is {before}")
    if str(delta.new_root) != versions[move.stop].manifest.new_root:
        raise Corrupt(f"{what} leads to state {delta.new_root}, and the version is {versions[move.stop].manifest.new_root}")
    return Hop(move, delta)


def through(hops: Sequence[Hop], chunk: Chunk, start: Decoded | None) -> Decoded:
    """What the chunk is behind the last hop; `start` is not written to, and not needed where the first hop is a base."""
    at = start
    for hop in hops:
        at = after(hop.delta, chunk, at if hop.move.start is not None else None, owned=at is not start)
    assert at is not None
    return at


def after(delta: Delta, chunk: Chunk, before: Decoded | None, *, owned: bool) -> Decoded:
    """What a chunk is behind one object; without anything before it, of a base. `owned` bits are written to."""
    if before is None:
        before, owned = Decoded(np.zeros(chunk.numel, chunk.unsigned), StateHash()), True
    if (found := changes(delta, chunk, before)) is None:
        return before
    bits = before.bits if owned else before.bits.copy()
    bits[found.indices] = found.values
    return Decoded(bits, found.state)


def changes(delta: Delta, chunk: Chunk, before: Decoded) -> Changes | None:
    """What one object makes of a chunk, at the cost of what changes; None where it leaves it as it is."""
    record = delta.records[chunk.number]
    if record.h_old != before.state:
        raise Corrupt(f"chunk {chunk.number} is in state {before.state}, and the delta starts from {record.h_old}")
    if not record.changed:
        return None
    found = delta.changes(chunk.number, before.bits, before.state)
    if found.state != record.h_new:
        raise Corrupt(f"chunk {chunk.number} comes to state {found.state}, and should come to {record.h_new}")
    return found
