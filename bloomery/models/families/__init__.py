"""From a Hugging Face `config.json` (transformers 4 or 5 style) to a `DecoderConfig`, family by family; what the core lacks is refused by name.

No torch: the supervisor and the api read configs too.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bloomery.models.config import DecoderConfig
from bloomery.models.families import deepseek, gemma4, glm4, llama, nemotron_h, qwen3_5
from bloomery.models.families.family import Family, Raw
from bloomery.models.families.fields import check_sizes
from bloomery.types.errors import InvalidInput, NotSupported

FAMILIES: Final[Mapping[str, Family]] = {
    "qwen3": llama.QWEN3,
    "llama": llama.LLAMA,
    "ministral": llama.MINISTRAL,
    "ministral3": llama.MINISTRAL,
    "qwen3_moe": llama.QWEN3_MOE,
    "glm4": glm4.GLM4,
    "glm4_moe": glm4.GLM4_MOE,
    "glm4_moe_lite": deepseek.GLM4_MOE_LITE,
    "deepseek_v3": deepseek.DEEPSEEK_V3,
    "kimi_k2": deepseek.KIMI_K2,
    "gemma4_text": gemma4.GEMMA4,
    "qwen3_5_text": qwen3_5.QWEN3_5,
    "qwen3_5_moe_text": qwen3_5.QWEN3_5_MOE,
    "nemotron_h": nemotron_h.NEMOTRON_H,
}
"""By `model_type`."""


def read_config(directory: Path) -> DecoderConfig:
    """Read and check `config.json`; a family or feature that the core lacks is refused by name."""
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise InvalidInput(f"{directory} has no config.json: give a directory that save_pretrained wrote", field="model") from None
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{path} is not JSON: {error}", field="model") from None
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Translate a Hugging Face config."""
    name = str(raw.get("model_type"))
    if (family := FAMILIES.get(name)) is None:
        raise NotSupported(f"model_type `{name}` is not one of the decoder core's families: {', '.join(FAMILIES)}", field="model_type")
    raw = {**family.defaults, **{field: value for field, value in raw.items() if value is not None}}
    raw |= family.derive(raw)
    _refuse_unknown_features(raw, family)
    check_sizes(raw, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    check_sizes(raw, *(field for field in ("num_key_value_heads", "head_dim") if field in raw))
    heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    common: dict[str, Any] = {
        "model_type": name,
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "intermediate_size": raw["intermediate_size"],
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "tied_head": raw.get("tie_word_embeddings", False),
        "qk_norm": False,
        "context": raw.get("max_position_embeddings", 2048),
        "windows": (None,) * layers,
    }
    return DecoderConfig(**(common | family.read(raw, head_dim)))


def _refuse_unknown_features(raw: Raw, family: Family) -> None:
    name = raw["model_type"]
    if (raw.get("attention_bias") and "attention_bias" not in family.may_have) or raw.get("mlp_bias"):
        raise NotSupported("biases on attention or MLP projections are not supported by the decoder core", field="attention_bias")
    if raw.get("hidden_act", "silu") != "silu":
        raise NotSupported(f"hidden_act `{raw['hidden_act']}` is not supported: only silu", field="hidden_act")
    if raw.get("per_layer_config") and "per_layer_config" not in family.may_have:
        raise NotSupported(f"per_layer_config of a {name} model is not supported", field="per_layer_config")
    if raw.get("quantization_config"):
        raise NotSupported("quantised weights are not supported: save the model in bf16, fp16 or fp32", field="quantization_config")
    for field, allowed in family.only.items():
        if field in raw and raw[field] not in allowed:
            raise NotSupported(f"{field} {raw[field]!r} of a {name} model is not supported: only {allowed[0]!r}", field=field)
