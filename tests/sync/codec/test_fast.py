"""Payloads of distances and those of whole chunks: what was encoded is read back, has one encoding, and hostile bytes are refused."""

import struct
import zlib

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings

from bloomery.sync.codec import choose, fast, fast_zstd, planes, raw
from bloomery.sync.codec.choose import CODECS, Codec
from bloomery.sync.codec.kernels import PLAIN
from bloomery.sync.codec.numbers import NUMBERS, Differences
from bloomery.sync.codec.plain import split
from bloomery.types.errors import Corrupt

from .chunks import EVERY, FULL, applied, damaged, pairs, special, survives, weights

BF16, U8, F64 = NUMBERS["BF16"], NUMBERS["U8"], NUMBERS["F64"]
DISTANCES = pytest.mark.parametrize("codec", [fast, fast_zstd], ids=["fast", "fast_zstd"])


def differences(old, new, kind) -> Differences:
    at = np.flatnonzero(old != new).astype(np.uint32)
    return Differences(at, kind.ordered(new[at]) - kind.ordered(old[at]))


def in_numpy(payload: bytes, count: int, kind) -> Differences:
    """Its reasons name numbers."""
    return PLAIN.unpack(split(memoryview(payload)), count, kind)


@settings(max_examples=300, deadline=None)
@given(pair=pairs())
def test_whatever_a_codec_encodes_it_reads_back(pair):
    kind, old, new = pair
    before = old.copy()
    for codec in CODECS.values():
        payload = codec.encode(old, new, kind)
        if payload is not None:
            assert (applied(old, codec.decode(memoryview(payload), old, kind)) == new).all()
    assert (old == before).all()


@settings(max_examples=300, deadline=None)
@given(pair=pairs())
def test_differences_need_no_elements_and_have_one_encoding(pair):
    kind, old, new = pair
    said = differences(old, new, kind)
    for codec in (fast, fast_zstd):
        payload = codec.encode_differences(*said, len(old), kind)
        told = codec.differences(memoryview(payload), len(old), kind)
        assert told.indices.tolist() == said.indices.tolist()
        assert told.by.tolist() == said.by.tolist()
        assert told.indices.dtype == np.uint32
        assert told.by.dtype == kind.dtype
        assert (applied(old, codec.decode(memoryview(payload), old, kind)) == new).all()
        assert codec.encode_differences(*told, len(old), kind) == payload


@EVERY
@pytest.mark.parametrize("share", [0.0, 1.0, 0.01])
def test_a_full_chunk_comes_back(kind, share):
    old, new = weights(kind, FULL, share=share)
    for codec in (fast, fast_zstd):
        payload = codec.encode_differences(*differences(old, new, kind), FULL, kind)
        assert (applied(old, codec.decode(memoryview(payload), old, kind)) == new).all()
    codec, payload, found = choose.encode(old, new, kind)
    assert found.indices.tolist() == np.flatnonzero(old != new).tolist()
    if codec is Codec.EMPTY:
        assert share == 0
    else:
        assert (applied(old, CODECS[codec].decode(memoryview(payload), old, kind)) == new).all()


@EVERY
def test_every_special_number_becomes_every_other(kind):
    found = special(kind)
    old, new = np.repeat(found, len(found)), np.tile(found, len(found))
    for codec in (fast, fast_zstd):
        payload = codec.encode_differences(*differences(old, new, kind), len(old), kind)
        assert (applied(old, codec.decode(memoryview(payload), old, kind)) == new).all()


def test_the_bytes_of_distances_are_as_the_docs_say():
    # Elements 3, 3 + 1 + 600 and the next moved by +1, -2 and +300.
    old = np.zeros(1000, np.uint16)
    payload = fast.encode_differences(np.array([3, 604, 605], np.uint32), np.array([1, -2 & 0xFFFF, 300], np.uint16), 1000, BF16)
    gaps, signs, exception_gaps, sizes, wide = (
        bytes([3, 255, 255, 90, 0]),
        bytes([0b010]),
        bytes([1, 0]),
        bytes([0, 255]),
        (300).to_bytes(2, "little"),
    )
    assert payload == struct.pack("<II", 5, 2) + gaps + signs + exception_gaps + sizes + wide
    assert fast.decode(memoryview(payload), old, BF16).values.tolist() == [1, 0x8001, 300]


def test_a_golden_payload():
    # Deltas lie in stores for years.
    old = (np.arange(20_000, dtype=np.uint32) * 40_503 % 65_536).astype(np.uint16)
    new = old.copy()
    new[::37] += 1
    new[::740] ^= 0x8000
    payload = fast.encode(old, new, BF16)
    assert (len(payload), zlib.crc32(payload)) == (727, 1330356292)
    assert (applied(old, fast.decode(memoryview(payload), old, BF16)) == new).all()


@pytest.mark.parametrize(
    ("payload", "count", "reason"),
    [
        (struct.pack("<II", 3, 0) + b"\0", 10, "3 bytes of gaps where there are 1"),
        (struct.pack("<II", 1, 0) + b"\xff", 1000, "before they lead anywhere"),
        (struct.pack("<II", 1, 0) + bytes([10, 0]), 10, "behind the last of 10"),
        (struct.pack("<II", 1, 0) + bytes([9, 0b10]), 10, "not there"),
        (struct.pack("<II", 1, 1) + bytes([9, 0, 1, 0]), 10, "exception gaps that lead behind"),
        (struct.pack("<II", 1, 1) + bytes([9, 0, 0, 255, 0, 1]), 10, "wide size that is none"),
        (struct.pack("<II", 1, 1) + bytes([9, 0, 0, 255, 1, 0x80]), 10, "no difference has"),
        (struct.pack("<II", 1, 1) + bytes([9, 0, 0, 255, 0, 0x80]), 10, "no difference has"),
        (struct.pack("<II", 1, 1) + bytes([9, 0, 0, 3, 1, 1]), 10, "2 bytes of wide sizes where 0"),
        (struct.pack("<II", 1, 0) + bytes([9, 0, 0]), 10, "1 bytes of wide sizes where 0"),
        (struct.pack("<II", 2**32 - 1, 2**32 - 1), 10, "bytes of gaps"),
    ],
)
def test_impossible_distances_are_refused_with_the_reason(payload, count, reason):
    with pytest.raises(Corrupt, match=reason):
        in_numpy(payload, count, BF16)
    with pytest.raises(Corrupt):
        fast.differences(memoryview(payload), count, BF16)


def test_payloads_without_a_head_are_refused():
    for codec, size in ((fast, 7), (fast_zstd, 31), (planes, 7)):
        with pytest.raises(Corrupt, match="too few"):
            codec.decode(memoryview(bytes(size)), np.zeros(10, np.uint16), BF16)


def test_of_bytes_a_size_is_at_most_128_and_never_wide():
    for payload, reason in (
        (bytes([0, 0, 0, 255, 1]), "wide size that is none"),
        (bytes([0, 1, 0, 127]), "no difference has"),
        (bytes([0, 1, 0, 254]), "no difference has"),
    ):
        with pytest.raises(Corrupt, match=reason):
            in_numpy(struct.pack("<II", 1, 1) + payload, 1, U8)
        with pytest.raises(Corrupt, match=reason):
            fast.differences(memoryview(struct.pack("<II", 1, 1) + payload), 1, U8)
    assert fast.differences(memoryview(struct.pack("<II", 1, 1) + bytes([0, 1, 0, 126])), 1, U8).by.tolist() == [128]


def test_a_frame_that_would_grow_beyond_the_chunk_is_refused_before_it_does():
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    payload = struct.pack("<8I", 1 << 28, 0, 0, 0, len(bomb), 0, 0, 0) + bomb
    with pytest.raises(Corrupt, match="more than 1048576 elements"):
        fast_zstd.differences(memoryview(payload), FULL, BF16)
    # One that lies about itself.
    payload = struct.pack("<8I", 1 << 20, 0, 0, 0, len(bomb), 0, 0, 0) + bomb
    with pytest.raises(Corrupt, match="not one of 1048576 bytes"):
        fast_zstd.differences(memoryview(payload), FULL, BF16)
    forged = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 20)))
    # Behind the magic number and a byte of flags stands how many bytes come of it.
    assert forged[5:9] == (1 << 20).to_bytes(4, "little")
    forged[5:9] = ((1 << 20) - 1000).to_bytes(4, "little")
    with pytest.raises(Corrupt):
        planes.decode(memoryview(struct.pack("<I", len(forged)) + bytes(forged)), np.zeros((1 << 20) - 1000, np.uint8), U8)


def test_frames_with_extras_are_refused():
    gaps = bytes(20_000)
    for frame in (
        zstandard.ZstdCompressor(write_checksum=True).compress(gaps),
        zstandard.ZstdCompressor(write_content_size=False).compress(gaps),
        zstandard.ZstdCompressor().compress(gaps) + b"more",
        zstandard.ZstdCompressor().compress(gaps) * 2,
    ):
        with pytest.raises(Corrupt):
            planes.decode(memoryview(struct.pack("<I", len(frame)) + frame), np.zeros(20_000, np.uint8), U8)
    frame = zstandard.ZstdCompressor().compress(gaps)
    assert not planes.decode(memoryview(struct.pack("<I", len(frame)) + frame), np.zeros(20_000, np.uint8), U8).values.any()


@DISTANCES
@pytest.mark.parametrize("name", ["BF16", "U8", "F32"])
def test_damaged_payloads_are_refused_or_are_canonical_payloads_of_something_else(codec, name):
    kind = NUMBERS[name]
    rng = np.random.default_rng(1)
    for share in (0.02, 0.5):
        old, new = weights(kind, 3000, share=share)
        payload = codec.encode_differences(*differences(old, new, kind), len(old), kind)
        for _ in range(400):
            other = damaged(payload, rng)
            try:
                told = codec.differences(memoryview(other), len(old), kind)
            except Corrupt:
                continue
            assert len(told.indices) == 0 or int(told.indices[-1]) < len(old)
            assert (np.diff(told.indices.astype(np.int64)) > 0).all()
            assert (told.by != 0).all()
            if codec is fast:
                assert fast.encode_differences(*told, len(old), kind) == other


@pytest.mark.parametrize("codec", [raw, planes])
def test_damaged_chunks_are_refused_or_read(codec):
    old, new = weights(BF16, 3000, share=1.0)
    payload = codec.encode(old, new, BF16)
    survives(lambda data: codec.decode(data, old, BF16), payload, np.random.default_rng(0), 300)
    for size in (0, 1, len(payload) - 1):
        with pytest.raises(Corrupt):
            codec.decode(memoryview(payload[:size]), old, BF16)


def test_planes_save_a_third_of_weights():
    rng = np.random.default_rng(0)
    new = (rng.standard_normal(100_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert len(planes.encode(new, new, BF16)) < 0.7 * new.nbytes
    noise = rng.integers(0, 2**16, 100_000, np.uint16)
    assert planes.encode(noise, noise, BF16) is None


def test_a_chunk_is_chosen_by_what_is_shortest():
    old, new = weights(BF16, 50_000, share=0.01)
    assert choose.encode(old, old, BF16)[:2] == (Codec.EMPTY, b"")
    # So few of eight bytes each that frames are not worth their heads.
    wide, moved = old[:5000].astype(np.uint64), new[:5000].astype(np.uint64)
    assert choose.encode(wide, moved, F64)[:2] == (Codec.FAST, fast.encode(wide, moved, F64))
    # All new: their differences would take as long as they do.
    rng = np.random.default_rng(0)
    weightlike = (rng.standard_normal(50_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert choose.encode(old, weightlike, BF16).codec is Codec.PLANES
    noise = rng.integers(0, 2**16, 50_000, np.uint16)
    assert choose.encode(old, noise, BF16)[:2] == (Codec.RAW, noise.tobytes())
    assert fast.encode(old, noise, BF16) is None
    # One element of two bytes is shorter than any payload.
    assert choose.encode(old[:1], noise[:1], BF16)[:2] == (Codec.RAW, noise[:1].tobytes())


def test_rows_that_change_as_a_whole_are_best_in_frames():
    old, _ = weights(BF16, FULL, share=0.0)
    new = old.copy()
    new[5000:400_000] = BF16.ordered(BF16.ordered(old[5000:400_000]) + np.uint16(300))
    assert choose.encode(old, new, BF16)[:2] == (Codec.FAST_ZSTD, fast_zstd.encode(old, new, BF16))
