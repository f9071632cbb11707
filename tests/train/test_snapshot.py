"""Snapshots: the sampler gets the trainer's bits, and the PEFT library reads them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load

from bloomery.models.adapters import AdapterRows
from bloomery.models.attention import PackedAttention
from bloomery.models.decoder import Decoder
from bloomery.models.fused_adapter import FusedAdapter, fuse
from bloomery.models.head import token_logprobs
from bloomery.models.pads import packed_positions
from bloomery.models.targets import UNEMBED
from bloomery.sync.manifest import Manifest, verify
from bloomery.train import snapshot
from bloomery.train.full import FullParameters
from bloomery.train.lora import Lora
from bloomery.types.operations import Failed, LoraSpec, SaveSnapshot, SnapshotResult
from tests.train import builders
from tests.train.builders import finish, learn, logprobs, step, supervised, train
from tests.train.builders import load as load_checkpoint

SAVE = SaveSnapshot(template_hash="t" * 32)


def trained_run(model: Decoder, shelf: builders.MemoryShelf | None = None, **lora: object):
    trained = builders.run(model, shelf, **lora)
    train(trained, [learn(supervised([20, 40])), step(3e-2)] * 3)
    return trained


def scored(model: Decoder, adapter: FusedAdapter, tokens: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
    """Log-probabilities of one sequence (a multiple of four tokens) under an adapter."""
    rows = len(tokens)
    with torch.no_grad():
        hidden = model.hidden(tokens, packed_positions([rows]), PackedAttention([rows], exact=True), AdapterRows(((adapter, 0, rows),)))
        return token_logprobs(hidden, model.head_weight, adapter.get(UNEMBED), targets[:, None])[:, 0].numpy()


@pytest.mark.parametrize(("dtype", "experts"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_the_published_adapter_gives_the_trainers_bits(dtype, experts):
    model, shelf = builders.decoder(dtype=dtype, experts=experts), builders.MemoryShelf()
    trained = trained_run(model, shelf)
    published = finish(trained, SAVE)
    assert isinstance(published, SnapshotResult)
    adapter = snapshot.read(shelf.blobs[published.key], model, rank=8, alpha=32.0)
    data = supervised([48], seed=9)
    own = logprobs(finish(trained, learn(data, backward=False)))[0]
    tokens, targets = (torch.tensor(values.numpy().astype(np.int64)) for values in (data[0].tokens, data[0].inputs["target_tokens"]))
    assert np.array_equal(scored(model, adapter, tokens, targets), own)


def test_the_manifest_names_the_version_and_proves_the_blob():
    model, shelf = builders.decoder(), builders.MemoryShelf()
    published = finish(trained_run(model, shelf, train_mlp=False), SAVE)
    manifest = Manifest.from_json(shelf.blobs[f"manifests/{published.version}"])
    assert manifest.version == published.version
    assert (manifest.run_id, manifest.step, manifest.base, manifest.parent) == ("run-1", 3, builders.BASE_HASH, builders.BASE_HASH)
    assert (manifest.rank, manifest.alpha, manifest.targets, manifest.template_hash) == (8, 32.0, ("attn", "unembed"), "t" * 32)
    assert (manifest.key, manifest.size_bytes) == (published.key, len(shelf.blobs[published.key]))
    verify(manifest, shelf.blobs[manifest.key])


def test_names_and_shapes_are_those_of_peft():
    model = builders.decoder(dtype=torch.bfloat16)
    tensors = load(trained_run(model).snapshot("t").data)
    assert tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (8, 64)
    assert tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"].shape == (64, 8)
    assert tensors["base_model.model.model.unembed_tokens.lora_B.weight"].shape == (builders.VOCAB, 8)
    assert len(tensors) == 2 * (2 * 7 + 1)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_experts_are_stacked_under_their_own_name():
    tensors = load(trained_run(builders.decoder(experts=True)).snapshot("t").data)
    assert tensors["base_model.model.model.layers.1.mlp.experts.up_proj.lora_A.weight"].shape == (4, 8, 64)
    assert tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"].shape == (8, 64)


def test_each_snapshot_names_the_one_before_as_its_parent():
    model, shelf = builders.decoder(), builders.MemoryShelf()
    trained = trained_run(model, shelf)
    first, again = train(trained, [SAVE, SAVE])
    assert first == again, "the same weights are the same version"
    second = train(trained, [learn(supervised([20])), step(), SAVE])[-1]
    parents = [Manifest.from_json(shelf.blobs[f"manifests/{published.version}"]).parent for published in (first, second)]
    assert parents == [builders.BASE_HASH, first.version]


def test_a_run_that_loads_a_checkpoint_continues_its_line_of_versions():
    model, shelf = builders.decoder(), builders.MemoryShelf()
    trained = trained_run(model, shelf)
    first = finish(trained, SAVE)
    shelf.write("c", trained.checkpoint_bytes())
    heir = builders.run(model, shelf, run_id="run-2")
    second = train(heir, [load_checkpoint("c", optimizer=False), learn(supervised([20])), step(), SAVE])[-1]
    manifest = Manifest.from_json(shelf.blobs[f"manifests/{second.version}"])
    assert (manifest.run_id, manifest.parent, manifest.step) == ("run-2", first.version, 1)


def test_merged_weights_give_the_same_logprobs():
    model = builders.decoder()
    trained = trained_run(model, train_unembed=False)
    data = supervised([64], seed=4)
    unmerged = logprobs(finish(trained, learn(data, backward=False)))[0]
    merge(model, trained)
    tokens, targets = (torch.tensor(values.numpy().astype(np.int64)) for values in (data[0].tokens, data[0].inputs["target_tokens"]))
    merged = scored(model, fuse({}, {}, 1.0), tokens, targets)
    # (W + sBA)x against Wx + sBAx: float32 rounding of two layers.
    np.testing.assert_allclose(merged, unmerged, rtol=0, atol=2e-5)


def merge(model: Decoder, trained) -> None:
    """Add every update to its base weight."""
    for layer, block in enumerate(model.layers):
        for projection, weight in {"qkv": block.qkv, "o": block.o, "gate_up": block.mlp.gate_up, "down": block.mlp.down}.items():
            where = "self_attn" if projection in ("qkv", "o") else "mlp"
            parts = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}[projection]
            masters = dict(trained.weights.named(trained.weights.masters))
            names = [f"layers.{layer}.{where}.{part}_proj" for part in parts]
            weight.data += 32 / 8 * torch.cat([masters[f"{name}.lora_B"] @ masters[f"{name}.lora_A"] for name in names])


def test_writing_is_deterministic(tmp_path: Path):
    model = builders.decoder()
    left, right = trained_run(model).snapshot("t"), trained_run(model).snapshot("t")
    assert left == right


@pytest.mark.parametrize("rank", [0, 8])
def test_weights_that_a_forward_does_not_see_are_not_published(rank, monkeypatch):
    trained = builders.run(builders.decoder(dtype=torch.bfloat16), rank=rank)
    lessons = [learn(supervised([30])), step(3e-2), SAVE]
    assert isinstance(train(trained, lessons)[-1], SnapshotResult)
    monkeypatch.setattr(FullParameters if rank == 0 else Lora, "refresh", lambda self: None)
    failed = train(trained, lessons)[-1]
    assert isinstance(failed, Failed)
    assert "than it would publish" in failed.message


def test_numbers_around_the_factors_of_a_run_are_seen():
    weights = Lora(builders.decoder(), LoraSpec(rank=8, seed=1))
    assert weights.stale() is None
    with torch.no_grad():
        weights.fused().tensors[0][-1, -1] = 1e-3
    assert weights.stale() == "1 numbers around the factors"


@pytest.mark.parametrize("rank", [1, 8, 16])
def test_factors_of_any_rank_are_those_that_are_computed_with(rank):
    weights = Lora(builders.decoder(), LoraSpec(rank=rank, seed=1))
    assert weights.stale() is None
    weights.masters.add_(1e-3)
    assert weights.stale() is not None
    weights.refresh()
    assert weights.stale() is None
