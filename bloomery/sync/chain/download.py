"""Objects of a store as whole, verified files of a folder: in ranges, several at a time, slow ones asked for twice, what was fetched kept.

A range that takes longer than 19 of 20 did is asked for once more, and whoever answers first is taken. Which ranges a file has stands beside it, so
a process that was killed goes on where it was. What is whole is held against its hash, and only then has its name; what is not what its name says is
fetched once more from the beginning, for a machine that lost power may have ranges in the list that it has not in the file.

Memory: at most `at_once` ranges of `range_bytes` are in hand, and as many again that were asked for twice.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from blake3 import blake3

from bloomery.obs.failpoints import failpoint
from bloomery.sync.chain.objects import MAX_BYTES, Ref
from bloomery.types.errors import Corrupt, Unavailable
from bloomery.types.objects import Objects

_LATENCIES: Final = 128
"""As many as the slowest of twenty is told from."""
_ENOUGH: Final = 8
"""Latencies before they tell anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchConfig:
    """How objects are fetched."""

    range_bytes: int = 16 << 20
    at_once: int = 4
    hedge_first_s: float = 2.0
    """When a range is asked for twice while nothing is known of how long others take."""
    hedge_least_s: float = 0.02
    """No range is asked for twice earlier."""
    deadline_s: float = 120.0
    """For one range, from the moment that it is asked for: an object may take as long as it is large."""

    @property
    def memory_bytes(self) -> int:
        """What is held of ranges at most."""
        return 2 * self.at_once * self.range_bytes


class Downloads:
    """A folder of verified objects. Close it: its threads end with their requests."""

    def __init__(
        self, objects: Objects, folder: Path, config: FetchConfig, *, at_most: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """An object of more than `at_most` bytes is refused before it is asked for."""
        self.fetched_bytes = 0
        """Of ranges that were taken, from the beginning."""
        self.hedged = 0
        """Ranges that were asked for twice."""
        self._objects, self._folder, self._config, self._at_most, self._clock = objects, folder, config, at_most, clock
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)
        self._workers = ThreadPoolExecutor(config.at_once, "range")
        self._requests = ThreadPoolExecutor(2 * config.at_once, "request")
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Requests that nobody waits for end by their own deadlines."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._requests.shutdown(wait=False, cancel_futures=True)

    def fetch(self, ref: Ref) -> Path:
        """The object as a file, whose bytes were just held against its name. NotFound, Corrupt or Unavailable name the store and the object."""
        if ref.size > self._at_most:
            raise Corrupt(
                f"{self._objects.name}: `{ref.key}` is named with {ref.size} bytes, and no object of these weights has more than {self._at_most}"
            )
        path = self._folder / ref.blake3
        if path.exists():
            if _matches(path, ref):
                return path
            path.unlink()
        resumed = self._fill(ref)
        if not _matches(self._partial(ref), ref):
            self._forget(ref)
            if resumed:
                self._fill(ref)
            if not resumed or not _matches(self._partial(ref), ref):
                self._forget(ref)
                raise Corrupt(f"{self._objects.name}: `{ref.key}` is not what its name says: it is damaged")
        failpoint("chain.download.whole")
        self._partial(ref).replace(path)
        self._ranges(ref).unlink(missing_ok=True)
        return path

    def keep_only(self, refs: Iterable[Ref]) -> None:
        """Remove all files but those of these objects."""
        kept = {ref.blake3 for ref in refs}
        for path in self._folder.iterdir():
            if path.name.partition(".")[0] not in kept:
                path.unlink(missing_ok=True)

    def _fill(self, ref: Ref) -> bool:
        """Fetch the ranges that are missing; whether there were some."""
        here = self._resumable(ref)
        missing = [place for place in range(math.ceil(ref.size / self._config.range_bytes)) if place not in here]
        with self._partial(ref).open("r+b") as file, self._ranges(ref).open("a") as ranges:
            tasks = [self._workers.submit(self._one, ref, place, file.fileno()) for place in missing]
            try:
                for task in tasks:
                    # Each ends by a deadline of its own.
                    place = task.result()
                    self.fetched_bytes += min(self._config.range_bytes, ref.size - place * self._config.range_bytes)
                    ranges.write(f"{self._config.range_bytes} {place}\n")
                    ranges.flush()
                    failpoint("chain.download.range")
            finally:
                for task in tasks:
                    task.cancel()
                # The file must not close under a thread that writes to it.
                wait(tasks)
        return bool(here)

    def _one(self, ref: Ref, place: int, handle: int) -> int:
        start = place * self._config.range_bytes
        data = self._hedged(ref, start, min(start + self._config.range_bytes, ref.size))
        written = 0
        while written < len(data):
            written += os.pwrite(handle, memoryview(data)[written:], start + written)
        return place

    def _hedged(self, ref: Ref, start: int, stop: int) -> bytes:
        began = self._clock()
        deadline = began + self._config.deadline_s
        first = self._requests.submit(self._objects.part, ref.key, start, stop)
        done, waiting = wait([first], timeout=min(self._patience_s(), self._config.deadline_s))
        if waiting:
            self.hedged += 1
            waiting.add(self._requests.submit(self._objects.part, ref.key, start, stop))
        while True:
            answered = [each for each in done if each.exception() is None]
            if answered:
                self._latencies.append(self._clock() - began)
                return answered[0].result()
            if not waiting:
                # All refused; what the last one said is said.
                done.pop().result()
            if self._clock() >= deadline:
                raise Unavailable(f"{self._objects.name}: `{ref.key}`: bytes {start} to {stop} did not come within {self._config.deadline_s:g} s")
            done, waiting = wait(waiting, timeout=max(0.0, deadline - self._clock()), return_when=FIRST_COMPLETED)

    def _patience_s(self) -> float:
        if len(self._latencies) < _ENOUGH:
            return self._config.hedge_first_s
        in_order = sorted(self._latencies)
        return max(self._config.hedge_least_s, in_order[int(0.95 * (len(in_order) - 1))])

    def _resumable(self, ref: Ref) -> set[int]:
        """Ranges that the partial file has; it is made where there is none."""
        partial = self._partial(ref)
        if not partial.exists() or partial.stat().st_size != ref.size:
            self._forget(ref)
            with partial.open("wb") as file:
                file.truncate(ref.size)
            return set()
        with suppress(FileNotFoundError):
            lines = self._ranges(ref).read_text().split("\n")[:-1]
            pairs = (line.split() for line in lines)
            return {int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == str(self._config.range_bytes)}
        return set()

    def _forget(self, ref: Ref) -> None:
        self._partial(ref).unlink(missing_ok=True)
        self._ranges(ref).unlink(missing_ok=True)

    def _partial(self, ref: Ref) -> Path:
        return self._folder / f"{ref.blake3}.part"

    def _ranges(self, ref: Ref) -> Path:
        return self._folder / f"{ref.blake3}.ranges"


def _matches(path: Path, ref: Ref) -> bool:
    return path.stat().st_size == ref.size and blake3().update_mmap(path).hexdigest() == ref.blake3
