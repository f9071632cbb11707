"""What a reader knows across its own deaths: the newest version that it took, the one that it holds, and the one that it is about to hold.

The file is replaced whole and synced. The hashes of all chunks of the version that is held lie beside it, under the hash of that table.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from bloomery.sync.chain.plan import Known
from bloomery.sync.codec.layout import Chunk, Weights
from bloomery.sync.state_hash import MASK, StateHash, hash_elements
from bloomery.types.errors import Corrupt
from bloomery.types.wire import Wire

STATE: Final = "state.json"
TABLE: Final = "table"

Table = NDArray[np.uint64]
"""State hashes of the chunks of a version, [chunks, 2]."""


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


def save(folder: Path, state: State, table: Table | None = None) -> None:
    """Have it known from now on; the table first, which the state names."""
    if table is not None and state.held is not None:
        replace_file(folder / TABLE, [table.tobytes()])
    replace_file(folder / STATE, [msgspec.json.encode(state)])


def load_table(folder: Path, held: Held, chunks: int) -> Table | None:
    """The hashes that `held` names; None where the file is not the one."""
    try:
        data = (folder / TABLE).read_bytes()
    except FileNotFoundError:
        return None
    if blake3(data).hexdigest() != held.table or len(data) != chunks * 16:
        return None
    return np.frombuffer(data, np.uint64).reshape(chunks, 2).copy()


def table_of(weights: Weights) -> Table:
    """Hash all chunks: a pass over all of the weights."""
    found = np.zeros((weights.layout.chunk_count, 2), np.uint64)
    for chunk in weights.layout.chunks():
        found[chunk.number] = row(hash_chunk(weights, chunk))
    return found


def hash_chunk(weights: Weights, chunk: Chunk) -> StateHash:
    """Of what is there now."""
    return hash_elements(weights.read(chunk), chunk.first)


def row(state: StateHash) -> tuple[int, int]:
    """As it stands in a table."""
    return state.one, state.two


def state_at(table: Table, number: int) -> StateHash:
    """Of one chunk."""
    return StateHash(int(table[number, 0]), int(table[number, 1]))


def root_of(table: Table) -> str:
    """Of all chunks together."""
    one, two = table.sum(axis=0, dtype=np.uint64)
    return str(StateHash(int(one) & MASK, int(two) & MASK))


def held(version: Version, table: Table) -> Held:
    """A version and the table of its chunks."""
    return Held(version=version, table=blake3(table.tobytes()).hexdigest())


def replace_file(path: Path, parts: Iterable[Any]) -> None:
    """The old file or the new one, whole, after a power cut too."""
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in it durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
