"""Training rows divided by group: the side of a group follows from its hash, and rows that are nearly the same are of one group.

Rows that share a band of their shingles are compared with the first that has it, so that a pair may be missed where many are alike; what is
assembled is held against what is held out once more (`dataset_rows`), and nothing near it stays in `train`.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from bloomery.services.data.dataset_rows import HELD_OUT
from bloomery.services.data.row import group_of
from bloomery.services.data.shingles import SIMILAR, Shingles, bands_of, jaccard, shingles_of
from bloomery.services.data.stored_rows import Spool
from bloomery.types.datasets import SplitChoice
from bloomery.types.resources import Split

_COMPARED: Final = 1024
"""Rows whose shingles are kept for the next comparison."""


class Divided(NamedTuple):
    """The rows by split, and how many groups and rows went where."""

    splits: dict[Split, Spool]
    counts: dict[str, int]


def divide(rows: Spool, choice: SplitChoice, pinned: Mapping[str, Split], stack: ExitStack, scratch: Path | None = None) -> Divided:
    """Each row in one of the three splits. Groups that are `pinned` stay where they are, and take what is like them along."""
    groups = [row.group or group_of(row.prompt) for row in rows]
    joined = _join(rows, groups)
    sides = _sides(groups, joined, choice, pinned)
    splits: dict[Split, Spool] = {split: stack.enter_context(Spool(scratch)) for split in ("train", *HELD_OUT)}
    for number, row in enumerate(rows):
        splits[sides[joined.find(number)]].append(row)
    roots = Counter(joined.find(number) for number in range(len(rows)))
    counts = {"split.groups": len(set(groups)), "split.unlike_groups": len(roots), "split.largest_group": max(roots.values(), default=0)}
    return Divided(splits, counts | {f"split.{split}": len(kept) for split, kept in splits.items()})


class _Joined:
    """Numbers that belong together."""

    def __init__(self, count: int) -> None:
        self._above = list(range(count))

    def find(self, number: int) -> int:
        above = self._above
        while above[number] != number:
            above[number] = above[above[number]]
            number = above[number]
        return number

    def join(self, left: int, right: int) -> None:
        first, second = sorted((self.find(left), self.find(right)))
        self._above[second] = first


def _join(rows: Spool, groups: list[str]) -> _Joined:
    joined = _Joined(len(rows))
    first: dict[str, int] = {}
    for number, group in enumerate(groups):
        joined.join(first.setdefault(group, number), number)
    bands = np.empty((len(rows), len(bands_of(shingles_of("")))), dtype=np.uint64)
    for number, row in enumerate(rows):
        bands[number] = bands_of(shingles_of(row.prompt))

    @lru_cache(_COMPARED)
    def shingles(number: int) -> Shingles:
        return shingles_of(rows[number].prompt)

    for number, firsts in enumerate(_firsts(bands)):
        for first_number in set(firsts.tolist()) - {number}:
            if joined.find(first_number) != joined.find(number) and jaccard(shingles(first_number), shingles(number)) >= SIMILAR:
                joined.join(first_number, number)
    return joined


def _firsts(bands: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Of each row and band the first row that has it."""
    firsts = np.empty(bands.shape, dtype=np.int64)
    for band, first in zip(bands.T, firsts.T, strict=True):
        order = np.argsort(band, kind="stable")
        begins = np.concatenate(([True], band[order][1:] != band[order][:-1]))
        first[order] = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
    return firsts


def _sides(groups: list[str], joined: _Joined, choice: SplitChoice, pinned: Mapping[str, Split]) -> dict[int, Split]:
    names: dict[int, str] = {}
    held: dict[int, Split] = {}
    for number, group in enumerate(groups):
        root = joined.find(number)
        names[root] = min(group, names.get(root, group))
        if (split := pinned.get(group)) is not None:
            held.setdefault(root, split)
    return {root: held.get(root) or _side(name, choice) for root, name in names.items()}


def _side(name: str, choice: SplitChoice) -> Split:
    # Hashed again: the smallest of many hashes is no even draw.
    place = int.from_bytes(blake3(f"split {name}".encode()).digest(8), "big") / 2**64
    if place < choice.eval:
        return "eval"
    return "validation" if place < choice.eval + choice.validation else "train"
