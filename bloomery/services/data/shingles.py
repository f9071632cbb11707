"""Near-duplicates of texts: overlapping character shingles, candidates by min-hash bands, a verdict by the exact Jaccard similarity.

Texts that have a template in common share bands without being near-duplicates. Such a `_Crowd` is not compared one by one: what a text has of the
rarest shingles of another bounds how similar both can be, for all of them at once, and hardly any is left to be compared.
"""

import re
from typing import Final

import numpy as np
import numpy.typing as npt

SIMILAR: Final = 0.8
_SHINGLE: Final = 5
_BANDS: Final = 16
_ROWS: Final = 4
"""At a similarity of 0.8 a pair shares one of 16 bands of 4 rows with probability 0.9998."""
CROWD: Final = 4
"""Texts that share a band and are compared one by one; more are a crowd."""
_RAREST: Final = 4
"""Of a crowd's shingles so many places for each of its texts are looked at before any text is compared."""
_FEW: Final = 256
"""Texts that are compared one by one sooner than all places of a crowd's shingles are looked at."""
_PLACES_AT_ONCE: Final = 1 << 18
"""Of a crowd's shingles whose owners are in memory together."""
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

    def __init__(self, crowd: int = CROWD) -> None:
        self._members: list[Shingles] = []
        self._most = crowd
        self._buckets: dict[int, int | list[int]] = {}
        self._crowded: set[int] = set()
        """Bands that crowds have, which are in no bucket any more."""
        self._crowd = _Crowd()

    def add(self, text: str) -> None:
        """Remember a text."""
        shingles = shingles_of(text)
        number = len(self._members)
        self._members.append(shingles)
        for bucket in bands_of(shingles).tolist():
            if bucket in self._crowded:
                self._crowd.add(number, shingles)
                continue
            # Most hold one: a list for each would take several times the memory.
            held = self._buckets.setdefault(bucket, number)
            if isinstance(held, list):
                held.append(number)
                if len(held) > self._most:
                    self._gather(bucket)
            elif held != number:
                self._buckets[bucket] = [held, number]

    def has(self, text: str) -> bool:
        """Whether a remembered text is at least `SIMILAR` to this one."""
        if not self._members:
            return False
        shingles = shingles_of(text)
        bands = bands_of(shingles).tolist()
        candidates: set[int] = set()
        for bucket in bands:
            held = self._buckets.get(bucket, ())
            candidates.update((held,) if isinstance(held, int) else held)
        if any(jaccard(shingles, self._members[member]) >= SIMILAR for member in candidates):
            return True
        return not self._crowded.isdisjoint(bands) and self._crowd.has(shingles)

    def _gather(self, bucket: int) -> None:
        held = self._buckets.pop(bucket)
        assert isinstance(held, list)
        self._crowded.add(bucket)
        for number in held:
            self._crowd.add(number, self._members[number])


class _Crowd:
    """Texts that are much alike. Those that were added since it was asked last are indexed when it is asked again, in parts that double."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._fresh: list[Shingles] = []
        self._parts: list[_Part] = []

    def add(self, number: int, shingles: Shingles) -> None:
        """Once, however many bands say so."""
        if number not in self._numbers:
            self._numbers.add(number)
            self._fresh.append(shingles)

    def has(self, shingles: Shingles) -> bool:
        """Exactly, whatever bands there are."""
        if self._fresh:
            members, self._fresh = self._fresh, []
            while self._parts and len(self._parts[-1].members) <= len(members):
                members = self._parts.pop().members + members
            self._parts.append(_Part(members))
        return any(part.has(shingles) for part in self._parts)


class _Part:
    """M texts, and the places of each shingle among them: P in all, in the order of shingles."""

    def __init__(self, members: list[Shingles]) -> None:
        self.members = members
        self._sizes_M = np.array([len(member) for member in members])
        shingles_P = np.concatenate(members)
        order_P = np.argsort(shingles_P, kind="stable")
        self._shingles_P = shingles_P[order_P]
        self._owners_P = np.repeat(np.arange(len(members), dtype=np.int32), self._sizes_M)[order_P]

    def has(self, shingles: Shingles) -> bool:
        """Whether some text is at least `SIMILAR`."""
        begins, ends = (np.searchsorted(self._shingles_P, shingles, side) for side in ("left", "right"))
        rarest = np.argsort(ends - begins, kind="stable")
        room = _RAREST * len(self.members)
        looked_at = int(np.searchsorted(np.cumsum((ends - begins)[rarest]), room, "right"))
        shared_M = self._shared(begins, ends, rarest[:looked_at])
        # A text may have all shingles that were not looked at, and has no more than it has.
        most_M = np.minimum(shared_M + (len(shingles) - looked_at), self._sizes_M)
        left = np.flatnonzero(self._similarity(most_M, len(shingles)) >= SIMILAR)
        if len(left) <= _FEW:
            return any(jaccard(shingles, self.members[member]) >= SIMILAR for member in left.tolist())
        shared_M += self._shared(begins, ends, rarest[looked_at:])
        return bool((self._similarity(shared_M, len(shingles)) >= SIMILAR).any())

    def _shared(self, begins: npt.NDArray[np.intp], ends: npt.NDArray[np.intp], chosen: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """How many of the chosen shingles, rarest first, each text has."""
        shared_M = np.zeros(len(self.members), dtype=np.int64)
        places = np.cumsum((ends - begins)[chosen])
        start = 0
        while start < len(chosen):
            before = places[start - 1] if start else 0
            end = max(start + 1, int(np.searchsorted(places, before + _PLACES_AT_ONCE, "right")))
            first, last = begins[chosen[start:end]], ends[chosen[start:end]]
            # Places from the first to the last of each shingle, one behind the other.
            within = np.arange(int(places[end - 1] - before)) - np.repeat(places[start:end] - (last - first) - before, last - first)
            owners = self._owners_P[np.repeat(first, last - first) + within]
            shared_M += np.bincount(owners, minlength=len(self.members))
            start = end
        return shared_M

    def _similarity(self, shared_M: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = shared_M / (size + self._sizes_M - shared_M)
        return found


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
