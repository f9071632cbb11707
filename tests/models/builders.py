"""Small random models in the form `save_pretrained` writes, one per family of the decoder core."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

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


def reference(family: str) -> PreTrainedModel:
    """A random `transformers` model of the family, in float32, with non-trivial norms."""
    torch.manual_seed(0)
    model = _build(family).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif "proj" in name or "gate" in name:
            # The default initialisation is so small that attention would be uniform and hide mistakes.
            parameter.data.normal_(std=0.15)
    return model


def _build(family: str) -> PreTrainedModel:
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True))
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE))
    if family == "ministral":
        return MinistralForCausalLM(MinistralConfig(**SMALL, sliding_window=24))
    if family == "ministral3":
        return Ministral3ForCausalLM(Ministral3Config(**SMALL, rope_parameters=YARN_ROPE))
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True))


def saved(family: str, directory: Path, **options: Any) -> Path:
    """The reference, saved."""
    reference(family).save_pretrained(directory, **options)
    return directory
