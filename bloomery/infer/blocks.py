"""Blocks of the cache by their numbers: which are free, and how many hold each of the others. Nothing here touches the memory that they stand for.

A block is free again when all who held it have let go of it, so what two sequences begin alike with lies there once.
"""

import heapq
from collections.abc import Collection, Iterable
from typing import Final

from bloomery.models.pads import BLOCK_PLACES

NOBODYS: Final = 0
"""The block that holds zeros for ever: where a table names no other, it names this one."""


def blocks_for(tokens: int) -> int:
    """Blocks with room for so many tokens of one sequence."""
    return -(-tokens // BLOCK_PLACES)


class Blocks:
    """The lowest free number goes first, so that memory which nobody has touched stays so."""

    def __init__(self) -> None:
        self.capacity = 0
        """Blocks that there are, but for nobody's."""
        self._free: list[int] = []
        self._holders: dict[int, int] = {}

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    @property
    def held(self) -> Collection[int]:
        """Those that somebody holds."""
        return self._holders.keys()

    def holders(self, block: int) -> int:
        """How many hold it."""
        return self._holders.get(block, 0)

    def grow(self, capacity: int) -> None:
        """Have so many, those that there are among them."""
        # Higher than all before them: the heap stays one.
        self._free += range(self.capacity + 1, capacity + 1)
        self.capacity = capacity

    def take(self, count: int) -> list[int]:
        """As many free ones as are asked for, which have one holder each from then on."""
        taken = [heapq.heappop(self._free) for _ in range(count)]
        self._holders |= dict.fromkeys(taken, 1)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holds these, which somebody holds already."""
        for block in blocks:
            self._holders[block] += 1

    def let_go(self, blocks: Iterable[int]) -> None:
        """One who held these does no more."""
        for block in blocks:
            if self._holders[block] > 1:
                self._holders[block] -= 1
            else:
                del self._holders[block]
                heapq.heappush(self._free, block)

    def close_ranks(self, capacity: int) -> dict[int, int]:
        """Give the lowest numbers to those that are held, among so many; returns the new number of each."""
        numbers = {old: new for new, old in enumerate(sorted(self._holders), 1)}
        self._holders = {numbers[old]: holders for old, holders in self._holders.items()}
        self.capacity, self._free = capacity, list(range(len(numbers) + 1, capacity + 1))
        return numbers
