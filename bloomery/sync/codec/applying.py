"""Deltas applied to weights, one or several that follow each other.

Every chunk is judged by the hash of what is there: it may be in the state before the first delta, behind any of them, or behind all, and goes on from
there. So applying twice is applying once, and what was interrupted goes on. A chunk in a state that no delta knows is damaged, or of other weights.

`apply` is for weights that are in use: everything is decoded and proved before the first element is written, and what is refused changes nothing.
`patch` is for a copy that nobody uses yet: one chunk at a time, in as much memory as that takes.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bloomery.sync.codec.choose import Codec
from bloomery.sync.codec.delta import Delta, Told
from bloomery.sync.codec.layout import Chunk, Layout, Weights
from bloomery.sync.codec.numbers import Changes
from bloomery.sync.codec.ordered import in_order
from bloomery.sync.codec.states import States, hash_chunk, row_of, state_of, states_of
from bloomery.sync.state_hash import NOTHING, Bits, StateHash, hash_elements
from bloomery.types.errors import Conflict, Corrupt, shown

_SAMPLE: Final = 16


class Steps:
    """Deltas of which each begins where the one before it ends; the first may be a base."""

    def __init__(self, deltas: Sequence[Delta]) -> None:
        """Conflict where they do not follow each other."""
        first = deltas[0]
        for number, (before, delta) in enumerate(pairwise(deltas), start=2):
            if difference := delta.layout.difference(before.layout):
                raise Conflict(f"delta {number} is of another model than those before it: {difference}")
            if delta.kind == "base":
                raise Conflict(f"delta {number} is a base, which starts from nothing: it can only be the first")
            if len(apart := np.flatnonzero((delta.records.array["old"] != before.records.array["new"]).any(axis=1))):
                where = place_of(delta.layout, int(apart[0]))
                raise Conflict(f"delta {number} does not begin where delta {number - 1} ends: {len(apart)} chunks differ, first {where}")
        self.deltas, self.layout = list(deltas), first.layout
        self.from_anything = first.kind == "base"

    @cached_property
    def states(self) -> NDArray[np.uint64]:
        """Of all chunks, before the first delta and behind each: [deltas + 1, chunks, 2]."""
        return np.stack([self.deltas[0].records.array["old"], *(delta.records.array["new"] for delta in self.deltas)])

    def reached(self, numbers: slice, states: States) -> NDArray[np.int64]:
        """How many deltas each of these chunks [n] is behind, whose states [n, 2] are given; -1 where it is in no state that is known."""
        same = (self.states[:, numbers] == states).all(axis=2)[::-1]
        behind = len(self.deltas) - np.argmax(same, axis=0)
        return np.where(same.any(axis=0), behind, 0 if self.from_anything else -1)

    def check_layout(self, layout: Layout) -> None:
        """Conflict where weights have other tensors."""
        if difference := layout.difference(self.layout):
            raise Conflict(f"the weights are of another model than the delta: {difference}")


class Plan(NamedTuple):
    """Numbers of chunks [n]."""

    todo: NDArray[np.int64]
    done: NDArray[np.int64]
    damaged: NDArray[np.int64]
    """In no state that the deltas know: to be repaired, or other weights."""
    reached: NDArray[np.int64]
    """Of all chunks, how many of the deltas they are behind; -1 of damaged ones."""


class Prepared(NamedTuple):
    """What is to be written to a chunk, proved."""

    chunk: Chunk
    changes: Changes


class Staged(NamedTuple):
    """Everything that is to be written, decoded and proved; the weights are as they were."""

    prepared: list[Prepared]
    states: States
    """Of all chunks, once this is written."""

    def commit(self, weights: Weights) -> None:
        """Write it."""
        for chunk, changes in self.prepared:
            weights.write(chunk, changes.indices, changes.values)


def plan(deltas: Sequence[Delta], weights: Weights, states: States | None = None) -> Plan:
    """What applying would do; reads all weights unless their `states` are known."""
    steps = Steps(deltas)
    steps.check_layout(weights.layout)
    return _plan(steps, states_of(weights) if states is None else states)


def stage(deltas: Sequence[Delta], weights: Weights, states: States | None = None) -> Staged:
    """Decode what `apply` writes: 4 bytes and an element for each that changed. Conflict or Corrupt where it is refused; nothing is written."""
    steps = Steps(deltas)
    steps.check_layout(weights.layout)
    known = states_of(weights) if states is None else states
    found = _plan(steps, known)
    if len(found.damaged):
        raise _unknown(steps, found.damaged.tolist())
    prepared = []
    for number in found.todo.tolist():
        chunk = steps.layout.chunk(number)
        prepared.append(advanced(steps, chunk, weights.read(chunk), int(found.reached[number]), state_of(known[number])))
    behind = known.copy()
    for each in prepared:
        behind[each.chunk.number] = row_of(each.changes.state)
    return Staged(prepared, behind)


def apply(deltas: Sequence[Delta], weights: Weights, states: States | None = None) -> States:
    """Bring weights to where the last delta leads, and return the states of all chunks then. What is refused writes nothing. Where a write fails,
    chunks before it are written, its own is as that leaves it, and applying again goes on if that is a state that the deltas know."""
    staged = stage(deltas, weights, states)
    staged.commit(weights)
    return staged.states


def patch(deltas: Sequence[Delta], weights: Weights, *, workers: int = 1, told: Told | None = None) -> StateHash:
    """The same chunk by chunk, each read and proved whether it changes or not; returns the root. What is refused half way can go on."""
    steps = Steps(deltas)
    steps.check_layout(weights.layout)

    def work(chunk: Chunk) -> StateHash:
        bits = weights.read(chunk)
        state = hash_elements(bits, chunk.first)
        numbers = slice(chunk.number, chunk.number + 1)
        reached = int(steps.reached(numbers, np.array([row_of(state)], np.uint64))[0])
        if reached < 0:
            raise _unknown(steps, [chunk.number])
        if reached < len(steps.deltas):
            indices, values, state = advanced(steps, chunk, bits, reached, state).changes
            weights.write(chunk, indices, values)
        return state

    root = StateHash()
    for chunk, state in in_order(work, steps.layout.chunks(), workers):
        root += state
        if told is not None:
            told(chunk)
    return root


def check_sample(deltas: Sequence[Delta], weights: Weights) -> None:
    """Conflict where a few chunks, among those that change, show that these are other weights: before hours go into copying them."""
    steps = Steps(deltas)
    steps.check_layout(weights.layout)
    changing = np.flatnonzero((steps.states[0] != steps.states[-1]).any(axis=1))
    for number in changing[:: len(changing) // _SAMPLE + 1].tolist():
        chunk = steps.layout.chunk(number)
        state = hash_chunk(weights, chunk)
        if steps.reached(slice(number, number + 1), np.array([row_of(state)], np.uint64))[0] < 0:
            raise _unknown(steps, [number])


def place_of(layout: Layout, number: int) -> str:
    """A chunk as messages name it."""
    chunk = layout.chunk(number)
    part = next(iter(layout.parts(chunk)))
    return f"chunk {number} (from element {part.start} of tensor `{shown(part.tensor.name)}` on)"


def advanced(steps: Steps, chunk: Chunk, bits: Bits, reached: int, state: StateHash) -> Prepared:
    """What becomes of a chunk that is behind `reached` of the deltas, and not all; Corrupt where a payload does not lead where its record says."""
    now = bits
    for delta in steps.deltas[reached:]:
        found = _changes(delta, chunk, now, state)
        state = found.state
        if state != delta.records[chunk.number].h_new:
            raise Corrupt(f"a delta does not lead where it says: {place_of(steps.layout, chunk.number)} would be in another state")
        if reached == len(steps.deltas) - 1:
            return Prepared(chunk, found)
        now = now.copy() if now is bits else now
        now[found.indices] = found.values
    indices = np.flatnonzero(now != bits).astype(np.uint32)
    return Prepared(chunk, Changes(indices, now[indices], state))


def _plan(steps: Steps, states: States) -> Plan:
    reached = steps.reached(slice(None), states)
    done = reached == len(steps.deltas)
    return Plan(np.flatnonzero((reached >= 0) & ~done), np.flatnonzero(done), np.flatnonzero(reached < 0), reached)


def _changes(delta: Delta, chunk: Chunk, bits: Bits, state: StateHash) -> Changes:
    if delta.kind == "base" and delta.records[chunk.number].codec == Codec.EMPTY:
        return Changes(np.arange(chunk.numel, dtype=np.uint32), np.zeros_like(bits), NOTHING)
    return delta.changes(chunk.number, bits, state)


def _unknown(steps: Steps, damaged: list[int]) -> Conflict:
    which = f"{len(damaged)} of {steps.layout.chunk_count} chunks are" if len(damaged) > 1 else "a chunk is"
    return Conflict(
        f"the weights are not those that the delta starts from: {which} in no state that it knows, first {place_of(steps.layout, damaged[0])}"
    )
