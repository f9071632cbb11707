"""Who computes for the codecs, decided in one place: C where it can be compiled, else numba where it is installed, else numpy. Bytes are the same."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from bloomery.sync.codec import plain, plain_tight
from bloomery.sync.codec.native import NATIVE
from bloomery.sync.codec.numbers import Changes, Differences, Number
from bloomery.sync.codec.plain import Streams
from bloomery.sync.state_hash import Bits, StateHash


class Kernels(Protocol):
    """What there is to compute; see `plain` and `plain_tight`."""

    def find(self, old: Bits, new: Bits, kind: Number) -> Differences: ...

    def pack(self, differences: Differences, kind: Number) -> Streams: ...

    def unpack(self, streams: Streams, count: int, kind: Number) -> Differences: ...

    def pack_tight(self, old: Bits, found: Differences, kind: Number) -> bytes: ...

    def decode(self, streams: Streams, old: Bits, kind: Number, first: int, state: StateHash) -> Changes: ...

    def decode_fast(self, payload: memoryview, old: Bits, kind: Number, first: int, state: StateHash) -> Changes: ...

    def decode_tight(self, payload: memoryview, old: Bits, kind: Number, first: int, state: StateHash) -> Changes: ...

    def put(self, flat: Bits, first: int, indices: NDArray[np.uint32], values: Bits) -> None: ...


class Plain:
    """In numpy."""

    find = staticmethod(plain.find)
    pack = staticmethod(plain.pack)
    unpack = staticmethod(plain.unpack)
    pack_tight = staticmethod(plain_tight.pack)
    decode = staticmethod(plain.decode)
    decode_fast = staticmethod(plain.decode_fast)
    decode_tight = staticmethod(plain_tight.decode)
    put = staticmethod(plain.put)


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
    if find_spec("numba") is None or sys.byteorder != "little":
        return None
    # An extra, which takes half a second where it is.
    from bloomery.sync.codec.jitted import Jitted

    return Jitted()


def find(old: Bits, new: Bits, kind: Number) -> Differences:
    """Where and by how much `new` differs."""
    return chosen().find(old, new, kind)


def pack(differences: Differences, kind: Number) -> Streams:
    """The streams of `fast`."""
    return chosen().pack(differences, kind)


def unpack(streams: Streams, count: int, kind: Number) -> Differences:
    """What they say of `count` elements; Corrupt where they say nothing."""
    return chosen().unpack(streams, count, kind)


def pack_tight(old: Bits, found: Differences, kind: Number) -> bytes:
    """The payload of `tight`, of at least one change."""
    return chosen().pack_tight(old, found, kind)


def decode(streams: Streams, old: Bits, kind: Number, first: int, state: StateHash) -> Changes:
    """What they make of the elements `old`, the first of which has index `first` and whose state hash is `state`; Corrupt where they say nothing."""
    return chosen().decode(streams, old, kind, first, state)


def decode_fast(payload: memoryview, old: Bits, kind: Number, first: int, state: StateHash) -> Changes:
    """The same of a payload of `fast`."""
    return chosen().decode_fast(payload, old, kind, first, state)


def decode_tight(payload: memoryview, old: Bits, kind: Number, first: int, state: StateHash) -> Changes:
    """The same of a payload of `tight`."""
    return chosen().decode_tight(payload, old, kind, first, state)


def put(flat: Bits, first: int, indices: NDArray[np.uint32], values: Bits) -> None:
    """Give elements, at `indices` [n] from `first` on, the bits `values` [n]; IndexError, and nothing is written, if one is behind the last."""
    chosen().put(flat, first, indices, values)
