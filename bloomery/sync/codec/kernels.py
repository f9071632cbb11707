"""Who computes for the codecs, decided in one place: C where it can be compiled, numpy where it cannot. Bytes are the same."""

from typing import Final, Protocol

from bloomery.sync.codec import plain, plain_tight
from bloomery.sync.codec.native import NATIVE
from bloomery.sync.codec.numbers import Differences, Number
from bloomery.sync.codec.plain import Streams
from bloomery.sync.state_hash import Bits


class Kernels(Protocol):
    """What there is to compute; see `plain` and `plain_tight`."""

    def find(self, old: Bits, new: Bits, kind: Number) -> Differences: ...

    def moved(self, old: Bits, differences: Differences, kind: Number) -> Bits: ...

    def pack(self, differences: Differences, kind: Number) -> Streams: ...

    def unpack(self, streams: Streams, count: int, kind: Number) -> Differences: ...

    def pack_tight(self, old: Bits, found: Differences, kind: Number) -> bytes: ...

    def unpack_tight(self, payload: memoryview, old: Bits, kind: Number) -> Differences: ...


class Plain:
    """In numpy."""

    find = staticmethod(plain.find)
    moved = staticmethod(plain.moved)
    pack = staticmethod(plain.pack)
    unpack = staticmethod(plain.unpack)
    pack_tight = staticmethod(plain_tight.pack)
    unpack_tight = staticmethod(plain_tight.unpack)


PLAIN: Final = Plain()


def kernels() -> Kernels:
    """Those of this process."""
    return NATIVE if NATIVE.there else PLAIN
