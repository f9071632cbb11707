"""Near-duplicates of texts: overlapping character shingles, candidates by min-hash bands, a verdict by the exact Jaccard similarity."""

import re
from typing import Final

import numpy as np
import numpy.typing as npt

SIMILAR: Final = 0.8
_SHINGLE: Final = 5
_BANDS: Final = 16
_ROWS: Final = 4
"""At a similarity of 0.8 a pair shares one of 16 bands of 4 rows with probability 0.9998."""
_AT_ONCE: Final = 1 << 12
"""Shingles whose hashes are in memory together: a row may be megabytes of text."""

# Fixed, so that equal texts get equal shingles and bands in every process.
_RANDOM: Final = np.random.default_rng(20)
_MULTIPLIERS: Final = _RANDOM.integers(1, 1 << 63, _BANDS * _ROWS, dtype=np.uint64) | np.uint64(1)
"""Odd multipliers of a multiply-shift hash family."""
_PLACES: Final = _RANDOM.integers(1, 1 << 63, _SHINGLE, dtype=np.uint64) | np.uint64(1)
_MIXERS: Final = _RANDOM.integers(1, 1 << 63, (_BANDS, _ROWS), dtype=np.uint64) | np.uint64(1)

Shingles = npt.NDArray[np.uint32]


class NearDuplicates:
    """A set of texts that can be asked whether it holds something very much like another text."""

    def __init__(self) -> None:
        self._members: list[Shingles] = []
        self._buckets: dict[int, int | list[int]] = {}

    def add(self, text: str) -> None:
        """Remember a text."""
        shingles = shingles_of(text)
        number = len(self._members)
        for bucket in bands_of(shingles).tolist():
            # Most hold one: a list for each would take several times the memory.
            held = self._buckets.setdefault(bucket, number)
            if isinstance(held, list):
                held.append(number)
            elif held != number:
                self._buckets[bucket] = [held, number]
        self._members.append(shingles)

    def has(self, text: str) -> bool:
        """Whether a remembered text is at least `SIMILAR` to this one."""
        if not self._members:
            return False
        shingles = shingles_of(text)
        candidates: set[int] = set()
        for bucket in bands_of(shingles).tolist():
            held = self._buckets.get(bucket, ())
            candidates.update((held,) if isinstance(held, int) else held)
        return any(jaccard(shingles, self._members[member]) >= SIMILAR for member in candidates)


def shingles_of(text: str) -> Shingles:
    """Hashes of all runs of five characters, each once and in order; letters and digits only, case and spacing ignored."""
    plain = re.sub(r"\W+", " ", text.casefold()).strip()
    codes = np.frombuffer(plain.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    if len(codes) < _SHINGLE:
        codes = np.pad(codes, (0, _SHINGLE - len(codes)))
    runs = len(codes) - _SHINGLE + 1
    hashes = np.zeros(runs, dtype=np.uint64)
    for place, multiplier in enumerate(_PLACES):
        hashes += codes[place : place + runs] * multiplier
    found = (hashes >> np.uint64(32)).astype(np.uint32)
    found.sort()
    # As `unique` does, which takes several times as long for so few.
    return found[np.concatenate(([True], found[1:] != found[:-1]))]


def jaccard(left: Shingles, right: Shingles) -> float:
    """Shared over all."""
    shared = len(np.intersect1d(left, right, assume_unique=True))
    return shared / (len(left) + len(right) - shared)


def bands_of(shingles: Shingles) -> npt.NDArray[np.uint64]:
    """Texts that are similar share one of these numbers, almost certainly; others seldom do."""
    signature = np.full(_BANDS * _ROWS, np.iinfo(np.uint64).max, dtype=np.uint64)
    for start in range(0, len(shingles), _AT_ONCE):
        hashes = shingles[start : start + _AT_ONCE, None].astype(np.uint64) * _MULTIPLIERS[None, :] >> np.uint64(32)
        signature = np.minimum(signature, hashes.min(axis=0))
    mixed: npt.NDArray[np.uint64] = (signature.reshape(_BANDS, _ROWS) * _MIXERS).sum(axis=1, dtype=np.uint64)
    return mixed
