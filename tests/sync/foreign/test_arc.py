"""Both formats over weights of every kind: what is written is read back, and what is read says what it is."""

import pickle
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.sync.codec.layout import CHUNK_ELEMENTS, Layout, MemoryWeights
from bloomery.sync.foreign import delta
from bloomery.sync.foreign.delta import FORMATS, ForeignDelta, Format
from bloomery.types.errors import InvalidInput
from bloomery.types.tensor_file import TensorSpec
from tests.sync.codec.weights import copied, same
from tests.sync.foreign.payloads import checksum_of, coded, delta_of, envelope
from tests.sync.foreign.weights import every_kind, one, step

FORMAT: Final = pytest.mark.parametrize("form", FORMATS)


@FORMAT
def test_weights_of_every_kind_come_back_to_the_bit(form: Format) -> None:
    old, new = every_kind()
    data = delta.encode(old, new, form)
    found = ForeignDelta.parse(data)
    assert found.format == form
    applied = delta.apply(found, old)
    assert same(old, new)
    assert applied.tensors > 50
    assert delta.encode(old, new, form) != data, "a delta between equal weights is another"


@FORMAT
@settings(max_examples=30)
@given(
    shape=st.lists(st.integers(0, 30), max_size=3).map(tuple),
    dtype=st.sampled_from(("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "U8", "F64")),
    share=st.floats(0, 1),
    seed=st.integers(0, 1 << 32),
)
def test_any_change_comes_back_and_equal_weights_give_equal_bytes(form: Format, shape: tuple[int, ...], dtype: str, share: float, seed: int) -> None:
    old, new = one(shape, share, dtype, seed)
    data = delta.encode(old, new, form)
    assert delta.encode(copied(old), copied(new), form) == data
    delta.apply(ForeignDelta.parse(data), old)
    assert same(old, new)


def test_the_forms_of_arc_v3_are_all_written() -> None:
    shapes = {"unchanged": (64, 50), "long": (30_000,), "of short rows": (300, 400), "small": (8, 8)}
    shares = {"unchanged": 0.0, "long": 0.02, "of short rows": 0.01, "small": 1.0}
    old, new = step({name: TensorSpec("BF16", shape) for name, shape in shapes.items()}, shares)
    said = {each.name: each.encoding for each in ForeignDelta.parse(delta.encode(old, new, "arc_v3")).describe()}
    assert said == {"unchanged": "none", "long": "flat zigzag raw", "of short rows": "row zigzag raw", "small": "xor zstd"}


def test_a_description_counts_what_changed() -> None:
    old, new = one()
    (said,) = ForeignDelta.parse(delta.encode(old, new, "arc_v3")).describe()
    assert (said.elements, said.changed) == (64 * 500, int(np.count_nonzero(old["w"] != new["w"])))
    (said,) = ForeignDelta.parse(delta.encode(old, new, "arc_v2")).describe()
    assert (said.encoding, said.elements, said.changed) == ("xor zstd", None, None)


@FORMAT
def test_tensors_that_lie_in_several_chunks_are_put_together(form: Format) -> None:
    specs = {"a": TensorSpec("BF16", (700,)), "b": TensorSpec("BF16", (3, CHUNK_ELEMENTS - 100)), "c": TensorSpec("F32", (50,))}
    old, new = step(specs, dict.fromkeys(specs, 0.001))
    assert old.layout.chunk_count == 5
    delta.apply(ForeignDelta.parse(delta.encode(old, new, form)), old)
    assert same(old, new)


@FORMAT
def test_what_has_no_room_in_memory_is_decoded_again(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "STAGED_BYTES", 5_000)
    old, new = every_kind()
    delta.apply(ForeignDelta.parse(delta.encode(old, new, form)), old)
    assert same(old, new)


def test_weights_of_different_layouts_have_no_delta() -> None:
    with pytest.raises(InvalidInput, match=r"`w` is BF16 \[64, 501\], not BF16 \[64, 500\]"):
        delta.encode(one().old, one((64, 501)).new, "arc_v2")


def test_values_by_a_codebook_are_read() -> None:
    both = one()
    (said,) = (found := ForeignDelta.parse(delta_of(envelope(pickle.dumps(coded(both))), checksum_of(both.new)))).describe()
    assert said.encoding.endswith("codebook3")
    delta.apply(found, both.old)
    assert same(both.old, both.new)


def test_a_delta_is_known_by_its_first_bytes() -> None:
    old, new = one()
    assert all(delta.looks_so(delta.encode(old, new, form)[:16]) for form in FORMATS)
    assert not any(delta.looks_so(start) for start in (b"", b"BD1\0" + bytes(60), bytes(64), b"\x28\xb5\x2f\xfd" + bytes(60)))


def test_all_bits_of_a_number_come_back() -> None:
    """Every bfloat16 to every other by one unit, past zero and past infinity too."""
    layout = Layout.of({"w": TensorSpec("BF16", (1 << 16,))})
    bits = np.arange(1 << 16, dtype=np.uint16)
    for by in (1, -1, 0x80, 0x8000):
        old, new = MemoryWeights(layout, {"w": bits.copy()}), MemoryWeights(layout, {"w": bits + np.array(by).astype(np.uint16)})
        for form in FORMATS:
            mine = copied(old)
            delta.apply(ForeignDelta.parse(delta.encode(old, new, form)), mine)
            assert same(mine, new)
