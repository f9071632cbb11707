"""Layouts against an oracle that lays all elements out one by one, and tables that claim what is not so."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.sync.codec import layout as module
from bloomery.sync.codec.layout import CHUNK_ELEMENTS, MAX_ELEMENTS, Layout, MemoryWeights
from bloomery.sync.manifest import describe
from bloomery.sync.state_hash import UNSIGNED, StateHash, hash_elements, total
from bloomery.types import tensor_file
from bloomery.types.errors import Corrupt, NotSupported, TooLarge
from bloomery.types.tensor_file import ITEM_BYTES, TensorSpec

DTYPES = st.sampled_from(sorted(ITEM_BYTES))
NAMES = st.one_of(
    st.from_regex(r"model\.layers\.[0-9]{1,2}\.(mlp|self_attn)\.[a-z]{1,3}", fullmatch=True),
    st.text(min_size=1, max_size=8).filter(lambda name: name.isprintable()),
)
SPECS = st.dictionaries(NAMES, st.builds(TensorSpec, DTYPES, st.lists(st.integers(0, 4), max_size=3).map(tuple)), max_size=8)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 5)
    return 5


def filled(layout: Layout) -> MemoryWeights:
    weights = MemoryWeights.zeros(layout)
    for tensor in layout.tensors:
        weights[tensor.name][:] = np.arange(tensor.first, tensor.first + tensor.numel).astype(weights[tensor.name].dtype)
    return weights


def runs(layout: Layout) -> Iterator[tuple[str, list[int]]]:
    """One by one: dtype and indices of neighbours of one dtype."""
    every = [(tensor.dtype, tensor.first + place) for tensor in layout.tensors for place in range(tensor.numel)]
    start = 0
    for place in range(1, len(every) + 1):
        if place == len(every) or every[place][0] != every[start][0]:
            yield every[start][0], [index for _, index in every[start:place]]
            start = place


@given(specs=SPECS)
def test_a_table_says_the_layout_again_and_has_one_encoding(specs):
    layout = Layout.of(specs)
    again = Layout.parse(layout.table)
    assert again.tensors == layout.tensors
    assert again.hash == layout.hash
    assert [tensor.name for tensor in layout.tensors] == sorted(specs)
    assert Layout.of(dict(reversed(specs.items()))).table == layout.table


@given(specs=SPECS, data=st.data())
def test_a_table_that_was_changed_is_refused_or_is_that_of_another_layout(specs, data):
    layout = Layout.of(specs)
    at = data.draw(st.integers(0, len(layout.table) - 1))
    changed = bytearray(layout.table)
    changed[at] ^= data.draw(st.integers(1, 255))
    try:
        other = Layout.parse(bytes(changed))
    except Corrupt:
        return
    assert other.tensors != layout.tensors
    assert other.hash != layout.hash


@pytest.mark.usefixtures("small_chunks")
def test_chunks_are_runs_of_one_dtype_cut_in_order(small_chunks):
    @given(specs=SPECS)
    def holds(specs):
        layout = Layout.of(specs)
        expected = [(dtype, run[start : start + small_chunks]) for dtype, run in runs(layout) for start in range(0, len(run), small_chunks)]
        assert [(chunk.dtype, list(range(chunk.first, chunk.first + chunk.numel))) for chunk in layout.chunks()] == expected
        assert [chunk.number for chunk in layout.chunks()] == list(range(layout.chunk_count))
        assert layout.chunk_sizes.numels.tolist() == [chunk.numel for chunk in layout.chunks()]
        assert layout.chunk_sizes.item_bytes.tolist() == [ITEM_BYTES[chunk.dtype] for chunk in layout.chunks()]
        weights = filled(layout)
        for chunk in layout.chunks():
            assert weights.read(chunk).tolist() == np.arange(chunk.first, chunk.first + chunk.numel).astype(chunk.unsigned).tolist()

    holds()


@pytest.mark.usefixtures("small_chunks")
def test_what_is_written_to_a_chunk_is_what_is_read_and_nothing_else_changes():
    @given(specs=SPECS, data=st.data())
    def holds(specs, data):
        layout = Layout.of(specs)
        weights = filled(layout)
        if not layout.chunk_count:
            return
        number = data.draw(st.integers(0, layout.chunk_count - 1))
        before = {chunk.number: weights.read(chunk).copy() for chunk in layout.chunks()}
        chunk = layout.chunk(number)
        indices = np.array(sorted(data.draw(st.sets(st.integers(0, chunk.numel - 1)))), np.uint32)
        values = np.array([data.draw(st.integers(0, np.iinfo(chunk.unsigned).max)) for _ in indices], chunk.unsigned)
        weights.write(chunk, indices, values)
        before[number][indices] = values
        for each in layout.chunks():
            assert weights.read(each).tolist() == before[each.number].tolist()

    holds()


def test_the_index_of_an_element_is_the_one_that_manifests_hash_with():
    specs = {"b": TensorSpec("BF16", (3, 5)), "a": TensorSpec("F32", (7,)), "c": TensorSpec("U8", (0,)), "d": TensorSpec("F16", ())}
    layout = Layout.of(specs)
    weights = filled(layout)
    blob = tensor_file.header(specs, {}) + b"".join(weights[name].tobytes() for name in specs)
    root = total(StateHash.parse(entry.state) for entry in describe(blob))
    assert total(hash_elements(weights.read(chunk), chunk.first) for chunk in layout.chunks()) == root


def test_a_chunk_has_as_many_elements_as_are_promised():
    layout = Layout.of({"a": TensorSpec("BF16", (3, CHUNK_ELEMENTS)), "b": TensorSpec("BF16", (5,)), "c": TensorSpec("U8", (5,))})
    assert [chunk.numel for chunk in layout.chunks()] == [CHUNK_ELEMENTS] * 3 + [5, 5]
    assert layout.size_bytes == sum(chunk.size_bytes for chunk in layout.chunks())
    with pytest.raises(IndexError):
        layout.chunk(5)


def test_memory_weights_change_the_arrays_they_were_given():
    layout = Layout.of({"a": TensorSpec("BF16", (2, 2))})
    own = np.zeros((2, 2), np.uint16)
    MemoryWeights(layout, {"a": own}).write(layout.chunk(0), np.array([3], np.uint32), np.array([7], np.uint16))
    assert own.tolist() == [[0, 0], [0, 7]]


@pytest.mark.parametrize(
    "wrong", [np.zeros(4, np.int16), np.zeros(3, np.uint16), np.zeros((4, 4), np.uint16)[:, 0]], ids=["signed", "short", "strided"]
)
def test_memory_weights_of_another_form_are_refused(wrong):
    with pytest.raises(TypeError, match="`a` should be 4 elements of uint16 in one piece"):
        MemoryWeights(Layout.of({"a": TensorSpec("BF16", (4,))}), {"a": wrong})


def varint(number: int) -> bytes:
    digits = [number >> shift & 0x7F for shift in range(0, max(1, number.bit_length()), 7)]
    return bytes([*(digit | 0x80 for digit in digits[:-1]), digits[-1]])


HOSTILE = {
    "a count of 2**60": varint(1 << 60),
    "a number without an end": b"\xff" * 40,
    "a size of 2**60": b"\x01\x00\x01a\x01\x01" + varint(1 << 60),
    "sizes whose product is beyond all": b"\x01\x00\x01a\x01\x10" + varint(1 << 47) * 16,
    "a name of 2**40 bytes": b"\x01\x00" + varint(1 << 40),
    "a name that shares what is not there": b"\x01\x05\x01a\x01\x00",
    "an empty name": b"\x01\x00\x00\x01\x00",
    "a name twice": b"\x02\x00\x01a\x01\x00" + b"\x01\x00\x01\x00",
    "names out of order": b"\x02\x00\x01b\x01\x00" + b"\x00\x01a\x01\x00",
    "a name that shares less than it could": b"\x02\x00\x01a\x01\x00" + b"\x00\x02ab\x01\x00",
    "a number in too many bytes": b"\x01\x00\x01a\x01\x01\x81\x00",
    "bytes behind the end": b"\x01\x00\x01a\x01\x00\x00",
    "a dtype that there is not": b"\x01\x00\x01a\x11\x00",
    "seventeen sizes": b"\x01\x00\x01a\x01\x11" + b"\x01" * 17,
    "a name that is no text": b"\x01\x00\x01\xff\x01\x00",
    "nothing": b"",
}


@pytest.mark.parametrize("table", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_table_that_lies_is_refused_at_once(table):
    with pytest.raises(Corrupt):
        Layout.parse(table)


def test_names_that_share_nearly_all_take_no_more_memory_than_a_layout_may():
    # A thousand bytes shared by each of three hundred thousand names are 300 MB of them, from two megabytes.
    first = varint(0) + varint(1020) + b"a" * 1020 + b"\x01\x00"
    assert Layout.parse(varint(3) + first + _sharing(2)).tensors[-1].name == "a" * 1020 + "bbbc"
    with pytest.raises(Corrupt, match="names too many"):
        Layout.parse(varint(300_000) + first + _sharing(299_999))


def _sharing(count: int) -> bytes:
    """Entries whose names share all but what counts them up."""
    alphabet = b"bcdefghijklmnopqrstuvwxyz"
    entries, before = [], None
    for place in range(count):
        digits = bytes(alphabet[place // 25**power % 25] for power in (3, 2, 1, 0))
        shared = 1020 if before is None else 1020 + next(at for at in range(4) if digits[at] != before[at])
        entries.append(varint(shared) + varint(1024 - shared) + digits[shared - 1020 :] + b"\x01\x00")
        before = digits
    return b"".join(entries)


def test_dtypes_without_whole_bytes_and_sizes_beyond_all_are_refused():
    with pytest.raises(NotSupported, match="`a` holds F4 numbers"):
        Layout.of({"a": TensorSpec("F4", (2,))})
    with pytest.raises(TooLarge):
        Layout.of({"a": TensorSpec("U8", (MAX_ELEMENTS + 1,))})


def test_layouts_say_in_which_tensor_they_differ():
    layout = Layout.of({"a": TensorSpec("BF16", (2,)), "b": TensorSpec("BF16", (2,))})
    assert layout.difference(Layout.parse(layout.table)) is None
    assert layout.difference(Layout.of({"a": TensorSpec("BF16", (2,))})) == "`b` is there and should not be"
    assert Layout.of({"a": TensorSpec("BF16", (2,))}).difference(layout) == "`b` is missing"
    other = Layout.of({"a": TensorSpec("F32", (2, 1)), "b": TensorSpec("BF16", (2,))})
    assert other.difference(layout) == "`a` is F32 [2, 1], not BF16 [2]"


def test_every_dtype_of_whole_bytes_has_a_number_of_its_own():
    tables = {Layout.of({"a": TensorSpec(dtype, (2,))}).table for dtype in ITEM_BYTES}
    assert len(tables) == len(ITEM_BYTES)
    assert {UNSIGNED[size] for size in ITEM_BYTES.values()} == set(UNSIGNED.values())


def test_chunks_of_many_small_tensors_have_each_of_them_once():
    layout = Layout.of({f"{place:06d}": TensorSpec("BF16", (64,)) for place in range(20_000)})
    parts = [part.tensor.name for chunk in layout.chunks() for part in layout.parts(chunk)]
    assert parts == [tensor.name for tensor in layout.tensors]
