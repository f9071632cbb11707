"""What a shelf loads: versions whose every tensor is of the dtype in which the engine has it, looked at no more often than proves something."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch

from bloomery.engine.shelf import BlobShelf
from bloomery.models.families import FAMILIES, read_config
from bloomery.models.load import load_decoder, stored_tensors
from bloomery.models.names import stored_places
from bloomery.store.blobs import Blobs
from bloomery.sync import live, state_hash
from bloomery.sync import manifest as sync_manifest
from bloomery.sync.chain.keys import NO_KEYS
from bloomery.sync.manifest import Manifest, TensorEntry, root
from bloomery.sync.publish import manifest_key
from bloomery.sync.state_hash import Bits, StateHash
from bloomery.types.errors import Conflict
from bloomery.types.generation import Weights
from bloomery.types.operations import SnapshotResult
from tests.engine.faults import world
from tests.infer.builders import generate, prompt, request
from tests.models.builders import saved
from tests.train.builders import BASE_HASH, SAVE, learn, run, step, supervised, train

WITH_FLOAT32 = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "kimi_k2", "nemotron_h")
"""Families whose routers choose by a bias that stays in float32."""
QUICK = "glm4_moe"
NORM, BIAS = "model.norm.weight", "model.layers.1.mlp.gate.e_score_correction_bias"


class Kept(NamedTuple):
    """A version of a run on a model in bfloat16."""

    shelf: BlobShelf
    blobs: Blobs
    weights: Weights
    manifest: Manifest


def kept(family: str, directory: Path, *, rank: int) -> Kept:
    model, blobs = load_decoder(saved(family, directory / "model"), dtype=torch.bfloat16), Blobs(directory / "blobs")
    shelf = BlobShelf(blobs, model, base_hash=BASE_HASH, numerics="test", keys=NO_KEYS)
    published = train(run(model, shelf, rank=rank), [learn(supervised([20, 40])), step(3e-2), SAVE])[-1]
    assert isinstance(published, SnapshotResult)
    manifest = Manifest.from_json(blobs.get(manifest_key(published.version)))
    return Kept(shelf, blobs, Weights(version=published.version, key=published.key), manifest)


@pytest.mark.parametrize("family", [pytest.param(family, marks=[] if family == QUICK else pytest.mark.slow) for family in WITH_FLOAT32])
def test_a_whole_model_in_half_precision_is_loaded_with_what_it_has_in_float32(family: str, tmp_path: Path) -> None:
    version = kept(family, tmp_path, rank=0)
    loaded = version.shelf.load(version.weights)
    published = {entry.name: entry.dtype for entry in version.manifest.tensors}
    assert {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in stored_tensors(loaded.decoder).items()} == published
    assert set(published.values()) == {"bfloat16", "float32"}
    assert loaded.proof is not None
    assert loaded.proof.root == version.manifest.state


@pytest.mark.slow
def test_the_families_that_have_something_in_float32_are_these(tmp_path: Path) -> None:
    configs = {family: read_config(saved(family, tmp_path / family)) for family in FAMILIES}
    assert {family for family, config in configs.items() if any(place.in_float32 for _, place in stored_places(config))} == set(WITH_FLOAT32)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return kept(QUICK, tmp_path_factory.mktemp("whole"), rank=0)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return kept(QUICK, tmp_path_factory.mktemp("adapter"), rank=8)


def in_dtype(version: Kept, name: str, dtype: str) -> Weights:
    """The same with one tensor that says it is of another dtype."""

    def changed(entry: TensorEntry) -> TensorEntry:
        return msgspec.structs.replace(entry, dtype=dtype) if entry.name == name else entry

    tensors = tuple(map(changed, version.manifest.tensors))
    manifest = msgspec.structs.replace(version.manifest, tensors=tensors, state=root(tensors))
    version.blobs.put(manifest_key(manifest.version), manifest.to_json())
    return Weights(version=manifest.version, key=manifest.key)


@pytest.mark.parametrize(("name", "dtype", "own"), [(NORM, "float32", "bfloat16"), (NORM, "float16", "bfloat16"), (BIAS, "bfloat16", "float32")])
def test_a_tensor_of_another_dtype_than_the_engine_has_it_in_is_refused_by_its_name(name: str, dtype: str, own: str, whole: Kept) -> None:
    with pytest.raises(Conflict, match=f"published with `{name}` in {dtype}, .* has that in {own}: start it with the dtype"):
        whole.shelf.load(in_dtype(whole, name, dtype))


def test_an_adapter_of_another_dtype_is_refused(adapter: Kept) -> None:
    name = adapter.manifest.tensors[0].name
    assert adapter.shelf.load(adapter.weights).adapter is not None
    with pytest.raises(Conflict, match=f"published with `{name}` in float32"):
        adapter.shelf.load(in_dtype(adapter, name, "float32"))


@pytest.mark.parametrize("alone", [False, True])
def test_a_whole_model_is_hashed_once_in_each_form_that_stays_in_memory(alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(tmp_path, 0)
    sampler, hashed, hash_parts = made.sampler(alone=alone), [], state_hash.hash_parts

    def counted(bits: Bits, stops: Sequence[int], first: int) -> list[StateHash]:
        hashed.append(len(bits))
        return hash_parts(bits, stops, first)

    for module in (state_hash, live, sync_manifest):
        monkeypatch.setattr(module, "hash_parts", counted)
    asked = msgspec.structs.replace(request("r", prompt(20)), weights=made.new)
    assert generate(sampler, asked)["r"].failure is None
    proof = sampler.versions.proofs[made.new.version]
    tensors = Manifest.from_json(made.blobs.get(manifest_key(made.new.version))).tensors
    plain = sum(math.prod(entry.shape) for entry in tensors)
    assert proof.numel > plain, "a packed head lies beside the embedding"
    assert sum(hashed) == proof.numel + (0 if alone else plain)
