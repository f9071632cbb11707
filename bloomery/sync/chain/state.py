"""What a reader knows across its own deaths: the newest version that it took, the one that it holds, and the one that it is about to hold.

The file is replaced whole and synced. The hashes of all chunks of the version that is held lie beside it, under the hash of that table.
"""

from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
from blake3 import blake3

from bloomery.disk.durable import replace
from bloomery.sync.chain.plan import Known
from bloomery.sync.codec.states import States
from bloomery.types.errors import Corrupt
from bloomery.types.wire import Wire

STATE: Final = "state.json"
TABLE: Final = "table"


class Version(Wire, frozen=True):
    """A version, as manifests name it."""

    epoch: int
    sequence: int
    hash: str
    root: str


class Held(Wire, frozen=True):
    """What the weights are."""

    version: Version
    table: str
    """blake3 of the table."""


class State(Wire, frozen=True, kw_only=True):
    """Of one reader of one run."""

    format: Literal[1] = 1
    run: str
    layout: str
    newest: Version | None = None
    """Nothing that contradicts this one is taken any more."""
    held: Held | None = None
    flipping: str = ""
    """blake3 of the staged changes that may have been written in part; empty where the weights are what `held` says."""

    @property
    def known(self) -> Known | None:
        """What chains are held against."""
        return None if self.newest is None else Known(self.run, self.newest.epoch, self.newest.sequence, self.newest.hash)


def load(folder: Path, run: str, layout: str) -> State:
    """What the folder says, or that nothing is known. Corrupt if it is the folder of another run or of weights of another layout."""
    try:
        data = (folder / STATE).read_bytes()
    except FileNotFoundError:
        return State(run=run, layout=layout)
    try:
        found = msgspec.json.decode(data, type=State)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"`{folder.name}/{STATE}` is not what a reader of a chain wrote: {error}; remove the folder to join anew") from error
    if (found.run, found.layout) != (run, layout):
        raise Corrupt(f"`{folder.name}` belongs to a reader of run `{found.run}` and other weights: give each reader a folder of its own")
    return found


def save(folder: Path, state: State, table: States | None = None) -> None:
    """Have it known from now on; the table first, which the state names."""
    if table is not None and state.held is not None:
        replace(folder / TABLE, table.tobytes())
    replace(folder / STATE, msgspec.json.encode(state))


def load_table(folder: Path, held: Held, chunks: int) -> States | None:
    """The hashes that `held` names; None where the file is not the one."""
    try:
        data = (folder / TABLE).read_bytes()
    except FileNotFoundError:
        return None
    if blake3(data).hexdigest() != held.table or len(data) != chunks * 16:
        return None
    return np.frombuffer(data, np.uint64).reshape(chunks, 2).copy()


def held(version: Version, table: States) -> Held:
    """A version and the table of its chunks."""
    return Held(version=version, table=blake3(table.tobytes()).hexdigest())
