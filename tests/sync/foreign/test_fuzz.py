"""A hundred thousand damaged deltas: each is refused or gives what its Adler-32 says, and refusing takes no memory that a delta asks for."""

import bz2
import pickle
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import pytest
import zstandard

from bloomery.sync.codec.layout import MemoryWeights
from bloomery.sync.foreign import arc3, delta, pickles
from bloomery.sync.foreign.delta import ForeignDelta
from bloomery.types.errors import Corrupt
from tests.sync.codec.weights import copied, same
from tests.sync.foreign.payloads import checksum_of, coded, delta_of, envelope, opened
from tests.sync.foreign.weights import Step, one

_EACH: Final = 25_000
_BOMB_BYTES: Final = 1 << 26


def files(form: delta.Format) -> Callable[[Step], Callable[[np.random.Generator], bytes]]:
    """Damage to a file."""

    def of(both: Step) -> Callable[[np.random.Generator], bytes]:
        whole = delta.encode(*both, form)
        return lambda draw: damaged(whole, draw)

    return of


def pickles_of(payload: Callable[[Step], dict[str, object]]) -> Callable[[Step], Callable[[np.random.Generator], bytes]]:
    """Damage to what lies in an intact envelope."""

    def of(both: Step) -> Callable[[np.random.Generator], bytes]:
        raw, checksum = pickle.dumps(payload(both), 5), checksum_of(both.new)
        return lambda draw: delta_of(envelope(damaged(raw, draw)), checksum)

    return of


def damaged(data: bytes, draw: np.random.Generator) -> bytes:
    """Some bytes changed, and now and then a piece left out or there twice."""
    found = bytearray(data)
    for place in draw.integers(0, len(found), int(draw.integers(1, 4))):
        found[place] = int(draw.choice((0, 1, 0x7F, 0x80, 0xFF, int(draw.integers(0, 256)))))
    if draw.random() < 0.2:
        start, stop = sorted(draw.integers(0, len(found), 2).tolist())
        found[start:stop] = found[start:stop] * int(draw.integers(0, 3))
    return bytes(found)


DAMAGES: Final = {
    "arc_v2": files("arc_v2"),
    "arc_v3": files("arc_v3"),
    "positions": pickles_of(opened),
    "codebook": pickles_of(coded),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_deltas_leave_weights_as_they_were(name: str) -> None:
    both, draw = one(), np.random.default_rng(0)
    damage, live, before, refused = DAMAGES[name](both), copied(both.old), copied(both.old), 0
    for _ in range(_EACH):
        try:
            found = ForeignDelta.parse(damage(draw))
            delta.apply(found, live)
        except Corrupt:
            refused += 1
            continue
        assert zlib.adler32(live["w"].tobytes()) == found.payloads["w"].checksum
        live = copied(both.old)
    assert same(live, before)
    assert refused > _EACH // 2


def bombs() -> Iterator[bytes]:
    """Small files that say of themselves or of a stream that they hold a lot."""
    zeros = bytes(_BOMB_BYTES)
    zstd, bzip2 = zstandard.ZstdCompressor().compress(zeros), bz2.compress(zeros)
    yield delta_of(zstd, 1)
    yield delta_of(arc3.PREFIX + pickles.write({"codec": "zstd", "data": zstd}), 1)
    yield delta_of(arc3.PREFIX + pickles.write({"codec": "bz2", "data": bzip2}), 1)
    yield delta_of(envelope(b"\x80\x05\x8e" + (1 << 60).to_bytes(8, "little")), 1)
    yield delta_of(envelope(b"\x80\x05" + b"(" * 60_000), 1)
    yield (1 << 60).to_bytes(8, "little") + b"{"


def test_bombs_are_given_no_memory() -> None:
    old = one().old
    for bomb in bombs():
        assert peak_bytes(old, bomb) < _BOMB_BYTES // 16


def peak_bytes(old: MemoryWeights, data: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            delta.apply(ForeignDelta.parse(data), old)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
