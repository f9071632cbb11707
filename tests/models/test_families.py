"""The younger families, trained for some dozens of steps, against `transformers` and PEFT: gradients, adapters, exports, and the sampler's bits."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma4TextConfig, PreTrainedModel

from bloomery.infer.plan import Limits
from bloomery.infer.sampler import Sampler
from bloomery.models.decoder import Decoder
from bloomery.models.families import FAMILIES, parse_config, read_config
from bloomery.models.kernel_probe import probe
from bloomery.models.load import load_decoder, stored_tensors
from bloomery.models.names import Place, module_of, stored_places
from bloomery.models.products import library
from bloomery.models.threads import compute_with
from bloomery.models.weight_files import check_weights
from bloomery.services.engines.models import read_size
from bloomery.sync.export import adapter, merged
from bloomery.sync.manifest import Manifest
from bloomery.train.run import TrainableRun
from bloomery.train.snapshot import read_model
from bloomery.types.errors import BloomeryError, NotSupported
from bloomery.types.operations import ForwardBackwardResult
from tests.infer.builders import Adapters, full_routing, generate, naive, prompt, request
from tests.infer.builders import adapter as random_adapter
from tests.infer.routed import asking
from tests.models.builders import GEMMA4, GEMMA4_SMALL, ILL_CONDITIONED, MODELS, TRAINED, reference, saved
from tests.models.test_decoder import packed_logprobs, sequences
from tests.train import builders
from tests.train.builders import SAVE, finish, learn, logprobs, step, supervised, train

pytestmark = [
    # PEFT asks transformers for a property under its old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    # PEFT doubles the rank of the fused projections of experts by a pattern, and says that no other module matches it.
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:The following alpha_pattern keys:RuntimeWarning"),
]

DATA = supervised([5, 37, 64], seed=2)
ROUTERS = (".router", ".router_scale", ".expert_scale")
SPARSE = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "kimi_k2", "gemma4_text, experts", "nemotron_h", "nemotron_h, latent", "qwen3_5_moe_text")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return _Saved(tmp_path_factory)


class _Saved(dict[str, Path]):
    """Each trained when it is first asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory = factory

    def __missing__(self, family: str) -> Path:
        self[family] = saved(family, self._factory.mktemp(family))
        return self[family]


@pytest.mark.slow
@pytest.mark.parametrize("family", TRAINED)
def test_the_gradient_of_every_tensor_is_that_of_transformers(family: str, directories: Mapping[str, Path]) -> None:
    decoder = load_decoder(directories[family], dtype=torch.float32).requires_grad_(True)
    # In float64, which products of experts are not made for.
    model = reference(family) if family in SPARSE else reference(family).double()
    tokens = sequences([150, 9])
    (-torch.cat([own[:-1] for own in packed_logprobs(decoder, tokens, exact=False)]).sum()).backward()
    for sequence in tokens:
        scored = model(sequence[None], use_cache=False).logits[0].log_softmax(-1)[:-1].gather(1, sequence[1:, None])
        (-scored.sum()).backward()
    ours, theirs = dict(decoder.named_parameters()), dict(model.named_parameters())
    for name, place in stored_places(decoder.config):
        if place.parameter not in ours:
            continue
        gradient, expected = ours[place.parameter].grad, _their_gradient(theirs, name, place)
        assert gradient is not None, name
        own = (gradient if place.expert is None else gradient[place.expert])[place.rows]
        # float32, relative to the norm of each tensor's gradient; those of `transformers` in float32 are as far from float64.
        assert (own - expected).norm() <= (5e-4 if family in ILL_CONDITIONED else 5e-5) * expected.norm() + 1e-6, name


def _their_gradient(theirs: Mapping[str, torch.nn.Parameter], name: str, place: Place) -> torch.Tensor:
    """`transformers` holds the experts of a layer in one tensor, as we do."""
    if place.expert is None:
        gradient = theirs[module_of(name)].grad
        assert gradient is not None, name
        return gradient
    module = f"{module_of(name).partition('.experts.')[0]}.experts"
    up = "gate_up_proj" if f"{module}.gate_up_proj" in theirs else "up_proj"
    fused = theirs[f"{module}.{'down_proj' if 'down_proj' in name else up}"].grad
    assert fused is not None, name
    return fused[place.expert][place.rows]


class Trained:
    """A run on a base model, and its published version."""

    def __init__(self, base: Path, dtype: torch.dtype = torch.float32, **lora: object) -> None:
        self.base, self.shelf = base, builders.MemoryShelf()
        self.run: TrainableRun = builders.run(load_decoder(base, dtype=dtype), self.shelf, **lora)
        rate = 1e-2 if self.run.spec.lora.rank else 3e-3
        published = train(self.run, [*[learn(supervised([20, 40])), step(rate)] * 2, SAVE])[-1]
        self.manifest = Manifest.from_json(self.shelf.blobs[f"manifests/{published.version}"])

    def part(self, start: int, stop: int) -> bytes:
        return self.shelf.blobs[self.manifest.key][start:stop]

    def export(self, directory: Path, form: str) -> Path:
        directory.mkdir()
        files = adapter(self.manifest, self.part, "base") if form == "adapter" else merged(self.manifest, self.part, self.base, max_shard_bytes=10**9)
        for file in files:
            (directory / file.name).write_bytes(b"".join(file.pieces()))
        return directory

    def logprobs(self) -> list[np.ndarray]:
        return logprobs(finish(self.run, learn(DATA, backward=False)))


def assert_alike(ours: list[np.ndarray], model: torch.nn.Module, atol: float, ties: int = 0) -> None:
    """`ties`: rows that may go to another expert in the model than here, because two of them come out alike."""
    apart = []
    for own, example in zip(ours, DATA, strict=True):
        tokens, targets = (torch.tensor(values.numpy().astype(np.int64)) for values in (example.tokens, example.inputs["target_tokens"]))
        with torch.no_grad():
            theirs = model(tokens[None], use_cache=False).logits[0].float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        apart.append(np.abs(own - theirs.numpy()))
    assert np.sort(np.concatenate(apart))[: len(np.concatenate(apart)) - ties].max() <= atol


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("glm4", {}),
        ("gemma4_text", {}),
        ("gemma4_text, small", {}),
        ("gemma4_text, experts", {"train_mlp": False}),
        ("glm4_moe", {"train_mlp": False}),
        ("glm4_moe_lite", {"train_mlp": False}),
        ("deepseek_v3", {"train_mlp": False}),
        ("qwen3_5_text", {}),
        ("qwen3_5_moe_text", {"train_mlp": False}),
        ("nemotron_h, dense", {}),
        ("nemotron_h", {"train_mlp": False}),
    ],
)
def test_an_adapter_loads_in_peft_and_scores_alike(family: str, lora: dict[str, bool], directories: Mapping[str, Path], tmp_path: Path) -> None:
    trained = Trained(directories[family], **lora)
    peft = PeftModel.from_pretrained(reference(family), str(trained.export(tmp_path / "out", "adapter")))
    # float32, two or three layers: other kernels and another order of summation.
    assert_alike(trained.logprobs(), peft, 1e-4)


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("family", [family for family in TRAINED if family != "kimi_k2"])
def test_a_merged_export_gives_the_trainers_logprobs_in_transformers(family: str, rank: int, directories: Mapping[str, Path], tmp_path: Path) -> None:
    trained = Trained(directories[family], rank=rank)
    directory = trained.export(tmp_path / "out", "merged")
    before, after = (load_file(each / "model.safetensors") for each in (directories[family], directory))
    assert before.keys() <= after.keys()
    for name, tensor in after.items():
        fixed = name.endswith(("e_score_correction_bias", "layer_scalar"))
        assert torch.equal(tensor, before[name]) if fixed else tensor.dtype == torch.float32
    check_weights(directory, read_config(directory))
    # float32: other kernels, and (W + sBA)x against Wx + sBAx.
    assert_alike(trained.logprobs(), AutoModelForCausalLM.from_pretrained(directory), 1e-4, ties=1 if read_config(directory).experts else 0)


@pytest.mark.parametrize("rank", [0, 8])
def test_the_routers_bias_stays_in_float32_when_the_model_is_in_half_precision(rank: int, directories: Mapping[str, Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    trained = Trained(directories["deepseek_v3"], torch.bfloat16, rank=rank)
    exported = load_file(trained.export(tmp_path / "out", "merged") / "model.safetensors")
    assert exported["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    assert torch.equal(exported[name], load_file(directories["deepseek_v3"] / "model.safetensors")[name])
    assert not torch.equal(exported[name], exported[name].bfloat16().float())


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in MODELS),
        *((family, torch.bfloat16) for family in FAMILIES),
        *(pytest.param(form, torch.bfloat16, marks=pytest.mark.slow) for form in MODELS if form not in FAMILIES),
    ],
)
def test_the_sampler_gives_the_trainers_bits(family: str, dtype: torch.dtype, directories: Mapping[str, Path]) -> None:
    model = load_decoder(directories[family], dtype=dtype)
    report = probe(model)
    if dtype == torch.bfloat16 and library(dtype, model.device) != "native" and not report.bit_exact:
        # With some processors' instructions for it products depend on the number of rows: then the probe says so, and nothing is promised.
        assert any("product" in failure for failure in report.failures)
        return
    assert report.failures == ()
    adapters = {f"v{seed}": random_adapter(model, seed) for seed in range(2)}
    requests = [
        request(f"r{length}", prompt(length), version=version, seed=length, max_tokens=4)
        for length, version in ((2, "base"), (45, "v0"), (77, "v1"), (511, "base"))
    ]
    engine = Sampler(model, Adapters(model, adapters), Limits(slots=4, token_budget=96), form=report.form)
    together = generate(engine, *requests)
    for each in requests:
        tokens, scores = naive(model, each.prompt.numpy().tolist(), each.params, adapters.get(each.weights.version))
        assert together[each.request_id].tokens == {0: tokens}, each.request_id
        assert together[each.request_id].logprobs == {0: scores}, each.request_id


@pytest.mark.parametrize("family", [TRAINED[0], *(pytest.param(family, marks=pytest.mark.slow) for family in TRAINED[1:])])
def test_one_thread_samples_with_the_bits_of_a_trainer_with_more(family: str, directories: Mapping[str, Path]) -> None:
    model, threads = load_decoder(directories[family], dtype=torch.float32), torch.get_num_threads()
    adapters, asked = {"v0": random_adapter(model, 0)}, request("r", prompt(600), version="v0", seed=3, max_tokens=6)
    try:
        compute_with(2)
        report = probe(model)
        tokens, scores = naive(model, asked.prompt.numpy().tolist(), asked.params, adapters["v0"])
        compute_with(1)
        found = generate(Sampler(model, Adapters(model, adapters), Limits(slots=4, token_budget=700), form=report.form), asked)["r"]
    finally:
        compute_with(threads)
    assert report.form.one_thread
    assert (found.tokens, found.logprobs) == ({0: tokens}, {0: scores})


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["qwen3_moe", *SPARSE])
def test_experts_and_weights_of_the_sampler_give_its_bits_when_routers_have_moved(
    family: str, dtype: torch.dtype, directories: Mapping[str, Path]
) -> None:
    model = load_decoder(directories[family], dtype=dtype)
    engine = Sampler(model, Adapters(model), Limits(slots=4, token_budget=32), form=probe(model).form)
    told = asking(request("r", prompt(45), max_tokens=6, asked={"routing": True, "routing_weights": True}), engine=engine)["r"]
    moved = load_decoder(directories[family], dtype=dtype)
    for seed, parameter in enumerate(parameter for name, parameter in moved.named_parameters() if name.endswith(ROUTERS)):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.data += (parameter.data.float().std(correction=0) + 0.1) * noise.to(dtype)

    def difference(decoder: Decoder, **given: bool) -> float:
        scored = finish(builders.run(decoder), learn((told.rollout(**given),), loss="importance_sampling"))
        assert isinstance(scored, ForwardBackwardResult)
        return scored.metrics["logprob_diff:max"]

    assert difference(model) == difference(model, routing=True) == difference(model, routing=True, weights=True) == 0
    assert difference(moved, routing=True, weights=True) == 0
    assert difference(moved, routing=True) > 0


def test_the_probe_finds_a_width_whose_bits_depend_on_the_company() -> None:
    """Vector kernels compute the last numbers of a tensor one by one, and otherwise."""
    config = Gemma4TextConfig(**{**GEMMA4, **GEMMA4_SMALL, "hidden_size_per_layer_input": 5})
    model = Decoder(parse_config(config.to_dict()), dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    assert probe(model).failures == ("the gate of per-layer inputs, 5 wide, depends on the number of rows",)


@pytest.mark.parametrize("family", SPARSE)
def test_the_experts_of_a_forward_are_those_of_transformers(family: str, directories: Mapping[str, Path]) -> None:
    tokens = prompt(60)
    ours = full_routing(load_decoder(directories[family], dtype=torch.float32), tokens, None)
    theirs = _their_routing(reference(family), torch.tensor(tokens))
    assert np.array_equal(np.sort(ours, -1), np.sort(theirs, -1))
    assert len(np.unique(ours)) > 4


def _their_routing(model: PreTrainedModel, tokens: torch.Tensor) -> np.ndarray:
    """What their routers say [R, L, T]."""
    chosen: list[torch.Tensor] = []
    gates = [module for name, module in model.named_modules() if name.endswith(("mlp.gate", "mixer.gate", ".router"))]
    handles = [gate.register_forward_hook(lambda module, inputs, output: chosen.append(output[2])) for gate in gates]
    with torch.no_grad():
        model(tokens[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack(chosen, 1).numpy()


def test_layers_for_further_tokens_are_passed_over(tmp_path: Path) -> None:
    saved("deepseek_v3", tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    parameters = check_weights(tmp_path, read_config(tmp_path))
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.zeros(64, 128)}, weights)
    assert check_weights(tmp_path, read_config(tmp_path)) == parameters
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}, weights)
    with pytest.raises(BloomeryError, match=r"model\.layers\.3\.eh_proj"):
        check_weights(tmp_path, read_config(tmp_path))


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' of a deepseek_v3 model is not supported: only 'sigmoid'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"attention_bias": True}, "biases on attention"),
        ("deepseek_v3", {"v_head_dim": 128}, "v_head_dim 128 is wider"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek_v3", {"n_group": 3}, "8 experts in n_group 3"),
        ("deepseek_v3", {"n_group": 8}, "at least two"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "hold num_experts_per_tok 5"),
        ("deepseek_v3", {"n_group": 0}, "n_group is 0"),
        ("deepseek_v3", {"first_k_dense_replace": "1"}, "first_k_dense_replace is '1'"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types must say dense or sparse for each of 2 layers"),
        ("qwen3_moe", {"num_experts_per_tok": None}, "num_experts_per_tok is None"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9 of 8 experts"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ("qwen3_moe", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types must say dense or sparse for each of 2 layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        ("glm4", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config of a glm4 model"),
        ("gemma4_text", {"per_layer_config": {"full_attention": {"head_dim": 8}}}, "names `full_attention`"),
        ("gemma4_text, experts", {"top_k_experts": 9}, "top_k_experts is 9 of 8 experts"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("kimi_k2", {"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ("glm4_moe_lite", {"qk_rope_head_dim": None}, "qk_rope_head_dim is None"),
        ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act"),
        ("glm4", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope type `longrope`"),
        ("glm4", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.2}}, "turns 3 of 16 dimensions"),
        ("gemma4_text, experts", {"top_k_experts": 0}, "top_k_experts is 0"),
        ("gemma4_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers is 1: a number below 3"),
        ("gemma4_text", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300}, "vocab_size_per_layer_input is smaller"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4_text", {"hidden_activation": "silu"}, "hidden_activation"),
        ("gemma4_text", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("gemma4_text", {"per_layer_config": {"2": {"intermediate_size": 7}}}, "`intermediate_size` of layer 2"),
        ("gemma4_text", {"model_type": "gemma4"}, "model_type `gemma4`"),
        ("qwen3_5_text", {"model_type": "qwen3_5"}, "model_type `qwen3_5`"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 2}, "layer_types must say linear_attention or full_attention for each of 3"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3}, "no layer attends"),
        ("qwen3_5_text", {"linear_num_key_heads": 3}, "linear_num_value_heads 4 for linear_num_key_heads 3"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ("qwen3_5_text", {"attention_bias": True}, "biases on attention"),
        ("qwen3_5_text", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type `yarn`"),
        ("qwen3_5_moe_text", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ("qwen3_5_moe_text", {"num_experts": 1}, "num_experts_per_tok is 2 of 1 experts"),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "rnn"]}, "layers_block_type must be a list of"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX"}, "layers_block_type must be a list of"),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "moe"]}, "has no full_attention"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' of a nemotron_h model is not supported: only 'relu2'"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ("nemotron_h", {"use_bias": True}, "use_bias"),
        ("nemotron_h", {"mamba_proj_bias": True}, "mamba_proj_bias"),
        ("nemotron_h", {"attention_bias": True}, "biases on attention"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("nemotron_h", {"sliding_window": 24}, "sliding_window"),
        ("nemotron_h", {"time_step_limit": [0.01, 1.0]}, "time_step_limit"),
        ("nemotron_h", {"time_step_min": -1.0}, "time_step_min is -1.0"),
        ("nemotron_h", {"mamba_num_heads": 9}, "mamba_num_heads 9 in n_groups 2"),
        ("nemotron_h", {"conv_kernel": 0}, "conv_kernel is 0"),
        ("nemotron_h", {"moe_shared_expert_intermediate_size": 0}, "moe_shared_expert_intermediate_size is 0"),
        ("nemotron_h, latent", {"moe_latent_size": -1}, "moe_latent_size is -1"),
    ],
)
def test_what_the_core_lacks_is_refused_by_name(family: str, change: dict[str, Any], says: str, directories: Mapping[str, Path]) -> None:
    raw = json.loads((directories[family] / "config.json").read_text())
    assert parse_config(raw).model_type == raw["model_type"]
    with pytest.raises(BloomeryError, match=says):
        parse_config(raw | change)


def test_a_mixture_whose_layers_are_all_dense_has_no_experts(directories: Mapping[str, Path]) -> None:
    raw = json.loads((directories["qwen3_moe"] / "config.json").read_text())
    assert parse_config(raw).experts is not None
    assert parse_config(raw | {"mlp_only_layers": [0, 1]}).experts is None


@pytest.mark.parametrize("family", ["kimi_k2", "gemma4_text, experts", "nemotron_h, latent"])
def test_an_adapter_on_experts_and_dense_projections_is_refused_in_pefts_form(family: str, directories: Mapping[str, Path], tmp_path: Path) -> None:
    trained = Trained(directories[family])
    with pytest.raises(NotSupported, match="ask for form merged"):
        trained.export(tmp_path / "out", "adapter")


def test_older_files_say_the_same(directories: Mapping[str, Path]) -> None:
    """`transformers` 4 wrote rope and heads in other places."""
    glm = json.loads((directories["glm4"] / "config.json").read_text())
    rope = glm["rope_parameters"]
    older = {name: value for name, value in glm.items() if name != "rope_parameters"}
    assert parse_config(older | {"rope_theta": rope["rope_theta"], "partial_rotary_factor": 0.5}) == parse_config(glm)
    gemma = json.loads((directories["gemma4_text"] / "config.json").read_text())
    older = {name: value for name, value in gemma.items() if name != "per_layer_config"}
    assert parse_config(older | {"global_head_dim": 32, "num_global_key_value_heads": 1}) == parse_config(gemma)
    nemotron = json.loads((directories["nemotron_h"] / "config.json").read_text())
    older = {name: value for name, value in nemotron.items() if name != "layers_block_type"}
    assert parse_config(older | {"hybrid_override_pattern": "ME*ME"}) == parse_config(nemotron)
    assert parse_config(older | {"layers_block_type": ["mamba", "moe", "attention", "mamba", "moe"]}) == parse_config(nemotron)


def test_a_text_model_that_was_saved_out_of_one_with_towers_is_read(directories: Mapping[str, Path], tmp_path: Path) -> None:
    """As `transformers` saves it: the layers keep the names that they had beside the towers."""
    plain = directories["qwen3_5_moe_text"]
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    tensors = load_file(plain / "model.safetensors")
    save_file({name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    ours, beside = (stored_tensors(load_decoder(each, dtype=torch.float32)) for each in (plain, tmp_path))
    assert all(torch.equal(ours[name], tensor) for name, tensor in beside.items())
    trained = Trained(tmp_path)
    assert_alike(trained.logprobs(), AutoModelForCausalLM.from_pretrained(trained.export(tmp_path / "out", "merged")), 1e-4)


@pytest.mark.parametrize("family", TRAINED)
def test_services_know_the_experts_of_a_model(family: str, directories: Mapping[str, Path]) -> None:
    size = read_size(directories[family])
    assert (size.routing is not None) == (family in SPARSE)
    # An adapter on experts goes to PEFT where nothing beside them is adapted: all of these have a dense layer, an MLP beside, or shared experts.
    assert size.partly_dense == (family in SPARSE)
    if size.routing is not None:
        shape = full_routing(load_decoder(directories[family], dtype=torch.float32), prompt(3), None).shape
        assert shape[1:] == (len(size.routing.sparse_layers), size.routing.top_k)


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma4_text, small"])
def test_a_version_of_all_parameters_is_read_back_with_what_is_not_trained(family: str, directories: Mapping[str, Path]) -> None:
    trained = Trained(directories[family], torch.bfloat16, rank=0)
    read = read_model(trained.shelf.blobs[trained.manifest.key], load_decoder(directories[family], dtype=torch.bfloat16))
    ours = stored_tensors(trained.run.weights.decoder)
    for name, tensor in stored_tensors(read).items():
        assert tensor.dtype == ours[name].dtype
        assert torch.equal(tensor, ours[name]), name
