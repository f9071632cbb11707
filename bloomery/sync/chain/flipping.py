"""From one version to the next: what changes is decoded into a file while the weights are used, and written between two steps."""

from collections.abc import Sequence

import numpy as np

from bloomery.obs.failpoints import failpoint
from bloomery.sync.chain.decode import Decoded, Hop, changes, through
from bloomery.sync.chain.holding import Holding
from bloomery.sync.chain.staging import Changed, Staged, StagingFile
from bloomery.sync.codec.container import WHOLE
from bloomery.sync.codec.layout import Chunk, Weights
from bloomery.sync.codec.states import hash_chunk, row_of, state_of
from bloomery.sync.state_hash import Bits, StateHash
from bloomery.types.errors import Corrupt


def prepare(holding: Holding, hops: Sequence[Hop], to: int) -> Staged:
    """Decode and prove all that changes up to version `to`; the weights are only read."""
    table, held = holding.held_table, holding.state.held
    assert held is not None
    target = np.zeros_like(table)
    file = StagingFile(holding.folder)
    try:
        for chunk in holding.weights.layout.chunks():
            changed, state = _decoded(holding, hops, chunk, state_of(table[chunk.number]))
            target[chunk.number] = row_of(state)
            if len(changed.indices):
                file.add(changed)
            failpoint("chain.stage.chunk")
        holding.check_decoded(target, to)
        return file.finish(holding.weights.layout, (held.version, table), (holding.version(to), target))
    except BaseException:
        file.discard()
        raise


def write(weights: Weights, staged: Staged, *, forth: bool) -> None:
    """Change to what is staged, or back to what was before it. Fails as a whole: what was written is taken back."""
    written: list[Changed] = []
    try:
        for changed in staged.changes():
            written.append(changed)
            weights.write(changed.chunk, changed.indices, changed.new if forth else changed.old)
            failpoint("chain.flip.chunk")
    except BaseException:
        for changed in reversed(written):
            weights.write(changed.chunk, changed.indices, changed.old if forth else changed.new)
        raise


def _decoded(holding: Holding, hops: Sequence[Hop], chunk: Chunk, state: StateHash) -> tuple[Changed, StateHash]:
    """What changes of a chunk. If it is not what it should be, what makes it so is among the changes."""
    live = before = holding.weights.read(chunk)
    try:
        if _says_what_differs(hops, chunk):
            if (moved := changes(hops[0].delta, chunk, Decoded(live, state))) is None:
                return _unchanged(chunk, live, state)
            return Changed(chunk, moved.indices, live[moved.indices], moved.values), moved.state
        found = through(hops, chunk, Decoded(live, state))
    except Corrupt:
        if hash_chunk(holding.weights, chunk) == state:
            raise
        # Whoever goes back goes to what should have been there.
        before = holding.rebuilt(chunk, state)
        found = through(hops, chunk, Decoded(before, state))
    if found.bits is live:
        return _unchanged(chunk, live, found.state)
    different = found.bits != live
    if before is not live:
        different |= found.bits != before
    indices = np.flatnonzero(different).astype(np.uint32)
    return Changed(chunk, indices, before[indices], found.bits[indices]), found.state


def _says_what_differs(hops: Sequence[Hop], chunk: Chunk) -> bool:
    """Whether nobody has to copy the chunk and compare all of it: one delta from what is held, whose payload has changes alone."""
    return len(hops) == 1 and hops[0].move.start is not None and hops[0].delta.records[chunk.number].codec not in WHOLE


def _unchanged(chunk: Chunk, live: Bits, state: StateHash) -> tuple[Changed, StateHash]:
    return Changed(chunk, np.zeros(0, np.uint32), live[:0], live[:0]), state
