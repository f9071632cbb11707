"""From a Hugging Face `config.json` (transformers 4 or 5 style) to a `DecoderConfig`, family by family; what the core lacks is refused by name."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bloomery.models.config import (
    DecoderConfig,
    ExpertsConfig,
    GatedDeltaConfig,
    LatentConfig,
    LayerHeads,
    MambaConfig,
    Mixer,
    PerLayerConfig,
    RopeConfig,
)
from bloomery.types.errors import InvalidInput, NotSupported
from bloomery.types.routing import RoutingShape, nemotron_layers

FAMILIES = (
    "qwen3",
    "llama",
    "ministral",
    "ministral3",
    "qwen3_moe",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "kimi_k2",
    "gemma4_text",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "nemotron_h",
)
_QWEN3_5: Final = ("qwen3_5_text", "qwen3_5_moe_text")
_LATENT: Final = ("glm4_moe_lite", "deepseek_v3", "kimi_k2")

_SIZES: Final = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_SIZES_WITH_DEFAULT: Final = ("num_key_value_heads", "head_dim")
_LATENT_SIZES: Final = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DELTA_SIZES: Final = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_MAMBA_SIZES: Final = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
_EXPERT_SIZES: Final = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
_LARGEST_SIZE: Final = 1 << 24
_ROPE_KINDS: Final = ("default", "linear", "llama3", "yarn")
_OTHER_ROPE_KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "gemma4_text": ("default", "proportional"),
    **dict.fromkeys(_QWEN3_5, ("default",)),
}

_DELTA_DEFAULTS: Final[Mapping[str, Any]] = {
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
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07},
    "glm4_moe": {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "norm_topk_prob": True, "n_shared_experts": 1},
    "glm4_moe_lite": {"rope_interleave": True, "rms_norm_eps": 1e-5, "norm_topk_prob": True, "n_shared_experts": 1},
    "deepseek_v3": {"rope_interleave": True, "norm_topk_prob": True, "n_shared_experts": 1},
    "kimi_k2": {"rope_interleave": True, "norm_topk_prob": True, "n_shared_experts": 1},
    "gemma4_text": {"tie_word_embeddings": True},
    "qwen3_5_text": {**_DELTA_DEFAULTS, "num_key_value_heads": 4},
    "qwen3_5_moe_text": {**_DELTA_DEFAULTS, "num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "nemotron_h": {
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
}
"""What a family's config says where its file says nothing."""

_ONLY: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "deepseek_v3": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,), "attention_bias": (False,)},
    "kimi_k2": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,), "attention_bias": (False,)},
    "glm4_moe_lite": {"topk_method": ("noaux_tc",), "attention_bias": (False,)},
    "glm4_moe": {"topk_method": ("noaux_tc",)},
    "gemma4_text": {
        "attention_bias": (False,),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": ("vision",),
    },
    "nemotron_h": {
        "use_bias": (False,),
        "mamba_proj_bias": (False,),
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
        "tie_word_embeddings": (False,),
        "time_step_limit": ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
        "sliding_window": (None,),
    },
}
"""The values of a field that the core can compute; without a value, or with null, it is what the first of them is."""


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
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise NotSupported(f"model_type `{family}` is not one of the decoder core's families: {', '.join(FAMILIES)}", field="model_type")
    raw = dict(_DEFAULTS.get(family, {})) | {name: value for name, value in raw.items() if value is not None}
    if family == "nemotron_h":
        raw |= {"num_hidden_layers": len(nemotron_layers(raw)), "rms_norm_eps": raw["layer_norm_epsilon"]}
    if family == "qwen3_5_moe_text":
        raw["intermediate_size"] = raw["moe_intermediate_size"]
    _refuse_unknown_features(raw)
    _check_sizes(raw, _SIZES + tuple(name for name in _SIZES_WITH_DEFAULT if name in raw))
    heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    common: dict[str, Any] = {
        "model_type": family,
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "intermediate_size": raw["intermediate_size"],
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "tied_head": raw.get("tie_word_embeddings", False),
        "qk_norm": family in ("qwen3", "qwen3_moe", *_QWEN3_5),
        "context": raw.get("max_position_embeddings", 2048),
        "windows": _windows(raw, layers),
    }
    return DecoderConfig(**(common | _PARTICULARS.get(family, _llama_like)(raw, head_dim)))


def _llama_like(raw: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    return {"rope": _rope(raw), "experts": _softmax_experts(raw) if raw["model_type"] == "qwen3_moe" else None}


def _glm4(raw: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    rope = _rope(raw, rotary_dim=_rotary_dim(raw, head_dim), interleaved=True)
    return {"rope": rope, "qkv_bias": raw["attention_bias"], "sandwich_norms": True, "fused_gate_up": True}


def _glm4_moe(raw: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    return {
        "rope": _rope(raw, rotary_dim=_rotary_dim(raw, head_dim)),
        "qkv_bias": raw.get("attention_bias", False),
        "qk_norm": raw.get("use_qk_norm", False),
        "experts": _sigmoid_experts(raw),
        "passed_over_layers": _passed_over(raw),
    }


def _latent(raw: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    _check_sizes(raw, _LATENT_SIZES + (("q_lora_rank",) if "q_lora_rank" in raw else ()))
    plain, turned, value = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"], raw["v_head_dim"]
    if value > plain + turned:
        raise NotSupported(f"v_head_dim {value} is wider than queries and keys ({plain} + {turned}), which is not supported", field="v_head_dim")
    if raw.get("num_key_value_heads", raw["num_attention_heads"]) != raw["num_attention_heads"]:
        raise NotSupported("latent attention has a key head for every query head: num_key_value_heads must be the same", field="num_key_value_heads")
    rope = _rope(raw, rotary_dim=turned, interleaved=raw["rope_interleave"])
    latent = LatentConfig(query_rank=raw.get("q_lora_rank"), key_rank=raw["kv_lora_rank"], plain_dim=plain, rope_dim=turned, value_dim=value)
    return {
        "num_kv_heads": raw["num_attention_heads"],
        "head_dim": plain + turned,
        "rope": rope,
        "latent": latent,
        "attention_scale": _latent_scale(rope, plain + turned),
        "experts": _sigmoid_experts(raw),
        "passed_over_layers": _passed_over(raw),
    }


def _latent_scale(rope: RopeConfig, head_dim: int) -> float | None:
    """With YaRN, DeepSeek lengthens scores where others lengthen queries and keys."""
    stretch = rope.scaling.get("mscale_all_dim")
    if rope.kind == "default" or not stretch or rope.scaling["factor"] <= 1:
        return None
    magnitude = 0.1 * float(stretch) * math.log(rope.scaling["factor"]) + 1.0
    return magnitude**2 / math.sqrt(head_dim)


def _gemma4(raw: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    kinds, ropes = raw.get("layer_types"), raw.get("rope_parameters")
    layers = raw["num_hidden_layers"]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise InvalidInput(f"layer_types must say sliding_attention or full_attention for each of {layers} layers", field="layer_types")
    if not isinstance(ropes, dict) or not set(kinds) <= ropes.keys():
        raise InvalidInput("rope_parameters must have an entry for every kind of layer", field="rope_parameters")
    if unknown := raw.get("per_layer_config", {}).keys() - set(map(str, range(layers))):
        raise InvalidInput(f"per_layer_config names `{min(unknown)}`, which is no number of a layer", field="per_layer_config")
    sources = _gemma4_sources(raw, kinds)
    heads = tuple(_gemma4_heads(raw, layer, kind, head_dim)._replace(source=sources.get(layer)) for layer, kind in enumerate(kinds))
    inner = raw["intermediate_size"]
    dims = {kind: each.head_dim for kind, each in zip(kinds, heads, strict=True)}
    if any(each.head_dim != dims[kind] for kind, each in zip(kinds, heads, strict=True)):
        raise NotSupported("layers of one kind have heads of different dimensions, which is not supported", field="per_layer_config")
    turning = {kind: _rope({**raw, "rope_parameters": ropes[kind]}, rotary_dim=dim) for kind, dim in dims.items()}
    return {
        "rope": turning.get("sliding_attention") or turning["full_attention"],
        "full_rope": turning.get("full_attention"),
        "layer_heads": heads,
        "num_kv_heads": max(each.kv_heads for each in heads),
        "head_dim": max(each.head_dim for each in heads),
        **(_wide_layers(inner, sources, layers) if raw.get("use_double_wide_mlp") else {}),
        "per_layer": _gemma4_per_layer(raw),
        "experts": _gemma4_experts(raw),
        "activation": "gelu_tanh",
        "qk_norm": True,
        "value_norm": True,
        "sandwich_norms": True,
        "layer_scale": True,
        "attention_scale": 1.0,
        "embedding_scale": math.sqrt(raw["hidden_size"]),
        "logit_softcap": raw.get("final_logit_softcapping"),
    }


def _gemma4_sources(raw: Mapping[str, Any], kinds: list[str]) -> dict[int, int]:
    """The last layers attend to the keys and values of the last layer of their kind that has some of its own."""
    shared, layers = raw.get("num_kv_shared_layers", 0), len(kinds)
    if not isinstance(shared, int) or not 0 <= shared < layers or not set(kinds[layers - shared :]) <= set(kinds[: layers - shared]):
        says = f"num_kv_shared_layers is {shared!r}: a number below {layers} is expected"
        raise InvalidInput(f"{says}, that leaves a layer of every kind with keys of its own", field="num_kv_shared_layers")
    own = kinds[: layers - shared]
    return {layer: len(own) - 1 - own[::-1].index(kinds[layer]) for layer in range(len(own), layers)}


def _wide_layers(inner: int, sources: Mapping[int, int], layers: int) -> dict[str, Any]:
    """Layers without keys and values of their own have twice the intermediate size."""
    sizes = tuple(inner * (2 if layer in sources else 1) for layer in range(layers))
    return {"layer_inner": sizes, "intermediate_size": max(sizes)}


def _gemma4_per_layer(raw: Mapping[str, Any]) -> PerLayerConfig | None:
    raw = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144} | dict(raw)
    if not raw["hidden_size_per_layer_input"]:
        return None
    _check_sizes(raw, ("hidden_size_per_layer_input", "vocab_size_per_layer_input"))
    if raw["vocab_size_per_layer_input"] < raw["vocab_size"]:
        raise InvalidInput(
            "vocab_size_per_layer_input is smaller than vocab_size: every token needs its per-layer input", field="vocab_size_per_layer_input"
        )
    return PerLayerConfig(vocab_size=raw["vocab_size_per_layer_input"], width=raw["hidden_size_per_layer_input"])


def _gemma4_experts(raw: Mapping[str, Any]) -> ExpertsConfig | None:
    routing = RoutingShape.of_config(raw)
    if routing is None:
        return None
    _check_sizes(raw, ("num_experts", "top_k_experts", "moe_intermediate_size"))
    if routing.top_k > routing.experts:
        raise InvalidInput(f"top_k_experts is {routing.top_k} of {routing.experts} experts", field="top_k_experts")
    return ExpertsConfig(
        num_experts=routing.experts,
        top_k=routing.top_k,
        intermediate_size=raw["moe_intermediate_size"],
        normalise_top_k=True,
        sparse_layers=routing.sparse_layers,
        beside_mlp=True,
    )


def _gemma4_heads(raw: Mapping[str, Any], layer: int, kind: str, head_dim: int) -> LayerHeads:
    """Layers without a window have heads of their own, said per layer (transformers 5) or for all of them."""
    kv_heads, shares = raw.get("num_key_value_heads") or raw["num_attention_heads"], bool(raw.get("attention_k_eq_v"))
    own: dict[str, Any] = raw.get("per_layer_config", {}).get(str(layer), {})
    if odd := own.keys() - {"head_dim", "num_key_value_heads"}:
        raise NotSupported(f"per_layer_config changes `{min(odd)}` of layer {layer}, which is not supported", field="per_layer_config")
    if kind == "full_attention" and "per_layer_config" not in raw:
        own = {"head_dim": raw.get("global_head_dim", 512)}
        if shares and "num_global_key_value_heads" in raw:
            own["num_key_value_heads"] = raw["num_global_key_value_heads"]
    found = {"head_dim": head_dim, "num_key_value_heads": kv_heads} | own
    _check_sizes(found, tuple(found))
    return LayerHeads(found["num_key_value_heads"], found["head_dim"], own_values=not (shares and kind == "full_attention"))


def _qwen3_5(raw: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Every fourth layer attends, with a gate; the others have a gated delta net."""
    mixers: dict[str, Mixer] = {"linear_attention": "recurrent", "full_attention": "attention"}
    layers, every = raw["num_hidden_layers"], raw["full_attention_interval"]
    kinds = raw.get("layer_types") or ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= mixers.keys():
        raise InvalidInput(f"layer_types must say linear_attention or full_attention for each of {layers} layers", field="layer_types")
    if "full_attention" not in kinds:
        raise NotSupported("a model in which no layer attends is not supported: layer_types names no full_attention", field="layer_types")
    _check_sizes(raw, _DELTA_SIZES)
    heads, key_heads = raw["linear_num_value_heads"], raw["linear_num_key_heads"]
    if heads % key_heads:
        says = f"linear_num_value_heads {heads} for linear_num_key_heads {key_heads}"
        raise InvalidInput(f"{says}: every key head needs as many", field="linear_num_value_heads")
    return {
        "rope": _rope(raw, rotary_dim=_rotary_dim(raw, head_dim)),
        "experts": _qwen3_5_experts(raw) if raw["model_type"] == "qwen3_5_moe_text" else None,
        "attention_gate": True,
        "centred_norms": True,
        "mixers": tuple(mixers[kind] for kind in kinds),
        "recurrent": GatedDeltaConfig(
            key_heads=key_heads,
            heads=heads,
            key_dim=raw["linear_key_head_dim"],
            value_dim=raw["linear_value_head_dim"],
            conv_width=raw["linear_conv_kernel_dim"],
        ),
    }


def _qwen3_5_experts(raw: Mapping[str, Any]) -> ExpertsConfig | None:
    _check_sizes(raw, ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"))
    if raw["num_experts_per_tok"] > raw["num_experts"]:
        raise InvalidInput(f"num_experts_per_tok is {raw['num_experts_per_tok']} of {raw['num_experts']} experts", field="num_experts_per_tok")
    experts = _softmax_experts(raw)
    return experts and replace(experts, normalise_top_k=True, shared_size=raw["shared_expert_intermediate_size"], shared_gate=True)


def _nemotron_h(raw: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """A layer is one thing: a mixer with a state, attention, an MLP or experts."""
    kinds = nemotron_layers(raw)
    if "full_attention" not in kinds:
        # The sampler counts its memory in places for keys and values.
        raise NotSupported("layers_block_type has no full_attention: a model without attention is not supported", field="layers_block_type")
    mixers: dict[str, Mixer] = {"linear_attention": "recurrent", "full_attention": "attention"}
    return {
        "rope": RopeConfig(kind="none", theta=1.0, scaling={"original_max_position_embeddings": 1}),
        "recurrent": _mamba(raw) if "linear_attention" in kinds else None,
        "mixers": tuple(mixers.get(kind, "none") for kind in kinds),
        "mlps": tuple(kind not in mixers for kind in kinds),
        "experts": _nemotron_experts(raw) if "moe" in kinds else None,
        "activation": "relu_squared",
        "passed_over_layers": _passed_over(raw),
    }


def _mamba(raw: Mapping[str, Any]) -> MambaConfig:
    _check_sizes(raw, _MAMBA_SIZES)
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


def _nemotron_experts(raw: Mapping[str, Any]) -> ExpertsConfig | None:
    """One shared expert with a size of its own, whatever `n_shared_experts` says, as `transformers` has it."""
    _check_sizes(raw, ("moe_shared_expert_intermediate_size", *(("moe_latent_size",) if "moe_latent_size" in raw else ())))
    experts = _sigmoid_experts(raw)
    return experts and replace(experts, shared_size=raw["moe_shared_expert_intermediate_size"], latent_size=raw.get("moe_latent_size"))


_PARTICULARS: Final[Mapping[str, Callable[[Mapping[str, Any], int], dict[str, Any]]]] = {
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "gemma4_text": _gemma4,
    "nemotron_h": _nemotron_h,
    **dict.fromkeys(_QWEN3_5, _qwen3_5),
    **dict.fromkeys(_LATENT, _latent),
}


def _refuse_unknown_features(raw: Mapping[str, Any]) -> None:
    family = raw["model_type"]
    if (raw.get("attention_bias") and not family.startswith("glm4")) or raw.get("mlp_bias"):
        raise NotSupported("biases on attention or MLP projections are not supported by the decoder core", field="attention_bias")
    if raw.get("hidden_act", "silu") != "silu":
        raise NotSupported(f"hidden_act `{raw['hidden_act']}` is not supported: only silu", field="hidden_act")
    if raw.get("per_layer_config") and family != "gemma4_text":
        raise NotSupported(f"per_layer_config of a {family} model is not supported", field="per_layer_config")
    if raw.get("quantization_config"):
        raise NotSupported("quantised weights are not supported: save the model in bf16, fp16 or fp32", field="quantization_config")
    for name, allowed in _ONLY.get(family, {}).items():
        if name in raw and raw[name] not in allowed:
            raise NotSupported(f"{name} {raw[name]!r} of a {family} model is not supported: only {allowed[0]!r}", field=name)


def _check_sizes(raw: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        value = raw.get(name)
        if not isinstance(value, int) or not 1 <= value <= _LARGEST_SIZE:
            raise InvalidInput(f"{name} is {value!r}: a whole number from 1 to {_LARGEST_SIZE} is expected", field=name)


def _rope(raw: Mapping[str, Any], *, rotary_dim: int | None = None, interleaved: bool = False) -> RopeConfig:
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    theta = scaling.pop("rope_theta", None) or raw.get("rope_theta", 10_000.0)
    kinds = _OTHER_ROPE_KINDS.get(raw["model_type"], _ROPE_KINDS)
    if kind not in kinds:
        raise NotSupported(f"rope type `{kind}` is not supported: one of {', '.join(kinds)}", field="rope_parameters")
    if rotary_dim is None and _turning_part(raw) != 1.0:
        raise NotSupported("partial rotary embeddings are not supported", field="rope_parameters")
    if kind != "proportional":
        scaling.pop("partial_rotary_factor", None)
    scaling.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings", 2048))
    return RopeConfig(
        kind=kind,
        theta=float(theta),
        scaling=scaling,
        query_beta=float(scaling.get("llama_4_scaling_beta") or 0.0),
        rotary_dim=rotary_dim,
        interleaved=interleaved,
    )


def _rotary_dim(raw: Mapping[str, Any], head_dim: int) -> int:
    dim = int(head_dim * _turning_part(raw))
    if not 2 <= dim <= head_dim or dim % 2:
        says = f"partial_rotary_factor {_turning_part(raw)} turns {dim} of {head_dim} dimensions"
        raise InvalidInput(f"{says}: an even number of them is expected", field="rope_parameters")
    return dim


def _turning_part(raw: Mapping[str, Any]) -> float:
    """Which part of a head turns: said beside the rope's other numbers, or, in older files, of the model."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return float(rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)))


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    if window is None or raw["model_type"] not in ("qwen3", "qwen3_moe", "ministral", "ministral3", "gemma4_text"):
        return (None,) * layers
    kinds = raw.get("layer_types") or _default_layer_types(raw, layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _default_layer_types(raw: Mapping[str, Any], layers: int) -> list[str]:
    # Qwen3 keeps full attention below `max_window_layers`; Ministral slides everywhere.
    first_sliding = raw.get("max_window_layers", 28) if raw["model_type"].startswith("qwen3") else 0
    return ["sliding_attention" if layer >= first_sliding else "full_attention" for layer in range(layers)]


def _softmax_experts(raw: Mapping[str, Any]) -> ExpertsConfig | None:
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


def _sigmoid_experts(raw: Mapping[str, Any]) -> ExpertsConfig | None:
    _check_sizes(raw, (*_EXPERT_SIZES, *(name for name in ("n_group", "topk_group") if name in raw)))
    _check_dense_layers(raw)
    routing, groups, kept = RoutingShape.of_config(raw), raw.get("n_group", 1), raw.get("topk_group", 1)
    if routing is None or not routing.sparse_layers:
        return None
    in_group = routing.experts // groups
    if routing.experts % groups or not 1 <= kept <= groups or routing.top_k > kept * in_group or (groups > 1 and in_group < 2):
        says = f"{routing.experts} experts in n_group {groups}, of which topk_group {kept} hold num_experts_per_tok {routing.top_k}"
        raise InvalidInput(f"{says}: every group needs as many, at least two, and the chosen groups must hold them", field="n_group")
    return ExpertsConfig(
        num_experts=routing.experts,
        top_k=routing.top_k,
        intermediate_size=raw["moe_intermediate_size"],
        normalise_top_k=raw["norm_topk_prob"],
        sparse_layers=routing.sparse_layers,
        scoring="sigmoid",
        groups=groups,
        groups_kept=kept,
        scale=float(raw.get("routed_scaling_factor", 1.0)),
        shared_size=raw["moe_intermediate_size"] * raw["n_shared_experts"],
    )


def _check_dense_layers(raw: Mapping[str, Any]) -> None:
    layers, first, kinds = raw["num_hidden_layers"], raw.get("first_k_dense_replace", 0), raw.get("mlp_layer_types")
    if not isinstance(first, int) or first < 0:
        raise InvalidInput(f"first_k_dense_replace is {first!r}: a number of layers is expected", field="first_k_dense_replace")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}):
        raise InvalidInput(f"mlp_layer_types must say dense or sparse for each of {layers} layers", field="mlp_layer_types")


def _passed_over(raw: Mapping[str, Any]) -> int:
    return int(raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 0)
