"""Near-duplicates of texts: overlapping character shingles, candidates by min-hash bands, a verdict by the exact Jaccard similarity."""

import re
import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

SIMILAR: Final = 0.8
_SHINGLE: Final = 5
_BANDS: Final = 16
_ROWS: Final = 4
"""At a similarity of 0.8 a pair shares one of 16 bands of 4 rows with probability 0.9998."""

# Odd multipliers of a multiply-shift hash family, fixed so that equal texts get equal bands in every process.
_MULTIPLIERS: Final = np.random.default_rng(20).integers(1, 1 << 63, _BANDS * _ROWS, dtype=np.uint64) | np.uint64(1)


class NearDuplicates:
    """A set of texts that can be asked whether it holds something very much like another text."""

    def __init__(self) -> None:
        self._members: list[frozenset[int]] = []
        self._buckets: dict[tuple[int, bytes], list[int]] = {}

    def add(self, text: str) -> None:
        """Remember a text."""
        shingles = shingles_of(text)
        for bucket in _buckets_of(shingles):
            self._buckets.setdefault(bucket, []).append(len(self._members))
        self._members.append(shingles)

    def has(self, text: str) -> bool:
        """Whether a remembered text is at least `SIMILAR` to this one."""
        shingles = shingles_of(text)
        candidates = {member for bucket in _buckets_of(shingles) for member in self._buckets.get(bucket, ())}
        return any(jaccard(shingles, self._members[member]) >= SIMILAR for member in candidates)


def shingles_of(text: str) -> frozenset[int]:
    """Hashes of all runs of five characters, letters and digits only, case and spacing ignored."""
    plain = re.sub(r"\W+", " ", text.casefold()).strip()
    starts = range(max(1, len(plain) - _SHINGLE + 1))
    return frozenset(zlib.crc32(plain[start : start + _SHINGLE].encode("utf-8", "replace")) for start in starts)


def jaccard(left: frozenset[int], right: frozenset[int]) -> float:
    """Shared over all."""
    shared = len(left & right)
    return shared / (len(left) + len(right) - shared)


def _buckets_of(shingles: frozenset[int]) -> list[tuple[int, bytes]]:
    hashes: npt.NDArray[np.uint64] = np.fromiter(shingles, dtype=np.uint64, count=len(shingles))
    signature = (hashes[:, None] * _MULTIPLIERS[None, :] >> np.uint64(32)).min(axis=0)
    return [(band, signature[band * _ROWS : (band + 1) * _ROWS].tobytes()) for band in range(_BANDS)]
