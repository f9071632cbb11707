"""`DecoderConfig`: what the decoder core must know about a model, read from a Hugging Face `config.json`. No torch: the supervisor reads it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.types.errors import InvalidInput, NotSupported
from bloomery.types.routing import RoutingShape

FAMILIES = ("qwen3", "llama", "ministral", "ministral3", "qwen3_moe")
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_SIZES_WITH_DEFAULT = ("num_key_value_heads", "head_dim")
_LARGEST_SIZE = 1 << 24
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding: `kind` is one of default, linear, llama3, yarn; `scaling` holds that kind's own numbers."""

    kind: str
    theta: float
    scaling: dict[str, Any]
    query_beta: float = 0.0
    """Ministral 3 lengthens queries by `1 + beta * log(1 + floor(position / original context))`; 0 means it does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """Mixture of experts in the layers `sparse_layers`."""

    num_experts: int
    top_k: int
    intermediate_size: int
    normalise_top_k: bool
    sparse_layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """One config-driven block: grouped-query attention, RMSNorm, optional query and key norm, SwiGLU or top-k experts."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeConfig
    tied_head: bool
    qk_norm: bool
    context: int
    """Longest sequence the position embedding was made for, in tokens."""
    windows: tuple[int | None, ...]
    """Per layer, how many latest keys a query sees; None means all."""
    experts: ExpertsConfig | None = None

    @property
    def routing(self) -> RoutingShape | None:
        """Of a mixture of experts."""
        experts = self.experts
        return None if experts is None else RoutingShape(experts.sparse_layers, experts.top_k, experts.num_experts)


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


def parse_config(raw: dict[str, Any]) -> DecoderConfig:
    """Translate a Hugging Face config (transformers 4 or 5 style)."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise NotSupported(f"model_type `{family}` is not one of the decoder core's families: {', '.join(FAMILIES)}", field="model_type")
    _refuse_unknown_features(raw)
    for name in (*_SIZES, *(name for name in _SIZES_WITH_DEFAULT if raw.get(name) is not None)):
        if not isinstance(raw[name], int) or not 1 <= raw[name] <= _LARGEST_SIZE:
            raise InvalidInput(f"{name} is {raw[name]!r}: a whole number from 1 to {_LARGEST_SIZE} is expected", field=name)
    heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    return DecoderConfig(
        model_type=family,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        intermediate_size=raw["intermediate_size"],
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=_rope(raw),
        tied_head=raw.get("tie_word_embeddings", False),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        context=raw.get("max_position_embeddings", 2048),
        windows=_windows(raw, layers),
        experts=_experts(raw) if family == "qwen3_moe" else None,
    )


def _refuse_unknown_features(raw: dict[str, Any]) -> None:
    if raw.get("attention_bias") or raw.get("mlp_bias"):
        raise NotSupported("biases on attention or MLP projections are not supported by the decoder core", field="attention_bias")
    if raw.get("hidden_act", "silu") != "silu":
        raise NotSupported(f"hidden_act `{raw['hidden_act']}` is not supported: only silu", field="hidden_act")
    if raw.get("quantization_config"):
        raise NotSupported("quantised weights are not supported: save the model in bf16, fp16 or fp32", field="quantization_config")


def _rope(raw: dict[str, Any]) -> RopeConfig:
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    theta = scaling.pop("rope_theta", None) or raw.get("rope_theta", 10_000.0)
    if kind not in _ROPE_KINDS:
        raise NotSupported(f"rope type `{kind}` is not supported: one of {', '.join(_ROPE_KINDS)}", field="rope_parameters")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotSupported("partial rotary embeddings are not supported", field="rope_parameters")
    scaling.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings", 2048))
    return RopeConfig(kind=kind, theta=float(theta), scaling=scaling, query_beta=float(scaling.get("llama_4_scaling_beta") or 0.0))


def _windows(raw: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    if window is None or raw["model_type"] == "llama":
        return (None,) * layers
    kinds = raw.get("layer_types") or _default_layer_types(raw, layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _default_layer_types(raw: dict[str, Any], layers: int) -> list[str]:
    # Qwen3 keeps full attention below `max_window_layers`; Ministral slides everywhere.
    first_sliding = raw.get("max_window_layers", 28) if raw["model_type"].startswith("qwen3") else 0
    return ["sliding_attention" if layer >= first_sliding else "full_attention" for layer in range(layers)]


def _experts(raw: dict[str, Any]) -> ExpertsConfig | None:
    routing = RoutingShape.of_config(raw)
    return (
        None
        if routing is None
        else ExpertsConfig(
            num_experts=routing.experts,
            top_k=routing.top_k,
            intermediate_size=raw["moe_intermediate_size"],
            normalise_top_k=raw.get("norm_topk_prob", False),
            sparse_layers=routing.sparse_layers,
        )
    )
