"""Which codec a chunk gets, by the sizes that come of it alone: wherever zstd is of one version, the same chunk has the same bytes."""

from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from bloomery.sync.codec import fast, fast_zstd, kernels, planes, raw, tight
from bloomery.sync.codec.numbers import Changes, Differences, Number
from bloomery.sync.state_hash import Bits, StateHash


class Codec(IntEnum):
    """As the records of chunks number them."""

    EMPTY = 0
    FAST = 1
    FAST_ZSTD = 2
    TIGHT = 3
    RAW = 4
    PLANES = 5


class _Payloads(Protocol):
    """What every module of a codec has."""

    def encode(self, old: Bits, new: Bits, kind: Number) -> bytes | None: ...

    def decode(self, payload: memoryview, old: Bits, kind: Number, first: int, state: StateHash) -> Changes: ...


CODECS: Final[dict[Codec, _Payloads]] = {Codec.FAST: fast, Codec.FAST_ZSTD: fast_zstd, Codec.TIGHT: tight, Codec.RAW: raw, Codec.PLANES: planes}
"""Those whose chunks have a payload."""


class _Elements(Protocol):
    """What the modules of codecs have that write every element."""

    def elements(self, payload: memoryview, numel: int, kind: Number) -> Bits: ...


ELEMENTS: Final[dict[Codec, _Elements]] = {Codec.RAW: raw, Codec.PLANES: planes}
"""Those that say every element of their chunk, whatever was there."""


class Encoded(NamedTuple):
    """A payload, and which codec reads it."""

    codec: Codec
    payload: bytes
    found: Differences
    """What it says, or what it stands for."""


def encode(old: Bits, new: Bits, kind: Number) -> Encoded:
    """The shortest payload of changes; where none is worth it, all elements. Nothing where nothing changed."""
    found = kernels.find(old, new, kind)
    if not len(found.indices):
        return Encoded(Codec.EMPTY, b"", found)
    changes = [
        Encoded(codec, payload, found)
        for codec, payload in _of_changes(old, found, kind)
        if payload is not None and len(payload) <= fast.WORTH * new.nbytes
    ]
    if changes:
        return min(changes, key=lambda encoded: len(encoded.payload))
    turned = planes.encode(old, new, kind)
    return Encoded(Codec.RAW, raw.encode(old, new, kind), found) if turned is None else Encoded(Codec.PLANES, turned, found)


def _of_changes(old: Bits, found: Differences, kind: Number) -> Iterator[tuple[Codec, bytes | None]]:
    yield Codec.FAST, fast.encode_differences(*found, len(old), kind)
    yield Codec.FAST_ZSTD, fast_zstd.encode_differences(*found, len(old), kind)
    yield Codec.TIGHT, tight.encode_differences(old, found, kind)
