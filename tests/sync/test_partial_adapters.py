"""Adapters on some of the projections that lie in one parameter of ours: the forward, PEFT with the export, and `transformers` with merged weights
agree."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from bloomery.infer.plan import Limits
from bloomery.infer.sampler import Sampler
from bloomery.models.adapters import AdapterRows
from bloomery.models.attention import PackedAttention
from bloomery.models.decoder import Decoder
from bloomery.models.factors import Factors
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.kernel_probe import probe
from bloomery.models.load import load_decoder
from bloomery.models.pads import ROW_PAD, packed_positions, pad_to
from bloomery.models.published_names import published_factor, published_name
from bloomery.models.targets import Target, adapter_targets
from bloomery.models.tensor_bytes import pack
from bloomery.sync.export import adapter, merged
from bloomery.sync.manifest import Manifest, verify
from bloomery.sync.proof import expected, prove
from bloomery.train import snapshot
from bloomery.train.snapshot import Snapshot
from bloomery.types.errors import InvalidInput, NotSupported
from tests.infer.builders import Adapters, full_logprobs, generate, naive, prompt, request
from tests.models.builders import reference, saved
from tests.train.builders import BASE_HASH, MemoryShelf

pytestmark = [
    # PEFT asks transformers for a property under its old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # It doubles the rank of the fused projections of experts by a pattern, and says that no other module matches it.
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:The following alpha_pattern keys:RuntimeWarning"),
]

RANK, ALPHA = 8, 32.0
TOKENS = prompt(45)
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PARTIAL = [
    *(("qwen3", name) for name in DENSE),
    ("qwen3", "k_proj v_proj"),
    ("qwen3", "q_proj v_proj up_proj"),
    ("qwen3_moe", "v_proj"),
    ("glm4", "v_proj"),
    ("glm4_moe_lite", "kv_a_proj_with_mqa"),
    ("deepseek_v3", "q_b_proj kv_a_proj_with_mqa"),
    ("gemma4_text, small", "v_proj up_proj"),
    ("qwen3_5_text", "in_proj_z"),
    ("qwen3_5_text", "in_proj_b k_proj"),
    ("nemotron_h, dense", "v_proj up_proj"),
]
OF_EXPERTS = [("qwen3_moe", "up_proj"), ("qwen3_moe", "gate_proj"), ("nemotron_h, latent", "fc2_latent_proj down_proj")]
"""PEFT takes gate and up of experts together or not at all, and nothing else beside them."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return {family: saved(family, tmp_path_factory.mktemp("base")) for family in dict(PARTIAL + OF_EXPERTS)}


class Published:
    """A version whose adapter has random factors on these projections of every layer, and on nothing else."""

    def __init__(self, base: Path, projections: str, seed: int = 0) -> None:
        self.base, self.decoder = base, load_decoder(base, dtype=torch.float32)
        self.tensors = _random_factors(self.decoder, projections.split(), seed)
        self.blob, shelf = pack(self.tensors, {"format": "pt"}), MemoryShelf()
        identity = Snapshot("lora", "run-1", BASE_HASH, BASE_HASH, "t" * 32, step=1, rank=RANK, alpha=ALPHA, targets=("attn",), data=self.blob)
        self.manifest = Manifest.from_json(shelf.blobs[f"manifests/{shelf.publish(identity).version}"])

    def read(self) -> FusedAdapter:
        return snapshot.read(self.blob, self.decoder, rank=RANK, alpha=ALPHA)

    def logprobs(self) -> np.ndarray:
        ours, base = (full_logprobs(self.decoder, TOKENS, weights) for weights in (self.read(), None))
        assert np.abs(ours - base).max() > 0.01, "an adapter that changes nothing proves nothing"
        return ours

    def part(self, start: int, stop: int) -> bytes:
        return self.blob[start:stop]

    def export(self, directory: Path, form: str) -> Path:
        directory.mkdir()
        files = adapter(self.manifest, self.part, "base") if form == "adapter" else merged(self.manifest, self.part, self.base, max_shard_bytes=10**9)
        for file in files:
            (directory / file.name).write_bytes(b"".join(file.pieces()))
        return directory


def _random_factors(decoder: Decoder, projections: Sequence[str], seed: int) -> dict[str, torch.Tensor]:
    noise, found = torch.Generator().manual_seed(seed), {}
    for name, target in adapter_targets(decoder.config).items():
        if name.rpartition(".")[2] in projections:
            for side, shape in zip("AB", target.factor_shapes(RANK), strict=True):
                found[published_name(f"{name}.lora_{side}", stacked=bool(target.experts))] = torch.randn(shape, generator=noise) * 0.05
    return found


def their_logprobs(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        scored = model(torch.tensor([TOKENS]), use_cache=False).logits[0].log_softmax(-1)
    return scored[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize(("family", "projections"), PARTIAL)
def test_an_adapter_on_some_projections_scores_as_peft_does_with_its_export(
    family: str, projections: str, directories: Mapping[str, Path], tmp_path: Path
) -> None:
    version = Published(directories[family], projections)
    peft = PeftModel.from_pretrained(reference(family), str(version.export(tmp_path / "out", "adapter")))
    # float32, some layers: other kernels and another order of summation.
    np.testing.assert_allclose(version.logprobs(), their_logprobs(peft), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("family", "projections"), PARTIAL + OF_EXPERTS)
def test_an_adapter_on_some_projections_scores_as_the_merged_weights_do(
    family: str, projections: str, directories: Mapping[str, Path], tmp_path: Path
) -> None:
    version = Published(directories[family], projections)
    whole = AutoModelForCausalLM.from_pretrained(version.export(tmp_path / "out", "merged"))
    apart = np.sort(np.abs(version.logprobs() - their_logprobs(whole)))
    # float32: other kernels, and (W + sBA)x against Wx + sBAx, by which one token may go to another of two experts that come out alike.
    assert apart[: len(apart) - (version.decoder.config.experts is not None)].max() < 1e-4


@pytest.mark.parametrize("projection", DENSE)
def test_what_peft_saved_of_an_adapter_on_one_projection_scores_alike(projection: str, directories: Mapping[str, Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    peft = get_peft_model(reference("qwen3"), LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[projection], init_lora_weights=False)).eval()
    peft.save_pretrained(tmp_path)
    decoder = load_decoder(directories["qwen3"], dtype=torch.float32)
    weights = snapshot.read((tmp_path / "adapter_model.safetensors").read_bytes(), decoder, rank=RANK, alpha=ALPHA)
    # float32, two layers: other kernels and another order of summation.
    np.testing.assert_allclose(full_logprobs(decoder, TOKENS, weights), their_logprobs(peft), rtol=0, atol=1e-4)


def test_what_lies_in_memory_is_proved_to_be_the_version(directories: Mapping[str, Path]) -> None:
    version = Published(directories["qwen3"], "k_proj up_proj")
    known = expected(version.manifest, verify(version.manifest, version.blob), version.blob)
    assert prove(known, version.decoder, version.read()).root == str(known.root)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_on_different_projections_have_their_own_bits_in_one_batch(dtype: torch.dtype, directories: Mapping[str, Path]) -> None:
    """As many rows each, and factors of one rank: they could be taken for a team, whose products are computed together."""
    base = load_decoder(directories["qwen3"], dtype=dtype)
    blobs = {name: pack({key: each.to(dtype) for key, each in Published(directories["qwen3"], name).tensors.items()}, {}) for name in DENSE[:3]}
    adapters = {name: snapshot.read(blob, base, rank=RANK, alpha=ALPHA) for name, blob in blobs.items()}
    asks = [request(name, TOKENS, version=name, seed=3, max_tokens=4) for name in adapters]
    together = generate(Sampler(base, Adapters(base, adapters), Limits(slots=4, token_budget=256), form=probe(base).form), *asks)
    for each in asks:
        tokens, scores = naive(base, TOKENS, each.params, adapters[each.request_id])
        assert (together[each.request_id].tokens, together[each.request_id].logprobs) == ({0: tokens}, {0: scores}), each.request_id


@pytest.mark.parametrize(("family", "projections"), [("qwen3", "k_proj up_proj"), ("qwen3_moe", "v_proj up_proj")])
def test_gradients_are_those_that_the_same_factors_have_among_all(family: str, projections: str, directories: Mapping[str, Path]) -> None:
    decoder = load_decoder(directories[family], dtype=torch.float32)
    factors = {published_factor(name): each for name, each in _random_factors(decoder, projections.split(), seed=1).items()}
    every = adapter_targets(decoder.config, unembed=False)
    some = {name: target for name, target in every.items() if f"{name}.lora_A" in factors}
    few, among_all = (_backward(decoder, targets, factors) for targets in (some, every))
    for name in some:
        for own, theirs in zip(few.gradients(name), among_all.gradients(name), strict=True):
            # float32: another order of summation where ranks are wider.
            torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-5)
            assert own.abs().max() > 1e-3


def _backward(decoder: Decoder, targets: Mapping[str, Target], factors: Mapping[str, torch.Tensor]) -> FusedAdapter:
    """An adapter on all of these, zero where there are no factors, with the gradients of some sum."""
    adapter = FusedAdapter(targets, RANK, ALPHA / RANK, dtype=torch.float32, device="cpu", trained=True)
    for name in targets:
        if f"{name}.lora_A" in factors:
            adapter.fill({name: Factors(factors[f"{name}.lora_A"], factors[f"{name}.lora_B"])})
    rows = pad_to(len(TOKENS), ROW_PAD)
    padded = torch.tensor([*TOKENS, *[0] * (rows - len(TOKENS))])
    hidden = decoder.hidden(padded, packed_positions([len(TOKENS)]), PackedAttention([len(TOKENS)], exact=True), AdapterRows(((adapter, 0, rows),)))
    hidden[: len(TOKENS)].square().mean().backward()
    return adapter


def test_an_adapter_of_another_model_is_refused_by_the_name_of_what_does_not_fit(directories: Mapping[str, Path]) -> None:
    version, others = Published(directories["qwen3"], "k_proj"), load_decoder(directories["qwen3_5_text"], dtype=torch.float32)
    with pytest.raises(NotSupported, match=r"the adapter is on `layers\.0\.self_attn\.k_proj`, on which none can be in this model"):
        snapshot.read(version.blob, others, rank=RANK, alpha=ALPHA)
    name = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"
    for odd in (version.tensors[name][:16], version.tensors[name][:, :4]):
        with pytest.raises(InvalidInput, match=r"the factors of `layers\.1\.self_attn\.k_proj` have shapes"):
            snapshot.read(pack(version.tensors | {name: odd.contiguous()}, {}), version.decoder, rank=RANK, alpha=ALPHA)
