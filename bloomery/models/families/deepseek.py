"""Multi-head latent attention and a mixture of experts: DeepSeek V3, Kimi K2, GLM 4.7 Flash."""

import math
from typing import Any, Final

from bloomery.models.config import LatentConfig, RopeConfig
from bloomery.models.families.experts import sigmoid_experts
from bloomery.models.families.family import Family, Raw
from bloomery.models.families.fields import check_sizes, further_layers, rope
from bloomery.types.errors import NotSupported


def _latent(raw: Raw, head_dim: int) -> dict[str, Any]:
    check_sizes(raw, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", *(("q_lora_rank",) if "q_lora_rank" in raw else ()))
    plain, turned, value = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"], raw["v_head_dim"]
    if value > plain + turned:
        raise NotSupported(f"v_head_dim {value} is wider than queries and keys ({plain} + {turned}), which is not supported", field="v_head_dim")
    if raw.get("num_key_value_heads", raw["num_attention_heads"]) != raw["num_attention_heads"]:
        raise NotSupported("latent attention has a key head for every query head: num_key_value_heads must be the same", field="num_key_value_heads")
    turning = rope(raw, rotary_dim=turned, interleaved=raw["rope_interleave"])
    latent = LatentConfig(query_rank=raw.get("q_lora_rank"), key_rank=raw["kv_lora_rank"], plain_dim=plain, rope_dim=turned, value_dim=value)
    return {
        "num_kv_heads": raw["num_attention_heads"],
        "head_dim": plain + turned,
        "rope": turning,
        "latent": latent,
        "attention_scale": _scale(turning, plain + turned),
        "experts": sigmoid_experts(raw),
        "passed_over_layers": further_layers(raw),
    }


def _scale(turning: RopeConfig, head_dim: int) -> float | None:
    """With YaRN, DeepSeek lengthens scores where others lengthen queries and keys."""
    stretch = turning.scaling.get("mscale_all_dim")
    if turning.kind == "default" or not stretch or turning.scaling["factor"] <= 1:
        return None
    magnitude = 0.1 * float(stretch) * math.log(turning.scaling["factor"]) + 1.0
    return magnitude**2 / math.sqrt(head_dim)


_DEFAULTS: Final[Raw] = {"rope_interleave": True, "norm_topk_prob": True, "n_shared_experts": 1}
_ONLY: Final = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}

DEEPSEEK_V3: Final = Family(read=_latent, defaults={**_DEFAULTS, "first_k_dense_replace": 3}, only=_ONLY)
KIMI_K2: Final = Family(read=_latent, defaults={**_DEFAULTS, "first_k_dense_replace": 1}, only=_ONLY)
GLM4_MOE_LITE: Final = Family(
    read=_latent, defaults={**_DEFAULTS, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5}, only={"topk_method": ("noaux_tc",)}
)
