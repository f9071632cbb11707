"""How many threads compute a sampling step: all of the engine's, or one.

Threads that compute a small product together wait for each other, and where an api, a client or a trainer want the same processors they wait longer
than they compute: with two processors steps of a small model took 2.2 times as long with two threads as with one, and on the idle machine 0.85 times
as long. What is faster depends on who else runs, so it is measured all the time; `Form.one_thread` says that the bits do not depend on it.
"""

from typing import Final

_TRY_EVERY: Final = 48
"""Steps between two with the number that was slower: what they may lose is little, and the company changes."""
_WEIGHT: Final = 0.3
"""Of the newest step in the mean."""
_MOST: Final = 2.0
"""Means that one step counts as at most: those that somebody interrupted say little."""


class StepThreads:
    """Remembers how long steps took, apart for each power of two of samples."""

    def __init__(self, threads: int, *, one_thread: bool) -> None:
        """`one_thread`: whether that is a choice."""
        self._choices = (threads, 1) if one_thread and threads > 1 else (threads,)
        self._begun: set[tuple[int, int]] = set()
        """Whose first step was taken; it prepares what the others find, and does not count."""
        self._mean_s: dict[tuple[int, int], float] = {}
        self._since: dict[int, int] = {}

    def choose(self, samples: int) -> int:
        """For a step of so many samples."""
        size = samples.bit_length()
        faster = min(self._choices, key=lambda threads: self._mean_s.get((size, threads), 0.0))
        self._since[size] = self._since.get(size, 0) + 1
        if self._since[size] < _TRY_EVERY:
            return faster
        self._since[size] = 0
        return next((threads for threads in self._choices if threads != faster), faster)

    def took(self, samples: int, threads: int, seconds: float) -> None:
        """A step did."""
        key = samples.bit_length(), threads
        if key not in self._begun:
            self._begun.add(key)
            return
        mean_s = self._mean_s.get(key, seconds)
        self._mean_s[key] = mean_s + _WEIGHT * (min(seconds, _MOST * mean_s) - mean_s)
