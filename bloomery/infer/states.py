"""States of the layers that have one, beside the keys and values of the others.

A state stands at the last begin of a chunk that a sample has passed, and the rows that came since, with the few before that the convolution sees, are
its tail: the next rows finish that chunk. So one can go on anywhere in the chunk at which a state stands, and nowhere before it. Of every prompt one
more such beginning is remembered, the chunk in which it ends, once a sample leaves it: siblings and later requests begin there.
Shapes: N layers with a state, S slots, L rows of a tail, X numbers of a row.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from bloomery.infer.plan import Stem, Stretch
from bloomery.models.config import DecoderConfig, RecurrentConfig


class Beginning(NamedTuple):
    """The states before a chunk, and the rows of it that are known."""

    stretch: Stretch
    states_N: Tensor
    tails_NLX: Tensor


class States:
    """Of all running samples, by slot. What nobody wrote is zeros: rows that are not there are multiplied by zero, which a NaN would survive."""

    def __init__(self, config: DecoderConfig, recurrent: RecurrentConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.rows, self.earlier = recurrent.chunk_rows, recurrent.conv_width - 1
        layers = len(config.state_layers)
        self.states_NS = torch.zeros(layers, 0, *recurrent.state_shape, device=device)
        self.tails_NSLX = torch.zeros(layers, 0, self.earlier + self.rows, recurrent.row_width, dtype=dtype, device=device)
        self._marks: dict[Stem, Beginning] = {}

    @staticmethod
    def bytes_per_sequence(config: DecoderConfig, dtype: torch.dtype) -> int:
        """Of a state and its tail in all layers."""
        recurrent = config.recurrent
        if recurrent is None:
            return 0
        tail = (recurrent.conv_width - 1 + recurrent.chunk_rows) * recurrent.row_width * dtype.itemsize
        return len(config.state_layers) * (math.prod(recurrent.state_shape) * torch.float32.itemsize + tail)

    def resize(self, slots: int) -> None:
        """Have so many slots, and what lies in those that stay."""
        for name in ("states_NS", "tails_NSLX"):
            old = getattr(self, name)
            new = old.new_zeros(old.shape[0], slots, *old.shape[2:])
            kept = min(slots, old.shape[1])
            new[:, :kept] = old[:, :kept]
            setattr(self, name, new)

    def move(self, source: int, target: int) -> None:
        """From one slot to another."""
        self.states_NS[:, target] = self.states_NS[:, source]
        self.tails_NSLX[:, target] = self.tails_NSLX[:, source]

    def clear(self, slot: int) -> None:
        """Of a sample that leaves."""
        self.states_NS[:, slot] = 0
        self.tails_NSLX[:, slot] = 0

    def beginning(self, slot: int, tokens: int) -> Beginning:
        """A copy of where a sample stands, of whose rows in this chunk those of so many leading tokens count."""
        return Beginning(Stretch(tokens // self.rows * self.rows, tokens), self.states_NS[:, slot].clone(), self.tails_NSLX[:, slot].clone())

    def begin(self, slot: int, beginning: Beginning, tokens: int) -> None:
        """Give an empty slot what a sequence of so many tokens has, of one that begins alike."""
        rows = self.earlier + tokens - beginning.stretch.first
        self.states_NS[:, slot] = beginning.states_N
        self.tails_NSLX[:, slot, :rows] = beginning.tails_NLX[:, :rows]

    def mark(self, stem: Stem, slot: int, shared: int) -> None:
        """Remember where a prompt ends, unless a sibling did."""
        if stem not in self._marks:
            self._marks[stem] = self.beginning(slot, shared)

    def marked(self, stem: Stem) -> Beginning | None:
        """Where a prompt ends, if a sample has left that chunk."""
        return self._marks.get(stem)

    def retain_marks(self, stems: Collection[Stem]) -> None:
        """Forget where all other prompts end."""
        self._marks = {stem: mark for stem, mark in self._marks.items() if stem in stems}
