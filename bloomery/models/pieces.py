"""Many small tensors at a time: what is done to each of them costs mostly the call. No arithmetic here."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

import torch
from torch import Tensor

SMALL_ELEMENTS: Final = 1 << 16
"""What is copied in the time of some calls; more is better left where it lies."""


def runs(numels: Sequence[int], most: int) -> Iterator[range]:
    """Neighbours that have no more elements together than `most`, or one that has more alone."""
    start, total = 0, 0
    for stop, numel in enumerate(numels):
        if stop > start and total + numel > most:
            yield range(start, stop)
            start, total = stop, 0
        total += numel
    if start < len(numels):
        yield range(start, len(numels))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Their elements one after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)


def in_pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The elements of all tensors in their order, small neighbours of one dtype together."""
    for _, alike in groupby(tensors, key=lambda tensor: tensor.dtype):
        own = list(alike)
        for run in runs([tensor.numel() for tensor in own], SMALL_ELEMENTS):
            yield joined(own[run.start : run.stop])
