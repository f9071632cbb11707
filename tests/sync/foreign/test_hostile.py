"""What is damaged or hostile in a delta of either format is refused with the reason, and not one weight has been written then."""

import bz2
import json
import os
import pickle
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.sync.codec.layout import Chunk, Layout, MemoryWeights
from bloomery.sync.foreign import arc3, archive, delta, pickles
from bloomery.sync.foreign.delta import FORMATS, ForeignDelta, Format
from bloomery.sync.state_hash import Bits
from bloomery.types.errors import Corrupt
from bloomery.types.tensor_file import TensorSpec
from tests.sync.codec.weights import copied, same
from tests.sync.foreign.payloads import changed, checksum_of, coded, delta_of, envelope, opened
from tests.sync.foreign.weights import every_kind, one, step

FORMAT: Final = pytest.mark.parametrize("form", FORMATS)


class Watched:
    """Weights that tell of every write."""

    def __init__(self, weights: MemoryWeights) -> None:
        self.layout, self._weights, self.writes = weights.layout, weights, 0

    def read(self, chunk: Chunk) -> Bits:
        return self._weights.read(chunk)

    def write(self, chunk: Chunk, indices: Any, values: Bits) -> None:
        self.writes += 1
        self._weights.write(chunk, indices, values)


def refuse(data: bytes, old: MemoryWeights, reason: str | None = None) -> None:
    watched = Watched(old)
    before = copied(old)
    with pytest.raises(Corrupt, match=reason):
        delta.apply(ForeignDelta.parse(data), watched)
    assert watched.writes == 0
    assert same(old, before)


@FORMAT
def test_a_delta_of_other_weights_is_refused(form: Format) -> None:
    old, new = one()
    data = delta.encode(old, new, form)
    refuse(data, one(seed=1).old, "`w`: .* damaged, or of other weights")
    refuse(data, step({"v": TensorSpec("BF16", (64, 500))}, {"v": 0}).old, "of other weights: `v`")
    refuse(data, one((64, 250)).old, "bytes, and|no more than|is expected")


@FORMAT
def test_a_delta_that_was_applied_is_refused_a_second_time(form: Format) -> None:
    old, new = one()
    data = delta.encode(old, new, form)
    delta.apply(ForeignDelta.parse(data), old)
    refuse(data, old, "as if it had been applied before")


@FORMAT
def test_nothing_is_written_when_the_last_tensor_is_damaged(form: Format) -> None:
    specs = {name: TensorSpec("BF16", (30, 40)) for name in "abc"}
    old, new = step(specs, dict.fromkeys(specs, 0.1))
    found = archive.read(memoryview(delta.encode(old, new, form)))
    wrong = archive.write({name: bytes(data) for name, data in found.payloads.items()}, {**found.metadata, "c": str(int(found.metadata["c"]) ^ 1)})
    refuse(wrong, old, "`c`.*Adler-32")


@FORMAT
def test_a_file_cut_off_anywhere_is_refused(form: Format) -> None:
    old, new = every_kind(("BF16",), (0.02,))
    data = delta.encode(old, new, form)
    for length in {*range(0, len(data), 997), *range(200), *range(len(data) - 200, len(data))}:
        refuse(data[:length], old)


@FORMAT
@settings(max_examples=300)
@given(changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=3))
def test_changed_bytes_are_refused_or_give_what_the_checksum_says(form: Format, changes: list[tuple[float, int]]) -> None:
    old, new = one((20, 30), 0.1)
    data = bytearray(delta.encode(old, new, form))
    for place, byte in changes:
        data[min(len(data) - 1, int(place * len(data)))] = byte
    before = copied(old)
    with suppress(Corrupt):
        found = ForeignDelta.parse(bytes(data))
        found.describe()
        try:
            delta.apply(found, old)
        except Corrupt:
            assert same(old, before)
            raise
        assert zlib.adler32(old["w"].tobytes()) == found.payloads["w"].checksum


def arc_v2(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


SIZE: Final = 2 * 64 * 500
ZSTD_BOMB: Final = arc_v2(bytes(1 << 26), level=19)
HOSTILE_V2: Final[dict[str, tuple[bytes, str]]] = {
    "a bomb": (ZSTD_BOMB, f"says that it holds {1 << 26} bytes, and no more than {SIZE} are due"),
    "a bomb of 2^60 bytes": (b"\x28\xb5\x2f\xfd\xe0" + (1 << 60).to_bytes(8, "little") + b"\x01\x00\x00", f"holds {1 << 60} bytes"),
    "too few bytes": (arc_v2(bytes(SIZE - 2)), f"{SIZE} are due"),
    "no size": (arc_v2(bytes(SIZE), write_content_size=False), "does not say what it holds"),
    "a frame that says less than it holds": (b"\x28\xb5\x2f\xfd\x60" + (0).to_bytes(2, "little") + arc_v2(bytes(SIZE))[9:], "zstd"),
    "two frames": (arc_v2(bytes(SIZE // 2)) * 2, "due|no zstd frame"),
    "bytes behind the frame": (arc_v2(bytes(SIZE)) + b"more", "no zstd frame"),
    "half a frame": (arc_v2(np.random.default_rng(0).bytes(SIZE))[: SIZE // 2], "no zstd frame"),
    "nothing but the magic": (b"\x28\xb5\x2f\xfd", "no zstd frame"),
}


@pytest.mark.parametrize("name", HOSTILE_V2)
def test_hostile_payloads_of_arc_v2_are_refused(name: str) -> None:
    payload, reason = HOSTILE_V2[name]
    old, _ = one()
    refuse(delta_of(payload, checksum_of(old) ^ 1), old, reason)


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/bloomery-was-run",)


HOSTILE_V3: Final[dict[str, tuple[Callable[[dict[str, Any]], Any], str]]] = {
    "runs something": (changed("checksum", Runs()), "opcode"),
    "no dict": (lambda payload: ("a", "tuple"), "no fields"),
    "another version": (changed("version", 2), "1 is expected"),
    "another shape": (changed("shape", (500, 64)), "is expected"),
    "a shape of 2^60": (changed("shape", (1 << 60, 1 << 60)), "is expected"),
    "another dtype": (changed("dtype", "torch.float16"), "is expected"),
    "another strategy": (changed("strategy", "exec"), "can be none, mantissa_xor"),
    "another checksum": (changed("checksum", "1"), "the file says"),
    "a checksum that is no number": (changed("checksum", "-1"), "no Adler-32"),
    "mantissas of 15 bits": (changed("mantissa_bits", 15), "7 is expected"),
    "numbers of 32 bits": (changed("total_bits", 32), "16 is expected"),
    "a transform that there is not": (changed("transform", "eval"), "can be raw, xor, zigzag"),
    "mantissas that are too large": (changed("mantissa_stream.data", lambda data: b"\xff" * len(data)), "mantissa"),
    "mantissas cut off": (changed("mantissa_stream.data", lambda data: data[:-1]), "mantissas of"),
    "mantissas of objects": (changed("mantissa_stream.dtype", "object"), "can be uint8"),
    "too many exceptions": (changed("exception_values", bytes(2 * 64 * 501)), "whole"),
    "an exception past the end": (changed("exception_positions", {"count": 1, "dtype": "uint16", "data": b"\xff\xff"}), "past the end"),
    "exceptions of another type": (changed("exception_dtype", "uint64"), "is expected"),
    "positions of no kind": (changed("indices.kind", "bitmap"), "can be flat, row"),
    "no positions": (changed("indices", {"kind": "flat", "count": 0, "dtype": "uint8", "data": b""}), "strategy `none`"),
    "a field too many": (lambda payload: {**payload, "zz": 1}, "not known"),
    "nothing but a strategy": (lambda payload: {"strategy": "none", "shape": (64, 500)}, "no `version`"),
}


@pytest.mark.parametrize("name", HOSTILE_V3)
def test_hostile_payloads_of_arc_v3_are_refused(name: str) -> None:
    change, reason = HOSTILE_V3[name]
    both = one()
    payload = opened(both)
    good = delta_of(envelope(pickle.dumps(payload)), checksum_of(both.new))
    assert delta.apply(ForeignDelta.parse(good), copied(both.old)).elements > 0, "as it was it can be applied"
    refuse(delta_of(envelope(pickle.dumps(change(payload), 5)), checksum_of(both.new)), both.old, reason)


XOR: Final = arc_v2(bytes(SIZE))
HOSTILE_ENVELOPES: Final[dict[str, tuple[bytes, str]]] = {
    "zstd that is a bomb": (arc3.PREFIX + pickles.write({"codec": "zstd", "data": ZSTD_BOMB}), "no more than"),
    "bzip2 that is a bomb": (arc3.PREFIX + pickles.write({"codec": "bz2", "data": bz2.compress(bytes(1 << 26))}), "holds more than"),
    "bzip2 cut off": (arc3.PREFIX + pickles.write({"codec": "bz2", "data": bz2.compress(b"some")[:-3]}), "cut off"),
    "two bzip2 streams": (arc3.PREFIX + pickles.write({"codec": "bz2", "data": bz2.compress(b"some") * 2}), "behind it"),
    "no bzip2": (arc3.PREFIX + pickles.write({"codec": "bz2", "data": b"some bytes"}), "no bzip2"),
    "another codec": (arc3.PREFIX + pickles.write({"codec": "lzma", "data": b""}), "can be zstd, bz2"),
    "no data": (arc3.PREFIX + pickles.write({"codec": "zstd", "more": b""}), "no `data`"),
    "a field too many": (arc3.PREFIX + pickles.write({"codec": "zstd", "data": arc_v2(pickles.write({})), "more": b""}), "not known"),
    "runs something": (arc3.PREFIX + pickle.dumps({"codec": "zstd", "data": Runs()}), "opcode"),
    "nothing behind the prefix": (arc3.PREFIX, "cut off"),
    "two tensors": (archive.write({"tensor": XOR, "other": XOR}, {"tensor": "1", "fallback_name": "arc_v2"}), "not 2 of"),
    "a tensor of another name": (archive.write({"other": XOR}, {"tensor": "1", "fallback_name": "arc_v2"}), "is one tensor of"),
    "another fallback": (archive.write({"tensor": XOR}, {"tensor": "1", "fallback_name": "arc_v9"}), "of `arc_v9`"),
    "another checksum": (archive.write({"tensor": XOR}, {"tensor": "7", "fallback_name": "arc_v2"}), "the file says"),
    "a fallback that is a bomb": (archive.write({"tensor": ZSTD_BOMB}, {"tensor": "1", "fallback_name": "arc_v2"}), "no more than"),
}


@pytest.mark.parametrize("name", HOSTILE_ENVELOPES)
def test_hostile_envelopes_of_arc_v3_are_refused(name: str) -> None:
    payload, reason = HOSTILE_ENVELOPES[name]
    refuse(delta_of(payload, 1), one().old, reason)


@pytest.mark.parametrize("shape", [(1 << 60, 1 << 60), ((1 << 62),) * 300, (2,) * 100])
def test_a_shape_that_no_tensor_has_is_not_described(shape: tuple[int, ...]) -> None:
    payload = {**opened(one()), "shape": shape}
    with pytest.raises(Corrupt, match=rf"shape of {len(shape)} sizes"):
        ForeignDelta.parse(delta_of(envelope(pickle.dumps(payload)), 1)).describe()


def test_what_can_hold_no_mantissa_has_none() -> None:
    both = one()
    payload = envelope(pickle.dumps(opened(both)))
    old = MemoryWeights(Layout.of({"w": TensorSpec("I16", (64, 500))}), {"w": both.old["w"]})
    refuse(delta_of(payload, checksum_of(both.new)), old, "no mantissa")


def test_a_tensor_without_elements_has_no_positions_in_its_rows() -> None:
    empty = step({"w": TensorSpec("BF16", (5, 0))}, {"w": 0})
    rows = {"kind": "row", "shape": (5, 0), "n_rows": 5, "row_width": 1, "count_dtype": "uint8", "data": b"\1\0\0\0\0\1\0"}
    payload = {**opened(one()), "shape": (5, 0), "indices": rows, "checksum": "1"}
    refuse(delta_of(envelope(pickle.dumps(payload)), 1), empty.old, "strategy `none`")


HOSTILE_CODES: Final[dict[str, tuple[str, Any, str]]] = {
    "counts 2^60": ("mantissa_stream.count", 1 << 60, "is expected"),
    "codes cut off": ("mantissa_stream.codes", lambda data: data[:-1], "do not hold codes"),
    "no codebook": ("mantissa_stream.codebook", b"", "names none"),
    "a codebook that is too short": ("mantissa_stream.codebook", b"\1", "names none"),
    "a codebook of eight": ("mantissa_stream.codebook", bytes(8), "beside the codebook"),
    "values that are due": ("mantissa_stream.exception_values", lambda data: data[:-1], "beside the codebook"),
    "values of other elements": ("mantissa_stream.exception_positions", {"count": 0, "dtype": "uint8", "data": b""}, "beside the codebook"),
}


@pytest.mark.parametrize("name", HOSTILE_CODES)
def test_hostile_codebooks_are_refused(name: str) -> None:
    field, value, reason = HOSTILE_CODES[name]
    both = one()
    payload = changed(field, value)(coded(both))
    refuse(delta_of(envelope(pickle.dumps(payload)), checksum_of(both.new)), both.old, reason)


TENSOR: Final = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
CHECKED: Final = {"__metadata__": {"w": "1"}}


def file_of(header: object, values: bytes = b"abcd") -> bytes:
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


def file_with(**fields: object) -> bytes:
    """A delta of one tensor, some fields of which are others."""
    return file_of({**CHECKED, "w": {**TENSOR, **fields}})


NAMED_TWICE: Final = "{" + ",".join([f'"w":{json.dumps(TENSOR)}'] * 2) + "}"
HOSTILE_FILES: Final[dict[str, tuple[bytes, str]]] = {
    "empty": (b"", "no safetensors header"),
    "a header of 2^60 bytes": ((1 << 60).to_bytes(8, "little") + b"{}", "no safetensors header"),
    "no JSON": (file_of("nonsense"), "no safetensors header"),
    "JSON of brackets": (file_of("[" * 100_000), "no safetensors header"),
    "a list": (file_of([]), "no safetensors header"),
    "no tensor": (file_of({}, b""), "a tensor or more"),
    "a tensor without a checksum": (file_of({"w": TENSOR}), "a tensor or more"),
    "a checksum without a tensor": (file_of(CHECKED, b""), "a tensor or more"),
    "a checksum that is a number": (file_of({"__metadata__": {"w": 1}, "w": TENSOR}), "are texts"),
    "weights": (file_with(dtype="BF16", shape=[2]), "no row of bytes"),
    "a tensor of two dimensions": (file_with(shape=[2, 2]), "no row of bytes"),
    "a shape of 2^60": (file_with(shape=[1 << 60], data_offsets=[0, 1 << 60]), "no row of bytes"),
    "a shape of a million sizes": (file_with(shape=[1] * 1_000_000), "no row of bytes"),
    "offsets below 0": (file_with(data_offsets=[-4, 0]), "no row of bytes"),
    "offsets of fractions": (file_with(data_offsets=[0.0, 4.0]), "no row of bytes"),
    "a field too many": (file_with(code="1"), "no row of bytes"),
    "bytes of no tensor": (file_of({**CHECKED, "w": TENSOR}, b"abcdefgh"), "of no tensor"),
    "bytes of two tensors": (file_of({**CHECKED, "v": TENSOR, "w": TENSOR}), "of none or of two"),
    "a name twice": (file_of(NAMED_TWICE), "twice"),
    "neither format": (file_with(), "neither an arc_v2 nor an arc_v3"),
    "both formats": (archive.write({"v": XOR, "w": arc3.PREFIX}, {"v": "1", "w": "1"}), "is one of arc_v2 and arc_v3"),
    "a checksum of words": (archive.write({"w": XOR}, {"w": "one"}), "no Adler-32"),
    "a checksum of 33 bits": (archive.write({"w": XOR}, {"w": str(1 << 32)}), "no Adler-32"),
    "a checksum of a million digits": (archive.write({"w": XOR}, {"w": "1" * 1_000_000}), "no Adler-32"),
}


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_what_is_no_delta_is_refused(name: str) -> None:
    data, reason = HOSTILE_FILES[name]
    refuse(data, one().old, reason)
