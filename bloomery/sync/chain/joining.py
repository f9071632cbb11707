"""Weights that nobody uses yet become a version: from what they are, if that is one of the chain, or from a base."""

from collections.abc import Sequence

import msgspec
import numpy as np

from bloomery.obs.failpoints import failpoint
from bloomery.sync.chain.decode import Decoded, Hop, through
from bloomery.sync.chain.holding import Holding
from bloomery.sync.codec.states import States, root_of, row_of, state_of


def recognise(holding: Holding) -> None:
    """Weights that came from elsewhere may be a version, such as the model that the run began with."""
    if holding.table is None or holding.state.held is not None:
        return
    root = str(root_of(holding.table))
    for number, link in holding.versions.items():
        if link.manifest.new_root == root and link.manifest.layout == holding.weights.layout.hash:
            holding.become(holding.version(number), holding.table)
            return


def fill(holding: Holding, hops: Sequence[Hop], to: int) -> None:
    """Follow a way to version `to`, chunk by chunk."""
    # What follows is neither version until it is done, and the hashes of the old one would say of a part that it is to be made anew.
    holding.save(msgspec.structs.replace(holding.state, held=None, flipping=""))
    before, holding.table = holding.table, None
    table = _installed(holding, hops, before)
    holding.check_decoded(table, to)
    holding.become(holding.version(to), table)


def _installed(holding: Holding, hops: Sequence[Hop], before: States | None) -> States:
    """Of all chunks, once they are written. `before`: of what they were."""
    table = before if hops and hops[0].move.start is not None else None
    found = np.zeros((holding.weights.layout.chunk_count, 2), np.uint64)
    for chunk in holding.weights.layout.chunks():
        start = None if table is None else Decoded(holding.weights.read(chunk), state_of(table[chunk.number]))
        after = through(hops, chunk, start)
        if start is None or after.bits is not start.bits:
            holding.write_chunk(chunk, after.bits)
        found[chunk.number] = row_of(after.state)
        failpoint("chain.join.chunk")
    return found
