"""What is kept of sequences that have left: the blocks of their keys and values, for whoever begins alike under the same weights.

It costs no copy to keep them: they are held on, as others hold them. Where room is wanted the sequence that has been unused for longest loses its
last block, then the one before; the beginning that is left is one that others may have.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from bloomery.infer.blocks import Blocks, blocks_for
from bloomery.infer.plan import LEAST_SHARED, Kept, Stem, Stretch, in_common
from bloomery.infer.states import Beginning
from bloomery.models.pads import BLOCK_PLACES

MAX_KEPT: Final = 256
"""Sequences: every newcomer is compared with those whose head is its own."""


class Contents(NamedTuple):
    """What is known of one sequence."""

    blocks: list[int]
    beginnings: tuple[Beginning, ...]
    """Where one can go on, of a model that has states."""


class Prefixes:
    """Within `most_blocks` blocks; states count as `state_blocks` of them, and a sequence that has some is kept whole or not at all."""

    def __init__(self, blocks: Blocks, most_blocks: int, state_blocks: int) -> None:
        self._blocks, self._most_blocks, self._state_blocks = blocks, most_blocks, state_blocks
        self._kept: OrderedDict[Kept, Contents] = OrderedDict()
        """The longest unused first."""
        self._held: Counter[int] = Counter()
        """By how many of these each block is held."""

    @property
    def kept(self) -> Sequence[Kept]:
        """All of them, the longest unused first."""
        return list(self._kept)

    @property
    def blocks(self) -> int:
        """That they take together."""
        return len(self._held) + self._state_blocks * len(self._kept)

    def keep(self, stem: Stem, blocks: Sequence[int], beginnings: tuple[Beginning, ...]) -> None:
        """Hold on to a sequence, unless a longer one holds all of it, and let go of those that it holds all of."""
        tokens = len(stem.tokens)
        if tokens < LEAST_SHARED or blocks_for(tokens) + self._state_blocks > self._most_blocks:
            return
        for other in self.kept:
            shared = in_common(stem, other.stem)
            # A longer one does as well, but where a state is needed and none is remembered.
            if shared == tokens and (not beginnings or shared == len(other.stem.tokens)):
                self.use(other)
                return
            if shared == len(other.stem.tokens):
                self._forget(other)
        stretches = tuple(beginning.stretch for beginning in beginnings) or (Stretch(0, tokens),)
        self._kept[Kept(stem, stretches)] = Contents(list(blocks), beginnings)
        self._held.update(blocks)
        self._blocks.hold(blocks)
        while len(self._kept) > MAX_KEPT:
            self._forget(next(iter(self._kept)))
        while self.blocks > self._most_blocks:
            self._shorten(next(iter(self._kept)))

    def use(self, kept: Kept) -> Contents:
        """Somebody goes on from there."""
        self._kept.move_to_end(kept)
        return self._kept[kept]

    def evict(self) -> bool:
        """Let go of a block that nobody else holds, of what has been unused for longest; False where there is none."""
        for kept, contents in self._kept.items():
            last = contents.blocks[-1]
            # Whoever else holds the last block holds those before it too.
            if self._held[last] == self._blocks.holders(last):
                self._shorten(kept)
                return True
        return False

    def clear(self) -> None:
        """Let go of all."""
        for kept in self.kept:
            self._forget(kept)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """The same blocks have other numbers."""
        self._kept = OrderedDict((kept, each._replace(blocks=[numbers[block] for block in each.blocks])) for kept, each in self._kept.items())
        self._held = Counter({numbers[block]: count for block, count in self._held.items()})

    def _shorten(self, kept: Kept) -> None:
        """Let go of its last block, or of all of it where too little or no state is left."""
        contents = self._kept[kept]
        tokens = (len(contents.blocks) - 1) * BLOCK_PLACES
        if tokens < LEAST_SHARED or contents.beginnings:
            self._forget(kept)
            return
        del self._kept[kept]
        self._let_go(contents.blocks[-1:])
        shorter = Kept(Stem(kept.stem.version, kept.stem.tokens[:tokens]), (Stretch(0, tokens),))
        self._kept[shorter] = contents._replace(blocks=contents.blocks[:-1])
        self._kept.move_to_end(shorter, last=False)

    def _forget(self, kept: Kept) -> None:
        self._let_go(self._kept.pop(kept).blocks)

    def _let_go(self, blocks: Sequence[int]) -> None:
        self._held.subtract(blocks)
        for block in blocks:
            if not self._held[block]:
                del self._held[block]
        self._blocks.let_go(blocks)
