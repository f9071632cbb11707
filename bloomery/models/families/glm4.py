"""GLM 4: half of a head turns; GLM 4.5 and later are mixtures of experts."""

from typing import Any, Final

from bloomery.models.families.experts import sigmoid_experts
from bloomery.models.families.family import Family, NormNames, Raw
from bloomery.models.families.fields import further_layers, rope, rotary_dim


def _glm4(raw: Raw, head_dim: int) -> dict[str, Any]:
    turning = rope(raw, rotary_dim=rotary_dim(raw, head_dim), interleaved=True)
    return {"rope": turning, "qkv_bias": raw["attention_bias"], "sandwich_norms": True, "fused_gate_up": True}


def _glm4_moe(raw: Raw, head_dim: int) -> dict[str, Any]:
    return {
        "rope": rope(raw, rotary_dim=rotary_dim(raw, head_dim)),
        "qkv_bias": raw.get("attention_bias", False),
        "qk_norm": raw.get("use_qk_norm", False),
        "experts": sigmoid_experts(raw),
        "passed_over_layers": further_layers(raw),
    }


GLM4: Final = Family(
    read=_glm4,
    defaults={"attention_bias": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07},
    may_have=frozenset({"attention_bias"}),
    norm_names=NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
)
GLM4_MOE: Final = Family(
    read=_glm4_moe,
    defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 1},
    only={"topk_method": ("noaux_tc",)},
    may_have=frozenset({"attention_bias"}),
)
