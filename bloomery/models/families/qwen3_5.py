"""Qwen3.5: every fourth layer attends, with a gate; the others have a gated delta net. One form is a mixture of experts."""

from dataclasses import replace
from typing import Any, Final

from bloomery.models.config import ExpertsConfig, GatedDeltaConfig, Mixer
from bloomery.models.families.experts import softmax_experts
from bloomery.models.families.family import Family, Raw
from bloomery.models.families.fields import check_sizes, rope, rotary_dim
from bloomery.types.errors import InvalidInput, NotSupported

_MIXERS: Final[dict[str, Mixer]] = {"linear_attention": "recurrent", "full_attention": "attention"}


def _qwen3_5(raw: Raw, head_dim: int) -> dict[str, Any]:
    layers, every = raw["num_hidden_layers"], raw["full_attention_interval"]
    kinds = raw.get("layer_types") or ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= _MIXERS.keys():
        raise InvalidInput(f"layer_types must say linear_attention or full_attention for each of {layers} layers", field="layer_types")
    if "full_attention" not in kinds:
        raise NotSupported("a model in which no layer attends is not supported: layer_types names no full_attention", field="layer_types")
    return {
        "rope": rope(raw, kinds=("default",), rotary_dim=rotary_dim(raw, head_dim)),
        "qk_norm": True,
        "attention_gate": True,
        "centred_norms": True,
        "mixers": tuple(_MIXERS[kind] for kind in kinds),
        "recurrent": _gated_delta(raw),
    }


def _qwen3_5_moe(raw: Raw, head_dim: int) -> dict[str, Any]:
    return _qwen3_5(raw, head_dim) | {"experts": _experts(raw)}


def _gated_delta(raw: Raw) -> GatedDeltaConfig:
    check_sizes(raw, *(name for name in _DEFAULTS if name.startswith("linear_")))
    heads, key_heads = raw["linear_num_value_heads"], raw["linear_num_key_heads"]
    if heads % key_heads:
        says = f"linear_num_value_heads {heads} for linear_num_key_heads {key_heads}"
        raise InvalidInput(f"{says}: every key head needs as many", field="linear_num_value_heads")
    return GatedDeltaConfig(
        key_heads=key_heads,
        heads=heads,
        key_dim=raw["linear_key_head_dim"],
        value_dim=raw["linear_value_head_dim"],
        conv_width=raw["linear_conv_kernel_dim"],
    )


def _experts(raw: Raw) -> ExpertsConfig | None:
    check_sizes(raw, "num_experts", "shared_expert_intermediate_size")
    experts = softmax_experts(raw)
    return experts and replace(experts, normalise_top_k=True, shared_size=raw["shared_expert_intermediate_size"], shared_gate=True)


_DEFAULTS: Final[Raw] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32_768,
}

QWEN3_5: Final = Family(read=_qwen3_5, defaults={**_DEFAULTS, "num_key_value_heads": 4})
QWEN3_5_MOE: Final = Family(
    read=_qwen3_5_moe,
    defaults={**_DEFAULTS, "num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    derive=lambda raw: {"intermediate_size": raw["moe_intermediate_size"]},
)
