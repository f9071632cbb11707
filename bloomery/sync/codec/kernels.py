"""Who computes for the codecs, decided in one place: C where it can be compiled, else numba where it is installed, else numpy. Bytes are the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
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


_ONLY: Final[ContextVar[Kernels | None]] = ContextVar("kernels", default=None)


def chosen() -> Kernels:
    """Those of this process, or of this context."""
    return _ONLY.get() or _fastest()


@contextmanager
def only(computing: Kernels) -> Iterator[None]:
    """Have these compute, in this context: for who compares them."""
    token = _ONLY.set(computing)
    try:
        yield
    finally:
        _ONLY.reset(token)


def available() -> dict[str, Kernels]:
    """All that there are here, the fastest first."""
    found: dict[str, Kernels] = {"native": NATIVE} if NATIVE.there else {}
    if (jitted := _jitted()) is not None:
        found["numba"] = jitted
    return found | {"numpy": PLAIN}


@cache
def _fastest() -> Kernels:
    return NATIVE if NATIVE.there else _jitted() or PLAIN


@cache
def _jitted() -> Kernels | None:
    if find_spec("numba") is None:
        return None
    # An extra, which takes half a second where it is.
    from bloomery.sync.codec.jitted import Jitted

    return Jitted()


def find(old: Bits, new: Bits, kind: Number) -> Differences:
    """Where and by how much `new` differs."""
    return chosen().find(old, new, kind)


def moved(old: Bits, differences: Differences, kind: Number) -> Bits:
    """The new bits [n] of elements that changed; IndexError for any behind the last."""
    return chosen().moved(old, differences, kind)


def pack(differences: Differences, kind: Number) -> Streams:
    """The streams of `fast`."""
    return chosen().pack(differences, kind)


def unpack(streams: Streams, count: int, kind: Number) -> Differences:
    """What they say of `count` elements; Corrupt where they say nothing."""
    return chosen().unpack(streams, count, kind)


def pack_tight(old: Bits, found: Differences, kind: Number) -> bytes:
    """The payload of `tight`, of at least one change."""
    return chosen().pack_tight(old, found, kind)


def unpack_tight(payload: memoryview, old: Bits, kind: Number) -> Differences:
    """What it says; Corrupt where it says nothing."""
    return chosen().unpack_tight(payload, old, kind)
