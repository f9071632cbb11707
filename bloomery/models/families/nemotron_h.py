"""Nemotron 3: a layer is one thing, a Mamba-2, attention without positions, an MLP or experts, none of which has a gate."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from bloomery.models.config import ExpertsConfig, MambaConfig, Mixer, RopeConfig
from bloomery.models.families.experts import sigmoid_experts
from bloomery.models.families.family import Family, Raw
from bloomery.models.families.fields import check_sizes, further_layers
from bloomery.types.errors import InvalidInput, NotSupported

_KINDS: Final[Mapping[str, str]] = {
    **{kind: kind for kind in ("linear_attention", "full_attention", "mlp", "moe")},
    "mamba": "linear_attention",
    "attention": "full_attention",
    "M": "linear_attention",
    "*": "full_attention",
    "-": "mlp",
    "E": "moe",
}
"""What files of several ages call the kinds of layers."""
_MIXERS: Final[Mapping[str, Mixer]] = {"linear_attention": "recurrent", "full_attention": "attention"}


def _nemotron_h(raw: Raw, head_dim: int) -> dict[str, Any]:
    kinds = _layer_kinds(raw)
    if "full_attention" not in kinds:
        # The sampler counts its memory in places for keys and values.
        raise NotSupported("layers_block_type has no full_attention: a model without attention is not supported", field="layers_block_type")
    return {
        "rope": RopeConfig(kind="none", theta=1.0, scaling={"original_max_position_embeddings": 1}),
        "recurrent": _mamba(raw) if "linear_attention" in kinds else None,
        "mixers": tuple(_MIXERS.get(kind, "none") for kind in kinds),
        "mlps": tuple(kind not in _MIXERS for kind in kinds),
        "experts": _experts(raw) if "moe" in kinds else None,
        "activation": "relu_squared",
        "passed_over_layers": further_layers(raw),
    }


def _derived(raw: Raw) -> dict[str, Any]:
    kinds = _layer_kinds(raw)
    return {
        "num_hidden_layers": len(kinds),
        "mlp_layer_types": ["sparse" if kind == "moe" else "dense" for kind in kinds],
        "rms_norm_eps": raw["layer_norm_epsilon"],
    }


def _layer_kinds(raw: Raw) -> tuple[str, ...]:
    """Of each layer: `linear_attention`, `full_attention`, `mlp` or `moe`. Older files have a letter for each."""
    kinds = raw.get("layers_block_type") or raw.get("hybrid_override_pattern")
    if not isinstance(kinds, list | str) or not all(isinstance(kind, str) and kind in _KINDS for kind in kinds):
        says = f"layers_block_type must be a list of {', '.join(dict.fromkeys(_KINDS.values()))}"
        raise InvalidInput(f"{says}, one for each layer, or hybrid_override_pattern their letters (M, *, -, E)", field="layers_block_type")
    return tuple(_KINDS[kind] for kind in kinds)


def _mamba(raw: Raw) -> MambaConfig:
    check_sizes(raw, "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
    heads, groups, least = raw["mamba_num_heads"], raw["n_groups"], raw["time_step_min"]
    if heads % groups:
        raise InvalidInput(f"mamba_num_heads {heads} in n_groups {groups}: every group needs as many", field="n_groups")
    if not isinstance(least, int | float) or not 0 <= least < math.inf:
        raise InvalidInput(f"time_step_min is {least!r}: a number from 0 on is expected", field="time_step_min")
    return MambaConfig(
        heads=heads,
        head_dim=raw["mamba_head_dim"],
        state_size=raw["ssm_state_size"],
        groups=groups,
        conv_width=raw["conv_kernel"],
        conv_bias=raw["use_conv_bias"],
        least_step=float(least),
    )


def _experts(raw: Raw) -> ExpertsConfig | None:
    """One shared expert with a size of its own, whatever `n_shared_experts` says, as `transformers` has it."""
    check_sizes(raw, "moe_shared_expert_intermediate_size", *(("moe_latent_size",) if "moe_latent_size" in raw else ()))
    experts = sigmoid_experts(raw)
    return experts and replace(experts, shared_size=raw["moe_shared_expert_intermediate_size"], latent_size=raw.get("moe_latent_size"))


NEMOTRON_H: Final = Family(
    read=_nemotron_h,
    defaults={
        "layer_norm_epsilon": 1e-5,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 21504,
        "max_position_embeddings": 4096,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_min": 0.001,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "norm_topk_prob": True,
    },
    derive=_derived,
    only={
        "use_bias": (False,),
        "mamba_proj_bias": (False,),
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
        "tie_word_embeddings": (False,),
        "time_step_limit": ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
        "sliding_window": (None,),
    },
    words={
        "model": "backbone",
        "embed_tokens": "embeddings",
        "model.norm.weight": "backbone.norm_f.weight",
        **dict.fromkeys(("self_attn", "linear_attn", "mlp"), "mixer"),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), "norm"),
    },
    mtp_prefix="mtp.",
)
