"""Headers of safetensors files that claim what cannot be."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from bloomery.types import tensor_file
from bloomery.types.errors import Corrupt
from bloomery.types.tensor_file import TensorSpec


def blob(values: bytes, **entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + values


def entry(start: int, stop: int, shape: list[Any], dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def places(data: bytes) -> Mapping[str, tensor_file.TensorPlace]:
    return tensor_file.places(data, size=len(data))


def test_tensors_are_found_where_they_lie_and_empty_ones_anywhere():
    data = blob(b"abcd", b=entry(2, 4, [2]), a=entry(0, 2, [1, 2]), nothing=entry(1, 1, [0, 7]))
    found = places(data)
    assert {name: bytes(data[place.start : place.stop]) for name, place in found.items()} == {"a": b"ab", "b": b"cd", "nothing": b""}
    assert found["a"].spec == TensorSpec("U8", (1, 2))


def test_a_header_is_read_once_for_all_files_of_one_form_and_again_for_one_of_another_size():
    entries = {"a": entry(0, 2, [2]), "b": entry(2, 4, [2])}
    first = places(blob(b"abcd", **entries))
    assert places(blob(b"wxyz", **entries)) is first
    with pytest.raises(TypeError):
        del first["a"]
    with pytest.raises(Corrupt, match="does not hold its tensor `b`"):
        places(blob(b"abc", **entries))
    assert places(blob(b"abcd", a=entry(0, 2, [2]), c=entry(2, 4, [2]))).keys() == {"a", "c"}
    # What is longer than an adapter's is not kept in memory.
    many = {f"tensor-{number}": entry(0, 0, [0]) for number in range(2000)}
    long = blob(b"", **many)
    assert places(long) == places(long)
    assert places(long) is not places(long)


HOSTILE = {
    "sizes below nothing": blob(b"abcdef", a=entry(0, 6, [-2, -3])),
    "a size that is no whole number": blob(b"ab", a=entry(0, 2, [2.0])),
    "a size that is a truth": blob(b"a", a=entry(0, 1, [True])),
    "a shape that is a text": blob(b"aa", a=entry(0, 2, ["a"])),
    "the bytes of another tensor": blob(b"abc", a=entry(0, 2, [2]), b=entry(1, 3, [2])),
    "bytes within another tensor": blob(b"abcd", a=entry(0, 4, [4]), b=entry(1, 2, [1])),
    "bytes behind the end": blob(b"ab", a=entry(1, 3, [2])),
    "bytes before the beginning": blob(b"ab", a=entry(-1, 1, [2])),
    "a dtype that there is not": blob(b"ab", a=entry(0, 2, [2], "F4")),
    "a dtype that is a list": blob(b"ab", a=entry(0, 2, [2], [])),
    "a nesting without an end": (1 << 20).to_bytes(8, "little") + b"[" * (1 << 20),
    "a header of 2**63 bytes": (1 << 63).to_bytes(8, "little") + b"{}",
    "a list instead of a header": (2).to_bytes(8, "little") + b"[]",
    "nothing": b"",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_file_that_claims_what_cannot_be_is_refused(data):
    with pytest.raises(Corrupt):
        places(data)
