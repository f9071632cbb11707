"""What weights are after a process died with them: one version, a mixture of two that can be made one, or none that is known.

Memory of a new process is none. Files are what the last process left: after a flip that was killed, each chunk is old, new or in between. If nothing
of the flip was written, the old version is what they are; else the new one is finished, or, of a flip back, the old one. `look` only reads, `recover`
writes.
"""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from bloomery.obs.failpoints import failpoint
from bloomery.sync.chain import state as states
from bloomery.sync.chain.holding import Holding
from bloomery.sync.chain.staging import FLIPPED, STAGED, Changed, Staged
from bloomery.sync.chain.state import State, Version
from bloomery.sync.codec.layout import Weights
from bloomery.sync.codec.states import States, states_of
from bloomery.sync.state_hash import Bits
from bloomery.types.errors import Corrupt

_MOST_DAMAGED = 0.5
"""Of the chunks: where more are no version's, the weights are something else, and a join is cheaper than making all of them anew."""


class Found(NamedTuple):
    """`version` is what the weights are to be, with the hashes `table`; None where they are none, and `table` says what they are."""

    version: Version | None
    table: States
    to_write: list[tuple[Changed, Bits]]
    """What makes chunks of a broken flip whole."""
    suspects: list[int]
    """Chunks that are not what the table says, before that is written."""
    flipped: bool = False
    """Whether that ends a flip, whose file is not in its place yet."""


def look(weights: Weights, folder: Path, state: State) -> Found:
    """Hash the weights, and hold them against what the folder says."""
    there = states_of(weights)
    staged = _staged(weights, folder, state)
    if staged is not None and state.held is not None:
        forth = state.held.version == staged.start
        old, new = (staged.old_table, staged.new_table) if forth else (staged.new_table, staged.old_table)
        begun = any(changed.chunk.number in _others(there, old) for changed in staged.changes())
        if begun and not _mostly_other(there, old, new):
            suspects = _others(there, new)
            to_write = [(changed, changed.new if forth else changed.old) for changed in staged.changes() if changed.chunk.number in suspects]
            return Found(staged.stop if forth else staged.start, new.copy(), to_write, sorted(suspects), forth and staged.path.name == STAGED)
    if state.held is not None and (table := states.load_table(folder, state.held, len(there))) is not None and not _mostly_other(there, table):
        return Found(state.held.version, table, [], sorted(_others(there, table)))
    return Found(None, there, [], [])


def recover(holding: Holding, found: Found) -> None:
    """Make one version of what was found: chunks that are not what the table says are written from what is staged, or made anew."""
    if found.version is None:
        if holding.state.held is not None or holding.state.flipping:
            holding.save(msgspec.structs.replace(holding.state, held=None, flipping=""))
        return
    for changed, bits in found.to_write:
        holding.weights.write(changed.chunk, changed.indices, bits)
        failpoint("chain.recover.chunk")
    holding.state = msgspec.structs.replace(holding.state, held=states.held(found.version, found.table))
    if damaged := holding.damaged(found.suspects):
        holding.look()
        holding.mend(damaged)
    holding.become(found.version, found.table)


def _staged(weights: Weights, folder: Path, state: State) -> Staged | None:
    if not state.flipping:
        return None
    # A flip back is from the second; and a flip forth is in its place already, when a process dies before that is written down.
    for name in (STAGED, FLIPPED):
        # Where neither can be read, chunks are made anew from the store.
        with suppress(FileNotFoundError, Corrupt):
            if (found := Staged(folder / name, weights.layout)).hash == state.flipping:
                return found
    return None


def _others(there: States, table: States) -> set[int]:
    return set(map(int, np.flatnonzero((there != table).any(axis=1))))


def _mostly_other(there: States, *tables: States) -> bool:
    """Whether most chunks are of none of these versions."""
    other = np.ones(len(there), bool)
    for table in tables:
        other &= (there != table).any(axis=1)
    return bool(other.sum() > _MOST_DAMAGED * len(there))
