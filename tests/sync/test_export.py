"""Exports against PEFT and `transformers`: what they load gives the trainer's log-probabilities."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from bloomery.models.load import load_decoder, stored_tensors
from bloomery.sync.export import ExportFile, adapter, decode, encode, merged
from bloomery.sync.manifest import Manifest
from bloomery.train.run import TrainableRun
from bloomery.types.errors import Corrupt, NotSupported
from tests.models.builders import SMALL, saved
from tests.train import builders
from tests.train.builders import SAVE, finish, learn, logprobs, step, supervised, train

DATA = supervised([5, 37, 64], seed=2)


class Trained:
    """A run on a saved base model, and its published version."""

    def __init__(self, base: Path, dtype: torch.dtype = torch.float32, **lora: object) -> None:
        self.base, self.shelf = base, builders.MemoryShelf()
        self.run: TrainableRun = builders.run(load_decoder(base, dtype=dtype), self.shelf, **lora)
        rate = 3e-2 if self.run.spec.lora.rank else 3e-3
        published = train(self.run, [*[learn(supervised([20, 40])), step(rate)] * 3, SAVE])[-1]
        self.manifest = Manifest.from_json(self.shelf.blobs[f"manifests/{published.version}"])

    def part(self, start: int, stop: int) -> bytes:
        return self.shelf.blobs[self.manifest.key][start:stop]

    def export(self, directory: Path, *, max_shard_bytes: int = 10**9) -> list[ExportFile]:
        files = merged(self.manifest, self.part, self.base, max_shard_bytes=max_shard_bytes)
        directory.mkdir()
        for file in files:
            data = b"".join(file.pieces())
            assert len(data) == file.size_bytes
            (directory / file.name).write_bytes(data)
        return files

    def logprobs(self) -> list[np.ndarray]:
        return logprobs(finish(self.run, learn(DATA, backward=False)))


def their_logprobs(model: torch.nn.Module) -> list[np.ndarray]:
    found = []
    with torch.no_grad():
        for example in DATA:
            tokens, targets = (torch.tensor(values.numpy().astype(np.int64)) for values in (example.tokens, example.inputs["target_tokens"]))
            scored = model(tokens[None]).logits[0].float().log_softmax(-1)
            found.append(scored.gather(1, targets[:, None])[:, 0].numpy())
    return found


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("family", ["qwen3", "llama", "ministral", "qwen3_moe"])
def test_a_merged_export_gives_the_trainers_logprobs_in_transformers(family: str, rank: int, tmp_path: Path) -> None:
    trained = Trained(saved(family, tmp_path / "base"), rank=rank)
    trained.export(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    for own, theirs in zip(trained.logprobs(), their_logprobs(model), strict=True):
        # float32, two layers: other kernels, and (W + sBA)x against Wx + sBAx.
        np.testing.assert_allclose(own, theirs, rtol=0, atol=3e-5)


def test_a_head_that_learned_is_untied_from_its_embedding(tmp_path: Path) -> None:
    base = saved("qwen3", tmp_path / "base")
    for name, unembed in (("tied", False), ("untied", True)):
        Trained(base, train_unembed=unembed).export(tmp_path / name)
        assert json.loads((tmp_path / name / "config.json").read_text())["tie_word_embeddings"] is not unembed
        tensors = load_file(tmp_path / name / "model.safetensors")
        assert ("lm_head.weight" in tensors) == unembed
        assert torch.equal(tensors["model.embed_tokens.weight"], load_file(base / "model.safetensors")["model.embed_tokens.weight"])


@pytest.mark.parametrize("rank", [0, 8])
def test_half_precision_is_exported_in_half_precision(rank: int, tmp_path: Path) -> None:
    trained = Trained(saved("qwen3", tmp_path / "base"), dtype=torch.bfloat16, rank=rank)
    trained.export(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    if rank == 0:
        published = stored_tensors(trained.run.weights.decoder)
        assert all(torch.equal(tensor, published[name]) for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items())
    for own, theirs in zip(trained.logprobs(), their_logprobs(model), strict=True):
        # bfloat16 keeps 8 bits, in the sums of either side and in merged weights.
        assert np.abs(own - theirs).mean() < 0.05


def test_weights_are_cut_into_shards_and_indexed(tmp_path: Path) -> None:
    trained = Trained(saved("qwen3_moe", tmp_path / "base"))
    whole = trained.export(tmp_path / "one")
    cut = trained.export(tmp_path / "many", max_shard_bytes=100_000)
    assert [file.name for file in whole if "safetensors" in file.name] == ["model.safetensors"]
    shards = [file for file in cut if file.name.endswith(".safetensors")]
    assert len(shards) > 2
    assert all(file.size_bytes < 150_000 for file in shards)
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    model, sharded = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "many"))
    assert all(np.array_equal(left, right) for left, right in zip(their_logprobs(model), their_logprobs(sharded), strict=True))


def test_an_export_is_a_base_model_again(tmp_path: Path) -> None:
    trained = Trained(saved("qwen3_moe", tmp_path / "base"), rank=0)
    trained.export(tmp_path / "out", max_shard_bytes=100_000)
    again = builders.run(load_decoder(tmp_path / "out", dtype=torch.float32))
    # A fresh adapter changes nothing, so these are the bits of the base model, and they are those of the run.
    for own, theirs in zip(trained.logprobs(), logprobs(finish(again, learn(DATA, backward=False))), strict=True):
        assert np.array_equal(own, theirs)


def test_layers_that_are_dense_and_layers_of_experts_merge_alike(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[0], norm_topk_prob=True)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "base")
    trained = Trained(tmp_path / "base")
    with pytest.raises(NotSupported, match="on experts and on dense or shared ones, which PEFT cannot load together: ask for form merged"):
        adapter(trained.manifest, trained.part, "base")
    trained.export(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for own, theirs in zip(trained.logprobs(), their_logprobs(model), strict=True):
        # float32, as above.
        np.testing.assert_allclose(own, theirs, rtol=0, atol=3e-5)


def test_files_of_the_tokenizer_come_along_and_others_do_not(tmp_path: Path) -> None:
    base = saved("qwen3", tmp_path / "base")
    for name in ("tokenizer.json", "chat_template.jinja", "private.txt", "modeling_x.py"):
        (base / name).write_text(name)
    files = Trained(base).export(tmp_path / "out")
    names = {file.name for file in files}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}


@pytest.mark.parametrize("rank", [0, 8])
def test_a_damaged_blob_is_noticed_while_it_is_read(rank: int, tmp_path: Path) -> None:
    trained = Trained(saved("qwen3", tmp_path / "base"), rank=rank)
    blob = bytearray(trained.shelf.blobs[trained.manifest.key])
    blob[-3] ^= 1
    trained.shelf.blobs[trained.manifest.key] = bytes(blob)
    with pytest.raises(Corrupt, match=r"does not hold tensor `.*` as its manifest has it"):
        trained.export(tmp_path / "out")


def test_a_damaged_adapter_stays_incomplete(tmp_path: Path) -> None:
    trained = Trained(saved("qwen3", tmp_path / "base"))
    _, file = adapter(trained.manifest, trained.part, "base")
    assert len(b"".join(file.pieces())) == file.size_bytes
    trained.shelf.blobs[trained.manifest.key] = trained.shelf.blobs[trained.manifest.key][:-1] + b"!"
    given: list[bytes] = []
    with pytest.raises(Corrupt, match="does not match its name"):
        given.extend(file.pieces())
    assert len(b"".join(given)) < file.size_bytes


def test_a_large_tensor_is_read_a_piece_at_a_time(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SMALL, "vocab_size": 60_000}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32))
    model.save_pretrained(base)
    trained = Trained(base)
    file = next(file for file in merged(trained.manifest, trained.part, base, max_shard_bytes=10**9) if file.name == "model.safetensors")
    sizes = [len(piece) for piece in file.pieces()]
    assert max(sizes) <= 4 << 20
    assert sum(sizes) == file.size_bytes > 25_000_000


ANY_FLOAT = st.integers(0, 2**32 - 1)
TIE = st.integers(0, 2**16 - 1).map(lambda half: half << 16 | 0x8000)
"""Half way between two numbers of bfloat16."""


@given(bits=st.lists(ANY_FLOAT | TIE, min_size=1, max_size=30))
@example(bits=[0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000])
def test_numbers_are_rounded_as_torch_rounds_them(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    for name, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)):
        with np.errstate(all="ignore"):
            written = encode(values, name)
        theirs = torch.from_numpy(values.copy()).to(dtype)
        read = torch.from_numpy(decode(written, name).copy())
        assert torch.equal(read.nan_to_num(nan=7.0), theirs.float().nan_to_num(nan=7.0))


def test_wider_numbers_of_a_base_model_are_rounded_once() -> None:
    values = np.random.default_rng(0).normal(size=100)
    assert np.array_equal(decode(values.tobytes(), "F64"), values.astype(np.float32))


def test_files_are_read_again_from_the_start(tmp_path: Path) -> None:
    trained = Trained(saved("qwen3", tmp_path / "base"))
    for file in merged(trained.manifest, partial(trained.part), trained.base, max_shard_bytes=10**9):
        assert b"".join(file.pieces()) == b"".join(file.pieces())
