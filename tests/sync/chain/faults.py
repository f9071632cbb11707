"""A store that is slow, forgetful or lies, as a test says, around one that is not."""

import threading
from collections import Counter
from collections.abc import Callable

from bloomery.types.objects import Objects

Part = Callable[[str, int, int], bytes]


class Faulty:
    """`part` of what is read is what `reads` makes of it; everything is counted."""

    def __init__(self, inner: Objects, reads: Callable[[Part, str, int, int], bytes] | None = None) -> None:
        self.inner, self.name = inner, inner.name
        self.reads = reads
        self.parts: Counter[tuple[str, int]] = Counter()
        self.bytes = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def part(self, key: str, start: int, stop: int) -> bytes:
        with self._lock:
            self.parts[key, start] += 1
        data = self.inner.part(key, start, stop) if self.reads is None else self.reads(self.inner.part, key, start, stop)
        with self._lock:
            self.bytes += len(data)
        return data
