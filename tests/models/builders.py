"""Small models in the form `save_pretrained` writes, one per family of the decoder core.

The younger families are trained for some dozens of steps: random weights hide mistakes of routing and of positions.
"""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from bloomery.models.families import FAMILIES

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
EXPERTS: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.8}
LATENT: dict[str, Any] = {
    **{name: size for name, size in SMALL.items() if name != "head_dim"},
    **EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
GEMMA4: dict[str, Any] = {
    **SMALL,
    "pad_token_id": 0,
    "num_hidden_layers": 3,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}
GEMMA4_SMALL: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 330,
    "global_head_dim": 32,
}
"""What the smaller models of Gemma 4 have and the larger ones do not."""
GEMMA4_EXPERTS: dict[str, Any] = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
NEMOTRON: dict[str, Any] = {
    **{name: size for name, size in SMALL.items() if name != "num_hidden_layers"},
    **EXPERTS,
    "n_group": 2,
    "topk_group": 1,
    "moe_shared_expert_intermediate_size": 48,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
}
GATED_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
TRAINED = (
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "kimi_k2",
    "gemma4_text",
    "gemma4_text, small",
    "gemma4_text, experts",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "nemotron_h",
    "nemotron_h, dense",
    "nemotron_h, latent",
)
ILL_CONDITIONED = ("qwen3_5_text", "qwen3_5_moe_text")
"""Where a mixer norms numbers that are nearly zero: `transformers` in chunks and token by token differs by 1e-4 in log-probabilities."""
STEPS = 40
MODELS = (*FAMILIES, *(name for name in TRAINED if name not in FAMILIES))
"""One of each family, and of each form that its models come in."""


def reference(family: str) -> PreTrainedModel:
    """A `transformers` model of the family, in float32, with non-trivial norms."""
    return copy.deepcopy(_reference(family))


@cache
def _reference(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = _build(family).eval()
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name or "layer_scalar" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif "e_score_correction_bias" in name or name.endswith("proj.bias"):
            parameter.data.uniform_(-0.2, 0.2)
        elif "proj" in name or "gate" in name or "router" in name:
            # The default initialisation is so small that attention would be uniform and hide mistakes.
            parameter.data.normal_(std=0.15)
    if family in TRAINED:
        _train(model)
    return model


def _train(model: PreTrainedModel) -> None:
    """Towards texts in which a token follows from the two before it."""
    generator = torch.Generator().manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        tokens = torch.randint(0, 320, (4, 48), generator=generator)
        for place in range(2, 48):
            tokens[:, place] = (3 * tokens[:, place - 1] + tokens[:, place - 2] + 7) % 320 if place % 5 else tokens[:, place]
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _build(family: str) -> PreTrainedModel:
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True))
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE))
    if family == "ministral":
        return MinistralForCausalLM(MinistralConfig(**SMALL, sliding_window=24))
    if family == "ministral3":
        return Ministral3ForCausalLM(Ministral3Config(**SMALL, rope_parameters=YARN_ROPE))
    if family == "glm4":
        return Glm4ForCausalLM(Glm4Config(**SMALL))
    if family == "glm4_moe":
        return Glm4MoeForCausalLM(Glm4MoeConfig(**SMALL, **EXPERTS, use_qk_norm=True, attention_bias=True))
    if family == "glm4_moe_lite":
        return Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**LATENT, q_lora_rank=None))
    if family == "deepseek_v3":
        config = {"q_lora_rank": 24, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
        return DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT, **config))
    if family == "kimi_k2":
        config = {"q_lora_rank": 24, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 2}
        return DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT, **config, rope_parameters=DEEPSEEK_YARN))
    if family == "gemma4_text":
        config = {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 8.0}
        return Gemma4ForCausalLM(Gemma4TextConfig(**GEMMA4, **config))
    if family == "gemma4_text, small":
        return Gemma4ForCausalLM(Gemma4TextConfig(**{**GEMMA4, **GEMMA4_SMALL}))
    if family == "gemma4_text, experts":
        return Gemma4ForCausalLM(Gemma4TextConfig(**GEMMA4, **GEMMA4_EXPERTS, global_head_dim=32))
    if family == "nemotron_h":
        layers = ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]
        return NemotronHForCausalLM(NemotronHConfig(**NEMOTRON, layers_block_type=layers))
    if family == "nemotron_h, dense":
        layers = ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]
        return NemotronHForCausalLM(NemotronHConfig(**NEMOTRON, layers_block_type=layers, use_conv_bias=False))
    if family == "nemotron_h, latent":
        layers = ["full_attention", "linear_attention", "moe"]
        return NemotronHForCausalLM(NemotronHConfig(**NEMOTRON, layers_block_type=layers, moe_latent_size=32))
    if family == "qwen3_5_text":
        kinds = ["linear_attention", "linear_attention", "full_attention"]
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**SMALL, **GATED_DELTA, "num_hidden_layers": 3}, layer_types=kinds, tie_word_embeddings=True))
    if family == "qwen3_5_moe_text":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
        config = {name: size for name, size in SMALL.items() if name != "intermediate_size"} | GATED_DELTA
        return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**config, **experts, layer_types=["full_attention", "linear_attention"]))
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True))


def saved(family: str, directory: Path, **options: Any) -> Path:
    """The reference, saved."""
    _reference(family).save_pretrained(directory, **options)
    if family == "kimi_k2":
        # `transformers` runs it as DeepSeek V3, and has no name of its own for it.
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2"}))
    return directory
