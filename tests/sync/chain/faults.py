"""A store that is slow, forgetful or lies, as a test says, around one that is not."""

import threading
from collections import Counter
from collections.abc import Callable

from bloomery.sync.chain import lease as leases
from bloomery.types.errors import Unavailable
from bloomery.types.objects import Objects
from tests.live import wait_until

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


class Broken:
    """A store whose answers to the next conditional writes are lost."""

    def __init__(self, inner: Objects) -> None:
        self.inner, self.name, self.lost = inner, inner.name, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def create(self, key: str, data: bytes) -> str | None:
        return self._unheard(self.inner.create(key, data))

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        return self._unheard(self.inner.replace(key, data, tag))

    def _unheard(self, found: str | None) -> str | None:
        if self.lost:
            self.lost -= 1
            raise Unavailable("the answer was lost")
        return found


class Slow:
    """A store that takes longer than the term of a lease for an object that is put or deleted, unless the lease is renewed meanwhile."""

    def __init__(self, inner: Objects, wait_s: float) -> None:
        """It waits so long at most for a renewal."""
        self.inner, self.name, self._wait_s = inner, inner.name, wait_s
        self.waited = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.inner.put(key, data)
        self._renewed(key)

    def delete(self, key: str) -> None:
        self.inner.delete(key)
        self._renewed(key)

    def _renewed(self, key: str) -> None:
        if key.startswith("obj/"):
            before = self.inner.get(leases.KEY, at_most=1000)[1]
            wait_until(lambda: self.inner.get(leases.KEY, at_most=1000)[1] != before, self._wait_s)
            self.waited += 1
