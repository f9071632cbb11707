"""How many rows and keys stand for how many tokens, so that nobody's numbers depend on company.

A sequence of n tokens occupies `pad_to(n, ROW_PAD)` rows, so every sequence starts at a multiple of `ROW_PAD`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ROW_PAD = 4
"""Matrix products give a row the same bits for any number of rows that is a multiple of this."""
KEY_PAD = 512
"""Attention gives a query the same bits for any number of keys that is a multiple of this (the CPU kernel's key block)."""
LENGTH_PAD = 128
"""Attention computes sequences whose lengths agree up to this together; short ones are told apart further."""

BLOCK_PLACES = 32
"""Tokens whose keys and values lie together in a sampler's memory: a sequence has as many such blocks as it needs, wherever they are."""


def pad_to(count: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def split(lengths: Sequence[int], budget: int) -> list[slice]:
    """Consecutive sequences whose rows fit the budget, by their lengths and the budget alone; one that is longer goes alone."""
    parts, start, rows = [], 0, 0
    for index, length in enumerate(lengths):
        padded = pad_to(length, ROW_PAD)
        if index > start and rows + padded > budget:
            parts.append(slice(start, index))
            start, rows = index, 0
        rows += padded
    return [*parts, slice(start, len(lengths))]


def packed_starts(lengths: Sequence[int]) -> list[int]:
    """First row of each sequence, and the total number of rows at the end."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + pad_to(length, ROW_PAD))
    return starts


def packed_positions(lengths: Sequence[int]) -> Tensor:
    """Position of every packed row in its sequence [R]; pad rows count on."""
    return torch.cat([torch.arange(pad_to(length, ROW_PAD)) for length in lengths])
