"""Rows that attend, as kernels are told of them.

Shapes: N spans, S slots, M blocks of each slot.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Spans(NamedTuple):
    """Rows that attend: tokens that stand in neighbouring rows, one behind the other in the sequence of a slot."""

    places_N4: Tensor
    """First row, slot, position of the first token, tokens."""
    longest: int
    """Places that the longest of the sequences may take."""
    tokens: int
    tables_SM: Tensor | None
    """The blocks of each slot's sequence, in order, `BLOCK_PLACES` places each; without it a slot is where a sequence in one piece begins."""
    copies: dict[tuple[str, int], Tensor]
    """What a GPU was given of them, for all layers of a pass."""

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int, int, int]]) -> Self:
        """From first rows, slots, positions and numbers of tokens."""
        return cls(torch.tensor(spans), max(start + count for _, _, start, count in spans), sum(count for _, _, _, count in spans), None, {})
