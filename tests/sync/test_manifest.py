"""The manifest: one canonical form, a hash that names it, and a check that finds every difference."""

import json
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from bloomery.sync.manifest import Manifest, TensorEntry, describe, digest, root, verify
from bloomery.sync.publish import manifest_key, publish, weights_key
from bloomery.types.errors import Corrupt

A, B = "layers.0.q_proj.lora_A.weight", "layers.0.q_proj.lora_B.weight"
TENSORS = {A: np.arange(6, dtype=np.float32).reshape(2, 3), B: np.zeros((4, 2), np.float32)}
BLOB = save(TENSORS)
NEW_IN_2, NEW_OF_TENSORS_IN_2 = ("state", "tokenizer_hash"), ("state",)
"""Fields that format 1 does not have."""


def manifest(**changes: object) -> Manifest:
    fields = {
        "run_id": "run-1",
        "step": 3,
        "base": "b" * 32,
        "parent": "b" * 32,
        "template_hash": "t" * 32,
        "numerics": "n",
        "rank": 2,
        "alpha": 32.0,
        "targets": ("attn", "mlp"),
        "key": "snapshots/x.safetensors",
        "size_bytes": len(BLOB),
        "tensors": describe(BLOB),
    }
    fields |= changes
    if "state" not in fields:
        fields["state"] = root(fields["tensors"])
    return Manifest(**fields)


def of_format_1(**changes: object) -> Manifest:
    """As versions were published before there were state hashes."""
    entries = tuple(msgspec.structs.replace(entry, state="") for entry in describe(BLOB))
    return manifest(**{"format": 1, "tensors": entries, "state": "", **changes})


@pytest.mark.parametrize(("made", "version"), [(of_format_1, "5daf7005b9fe95e552c8842ede7a2c31"), (manifest, "f675bb633a095a280228dbdfb0b3f371")])
def test_the_version_is_a_golden_value(made, version):
    # A version is written into responses, traffic and deployments: a change of the canonical form would orphan them all.
    assert made(size_bytes=100).version == version


def test_manifests_of_format_1_are_read_with_the_bytes_they_have():
    data = of_format_1().to_json()
    assert b"state" not in data
    assert b"tokenizer" not in data
    assert Manifest.from_json(data) == of_format_1()
    assert Manifest.from_json(data).to_json() == data


def test_who_verifies_a_blob_of_either_format_learns_its_state_hashes():
    assert verify(of_format_1(), BLOB) == verify(manifest(), BLOB) == manifest().tensors


def test_the_state_hashes_of_a_whole_model_are_those_of_its_manifest_where_it_has_them():
    assert verify(of_format_1(kind="full"), BLOB) == manifest().tensors
    first, second = describe(BLOB)
    own = (msgspec.structs.replace(first, state="0" * 31 + "1"), second)
    assert verify(manifest(kind="full", tensors=own), BLOB) == own


def test_state_hashes_count_elements_through_all_tensors():
    first, second = manifest().tensors
    shifted = describe(save({"a": np.zeros(1, np.float32)} | TENSORS))
    assert (first.name, second.name) == (A, B)
    assert shifted[1].digest == first.digest
    assert shifted[1].state != first.state, "an element's key is that of its place among all"
    assert second.state == "0" * 32, "zeros add nothing, whatever their place"


def test_a_state_hash_that_is_not_that_of_the_values_is_refused():
    first, second = describe(BLOB)
    wrong = (msgspec.structs.replace(first, state="0" * 31 + "1"), second)
    with pytest.raises(Corrupt, match=f"`{A}`"):
        verify(manifest(tensors=wrong), BLOB)


def entry(name: str, state: str) -> TensorEntry:
    return TensorEntry(name=name, dtype="float32", shape=(1,), digest="d" * 32, state=state)


UNSOUND = [
    ({"state": "0" * 32}, "add up"),
    ({"tensors": (entry("a", ""),), "state": "0" * 32}, "state hash"),
    ({"tensors": (entry("b", "0" * 32), entry("a", "0" * 32))}, "in order"),
    ({"tensors": (entry("a", "0" * 32), entry("a", "0" * 32))}, "in order"),
]


@pytest.mark.parametrize(("changes", "said"), UNSOUND)
def test_a_manifest_whose_hashes_contradict_each_other_is_refused(changes, said):
    with pytest.raises(Corrupt, match=said):
        Manifest.from_json(manifest(**changes).to_json())


def test_canonical_bytes_survive_a_round_trip():
    data = manifest().to_json()
    assert Manifest.from_json(data) == manifest()
    assert list(json.loads(data)) == sorted(json.loads(data))


@given(name=st.text(max_size=8), step=st.integers(0, 2**40), alpha=st.floats(0.001, 1e6))
def test_any_manifest_reads_back_as_itself(name, step, alpha):
    original = manifest(run_id=name, step=step, alpha=alpha)
    read = Manifest.from_json(original.to_json())
    assert (read, read.version) == (original, original.version)
    assert with_another(read, "step").version == with_another(original, "step").version


def another(value: object) -> object:
    """Of the same kind; a field of a kind that is not here yet needs a line."""
    match value:
        case "lora":
            return "full"
        case str():
            return f"{value}x"
        case int() | float():
            return value - 1
        case (*all_but_one, _):
            return tuple(all_but_one)
    raise TypeError(f"say what another {type(value).__name__} is")


def with_another(struct, name: str):
    """The same but for one field."""
    return msgspec.structs.replace(struct, **{name: another(getattr(struct, name))})


@pytest.mark.parametrize("made", [manifest, of_format_1])
def test_every_field_is_part_of_the_identity(made):
    original = made()
    fields = [name for name in Manifest.__struct_fields__ if made is manifest or name not in NEW_IN_2]
    assert [name for name in fields if with_another(original, name).version == original.version] == []


@pytest.mark.parametrize("made", [manifest, of_format_1])
def test_every_field_of_every_tensor_is_part_of_the_identity(made):
    original = made()
    fields = [name for name in TensorEntry.__struct_fields__ if made is manifest or name not in NEW_OF_TENSORS_IN_2]
    for number, entry in enumerate(original.tensors):
        for name in fields:
            tensors = (*original.tensors[:number], with_another(entry, name), *original.tensors[number + 1 :])
            assert msgspec.structs.replace(original, tensors=tensors).version != original.version, (entry.name, name)


def test_entries_name_dtype_shape_and_values_in_the_order_of_names():
    first, second = describe(BLOB)
    assert (first.name, first.dtype, first.shape) == (A, "float32", (2, 3))
    assert first.digest == digest(TENSORS[A].tobytes())
    assert (second.name, second.digest) == (B, digest(bytes(32)))


def test_metadata_of_the_blob_is_not_part_of_the_weights():
    assert describe(save(TENSORS, {"format": "pt"})) == describe(BLOB)


CHANGED = [
    ({A: TENSORS[A] + np.float32(2**-20)}, A),
    ({A: TENSORS[A].reshape(3, 2)}, A),
    ({A: TENSORS[A].view(np.int32)}, A),
    ({B: np.full((4, 2), -0.0, np.float32)}, B),
    ({"surplus": np.zeros(1, np.float32)}, "surplus"),
]


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize(("change", "named"), CHANGED)
def test_verify_names_the_first_tensor_that_differs(change, named, kind):
    verify(manifest(kind=kind), BLOB)
    with pytest.raises(Corrupt, match=f"`{named}`"):
        verify(manifest(kind=kind), save(TENSORS | change))


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_missing_tensor_is_found(kind):
    with pytest.raises(Corrupt, match=f"`{B}`"):
        verify(manifest(kind=kind), save({A: TENSORS[A]}))


@pytest.mark.parametrize("blob", [b"", b"12345", BLOB[:40], BLOB[:-1], (10**12).to_bytes(8, "little") + BLOB[8:]])
def test_a_damaged_blob_is_corrupt_and_not_a_crash(blob):
    with pytest.raises(Corrupt):
        verify(manifest(), blob)


NOT_CANONICAL = [b"", b"{}", b"[1]", b"\xff", manifest().to_json() + b" ", manifest().to_json().replace(b'"step":3', b'"step":3,"x":1')]


@pytest.mark.parametrize("data", NOT_CANONICAL)
def test_what_is_not_a_canonical_manifest_is_refused(data):
    with pytest.raises(Corrupt):
        Manifest.from_json(data)


@pytest.mark.parametrize("change", [{"format": 3}, {"kind": "delta"}])
def test_a_manifest_of_another_format_or_kind_is_refused(change):
    builtins = msgspec.to_builtins(manifest()) | change
    with pytest.raises(Corrupt, match=next(iter(change))):
        Manifest.from_json(json.dumps(builtins).encode())


def test_publishing_writes_the_weights_before_the_manifest_that_names_them():
    written: list[tuple[str, bytes]] = []
    found = ("format", "key", "size_bytes", "state", "tensors")
    identity = {name: getattr(manifest(), name) for name in Manifest.__struct_fields__ if name not in found}
    for _ in range(2):
        published = publish(lambda blobs: written.extend(blobs.items()), BLOB, **identity)
    assert written[:2] == [(weights_key(BLOB), BLOB), (manifest_key(published.version), published.to_json())]
    assert written[2:] == written[:2], "publishing again writes the same bytes to the same keys"
    verify(Manifest.from_json(written[1][1]), written[0][1])


def test_the_modules_need_no_torch():
    # tests/test_slim_imports.py does not reach them: nothing that starts fast imports them yet.
    code = "import sys, bloomery.sync.manifest, bloomery.sync.publish; print(*sorted({'torch', 'bloomery.sync.publish'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["bloomery.sync.publish"]


def test_digests_are_blake3_of_the_bytes():
    # First 32 digits of blake3 of nothing, from the specification's test vectors.
    assert digest(b"") == "af1349b9f5f9a1a6a0404dea36dcc949"
