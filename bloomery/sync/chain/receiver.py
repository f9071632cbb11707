"""A reader of a chain: it has a version, gets the next one ready beside it, and changes to it between two steps.

    receiver = Receiver.open(objects, weights, "run-7", folder=Path("reader-0"))
    receiver.join()                       # whatever version there is, into weights that nobody uses yet
    while True:
        if receiver.stage() is not None:  # fetched, verified and decoded, while the weights are used
            receiver.flip()               # between two steps: nothing but writing what changed
            receiver.settle()             # while the weights are used
        receiver.scrub()                  # between two steps: a 64th of the weights is still what it should be

What is refused leaves the weights as they are: signatures, parents, epochs and hashes come before the first byte is decoded, and everything is
decoded before the first element is written. A process that dies within a flip finds, when it opens its weights again, every chunk in one version or
the other or in between, and makes them one version. One thread drives a receiver; `join`, `flip`, `roll_back`, `scrub` and `mend` alone write to
weights.

Memory: `FetchConfig.memory_bytes` for what is fetched, three copies of a chunk with its changes for what is decoded, 32 bytes a chunk for hashes, and
the manifests. What was fetched and what is staged lie in files of `folder`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from bloomery.obs.failpoints import failpoint
from bloomery.sync.chain import state as states
from bloomery.sync.chain.download import Downloads, FetchConfig
from bloomery.sync.chain.flipping import prepare, write
from bloomery.sync.chain.holding import Holding
from bloomery.sync.chain.joining import fill, recognise
from bloomery.sync.chain.keys import Verifier
from bloomery.sync.chain.readers import check_name
from bloomery.sync.chain.recovery import look, recover
from bloomery.sync.chain.staging import FLIPPED, STAGED, Staged
from bloomery.sync.codec.layout import Weights
from bloomery.types.errors import Conflict
from bloomery.types.objects import Objects


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiveConfig:
    """How a reader reads."""

    fetch: FetchConfig = field(default_factory=FetchConfig)
    scrub_share: int = 64
    """Each scrub looks at one of so many parts of the weights."""
    name: str = ""
    """Under which the reader tells the store what it needs (`readers`), so that nobody removes it; without one it tells nothing."""


class Flipped(NamedTuple):
    """A change of versions."""

    sequence: int
    elements: int
    """That changed."""


class Scrubbed(NamedTuple):
    """Numbers of chunks that were looked at, and of those that were made anew."""

    checked: list[int]
    mended: list[int]


class Receiver:
    """`open` makes it; close it when it is done."""

    def __init__(self, holding: Holding, *, scrub_share: int) -> None:
        self._holding, self._scrub_share = holding, scrub_share
        self._staged: Staged | None = None
        self._next_scrub = 0
        self._flipped = False
        """Whether the file of what is staged is that of the last flip."""

    @classmethod
    def open(
        cls,
        objects: Objects,
        weights: Weights,
        run: str,
        *,
        folder: Path,
        trusted: Sequence[Verifier] = (),
        config: ReceiveConfig | None = None,
    ) -> Self:
        """Find out what the weights are, which takes a pass over them, and end a flip that was killed.

        `folder` is this reader's own. Weights that are no version any more, as memory is after a restart, have to `join`; where only some of their
        chunks are none, these are made anew. The store is asked only for that.
        """
        config = config or ReceiveConfig()
        if config.name:
            check_name(config.name)
        folder.mkdir(parents=True, exist_ok=True)
        state = states.load(folder, run, weights.layout.hash)
        found = look(weights, folder, state)
        holding = Holding(objects, weights, folder, state, found.table, trusted=trusted, fetch=config.fetch, name=config.name)
        receiver = cls(holding, scrub_share=config.scrub_share)
        try:
            recover(holding, found)
            receiver._flipped = found.flipped
            receiver.settle()
        except BaseException:
            receiver.close()
            raise
        return receiver

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """What is held stays; what was staged and not flipped to is forgotten when the folder is opened again."""
        self.downloads.close()
        self.settle()

    @property
    def weights(self) -> Weights:
        """Those that were opened."""
        return self._holding.weights

    @property
    def downloads(self) -> Downloads:
        """What was fetched, and how."""
        return self._holding.downloads

    @property
    def sequence(self) -> int | None:
        """The version that the weights hold, None before a join."""
        return self._holding.sequence

    @property
    def staged(self) -> int | None:
        """The version that the next flip leads to."""
        return None if self._staged is None else self._staged.stop.sequence

    def look(self) -> int:
        """Read the manifests that are new; the number of the newest version."""
        return self._holding.look()

    def join(self, to: int | None = None) -> int:
        """Fill weights that nobody uses with a version, the newest without `to`; its number. From what they hold already, if that is a version.

        A join that was killed begins anew, without fetching again what was fetched.
        """
        self.settle()
        newest = self.look()
        to = newest if to is None else to
        recognise(self._holding)
        if self.sequence != to:
            hops = self._holding.way(to, self.sequence)
            self.abort()
            fill(self._holding, hops, to)
        # Who holds it already tells the store again: what he told in a former life may be too long ago to count.
        self._holding.unsettled = True
        self.settle()
        return to

    def stage(self, to: int | None = None) -> int | None:
        """Get a version ready, the newest without `to`, while the weights are used: its number, None where they hold it.

        Corrupt, Forbidden, Gone or Unavailable say why a version cannot be had; nothing has changed then.
        """
        if self.sequence is None:
            raise Conflict("the weights hold no version of the chain: join first")
        self.settle()
        newest = self.look()
        to = newest if to is None else to
        if to == self.sequence:
            return None
        if to == self.staged:
            return to
        self.abort()
        hops = self._holding.way(to, self.sequence)
        failpoint("chain.stage.fetched")
        self._staged = prepare(self._holding, hops, to)
        failpoint("chain.stage.decoded")
        self._arm(self._staged)
        failpoint("chain.stage.armed")
        return to

    def flip(self) -> Flipped:
        """Change to what is staged, between two steps. Fails as a whole: what was written is taken back.

        Nothing else is written and nobody is asked: `settle` does that when steps run again.
        """
        staged = self._staged
        if staged is None:
            raise Conflict("nothing is staged: stage a version first")
        write(self.weights, staged, forth=True)
        failpoint("chain.flip.written")
        self._staged, self._flipped = None, True
        self._holding.become(staged.stop, staged.new_table.copy())
        return Flipped(staged.stop.sequence, staged.elements)

    def settle(self) -> None:
        """Have the folder and the store know what was flipped to; else the next `stage`, or `close`, does. A process that dies before finds out."""
        if self._flipped:
            folder = self._holding.folder
            (folder / STAGED).replace(folder / FLIPPED)
            self._flipped = False
            failpoint("chain.flip.kept")
        self._holding.settle()

    def abort(self) -> None:
        """Forget what is staged; the weights are as they were."""
        if self._staged is not None:
            self._staged = None
            self._arm(None)
            (self._holding.folder / STAGED).unlink(missing_ok=True)

    def roll_back(self) -> Flipped:
        """Go back to the version before the last flip, between two steps, from what that flip left: nothing is fetched.

        Whatever was staged since is forgotten. Conflict if there was none, or if the weights are not what it made of them.
        """
        self.settle()
        self.abort()
        try:
            before = Staged(self._holding.folder / FLIPPED, self.weights.layout)
        except FileNotFoundError as error:
            raise Conflict("there was no flip that could be taken back") from error
        held = self._holding.state.held
        if held is None or held.version != before.stop:
            raise Conflict(
                f"the last flip led to version {before.stop.sequence}, and the weights hold {self.sequence}: it was taken back, or they joined"
            )
        self._arm(before)
        write(self.weights, before, forth=False)
        failpoint("chain.back.written")
        self._holding.become(before.start, before.old_table.copy())
        return Flipped(before.start.sequence, before.elements)

    def scrub(self) -> Scrubbed:
        """Look whether the next part of the weights is what it should be, and make anew what is not, between two steps."""
        count = self.weights.layout.chunk_count
        size = -(-count // self._scrub_share)
        checked = [number % count for number in range(self._next_scrub, self._next_scrub + min(size, count))]
        self._next_scrub = (self._next_scrub + size) % max(1, count)
        damaged = self._holding.damaged(checked)
        self.mend(damaged)
        return Scrubbed(checked, damaged)

    def mend(self, numbers: Iterable[int]) -> None:
        """Make these chunks anew, between two steps: what the store has of the held version replaces what they are."""
        self._holding.mend(numbers)

    def _arm(self, staged: Staged | None) -> None:
        """Have the folder know what may be written in part from now on."""
        self._holding.save(msgspec.structs.replace(self._holding.state, flipping="" if staged is None else staged.hash))
