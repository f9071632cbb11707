"""Gemma 4: layers with a window and without differ in heads and rotary embedding; the smaller models share keys and values between layers and have
per-layer inputs, others have experts beside their MLPs."""

import math
from collections.abc import Mapping
from typing import Any, Final

from bloomery.models.config import ExpertsConfig, LayerHeads, PerLayerConfig
from bloomery.models.families.experts import check_top_k
from bloomery.models.families.family import Family, NormNames, Raw
from bloomery.models.families.fields import check_sizes, rope, windows
from bloomery.types.errors import InvalidInput, NotSupported

_ROPE_KINDS: Final = ("default", "proportional")


def _gemma4(raw: Raw, head_dim: int) -> dict[str, Any]:
    kinds, ropes = raw.get("layer_types"), raw.get("rope_parameters")
    layers = raw["num_hidden_layers"]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise InvalidInput(f"layer_types must say sliding_attention or full_attention for each of {layers} layers", field="layer_types")
    if not isinstance(ropes, dict) or not set(kinds) <= ropes.keys():
        raise InvalidInput("rope_parameters must have an entry for every kind of layer", field="rope_parameters")
    if unknown := raw.get("per_layer_config", {}).keys() - set(map(str, range(layers))):
        raise InvalidInput(f"per_layer_config names `{min(unknown)}`, which is no number of a layer", field="per_layer_config")
    sources = _sources(raw, kinds)
    heads = tuple(_heads(raw, layer, kind, head_dim)._replace(source=sources.get(layer)) for layer, kind in enumerate(kinds))
    dims = {kind: each.head_dim for kind, each in zip(kinds, heads, strict=True)}
    if any(each.head_dim != dims[kind] for kind, each in zip(kinds, heads, strict=True)):
        raise NotSupported("layers of one kind have heads of different dimensions, which is not supported", field="per_layer_config")
    turning = {kind: rope({**raw, "rope_parameters": ropes[kind]}, kinds=_ROPE_KINDS, rotary_dim=dim) for kind, dim in dims.items()}
    return {
        "rope": turning.get("sliding_attention") or turning["full_attention"],
        "full_rope": turning.get("full_attention"),
        "windows": windows(raw, kinds),
        "layer_heads": heads,
        "num_kv_heads": max(each.kv_heads for each in heads),
        "head_dim": max(each.head_dim for each in heads),
        **(_wide_layers(raw["intermediate_size"], sources, layers) if raw.get("use_double_wide_mlp") else {}),
        "per_layer": _per_layer(raw),
        "experts": _experts(raw),
        "activation": "gelu_tanh",
        "qk_norm": True,
        "value_norm": True,
        "sandwich_norms": True,
        "layer_scale": True,
        "attention_scale": 1.0,
        "embedding_scale": math.sqrt(raw["hidden_size"]),
        "logit_softcap": raw.get("final_logit_softcapping"),
    }


def _sources(raw: Raw, kinds: list[str]) -> dict[int, int]:
    """The last layers attend to the keys and values of the last layer of their kind that has some of its own."""
    shared, layers = raw.get("num_kv_shared_layers", 0), len(kinds)
    if not isinstance(shared, int) or not 0 <= shared < layers or not set(kinds[layers - shared :]) <= set(kinds[: layers - shared]):
        says = f"num_kv_shared_layers is {shared!r}: a number below {layers} is expected"
        raise InvalidInput(f"{says}, that leaves a layer of every kind with keys of its own", field="num_kv_shared_layers")
    own = kinds[: layers - shared]
    return {layer: len(own) - 1 - own[::-1].index(kinds[layer]) for layer in range(len(own), layers)}


def _heads(raw: Raw, layer: int, kind: str, head_dim: int) -> LayerHeads:
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
    check_sizes(found, *found)
    return LayerHeads(found["num_key_value_heads"], found["head_dim"], own_values=not (shares and kind == "full_attention"))


def _wide_layers(inner: int, sources: Mapping[int, int], layers: int) -> dict[str, Any]:
    """Layers without keys and values of their own have twice the intermediate size."""
    sizes = tuple(inner * (2 if layer in sources else 1) for layer in range(layers))
    return {"layer_inner": sizes, "intermediate_size": max(sizes)}


def _per_layer(raw: Raw) -> PerLayerConfig | None:
    raw = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144} | dict(raw)
    if not raw["hidden_size_per_layer_input"]:
        return None
    check_sizes(raw, "hidden_size_per_layer_input", "vocab_size_per_layer_input")
    if raw["vocab_size_per_layer_input"] < raw["vocab_size"]:
        raise InvalidInput(
            "vocab_size_per_layer_input is smaller than vocab_size: every token needs its per-layer input", field="vocab_size_per_layer_input"
        )
    return PerLayerConfig(vocab_size=raw["vocab_size_per_layer_input"], width=raw["hidden_size_per_layer_input"])


def _experts(raw: Raw) -> ExpertsConfig | None:
    if not raw.get("enable_moe_block") or not raw.get("num_experts"):
        return None
    check_top_k(raw, "top_k_experts", "num_experts")
    check_sizes(raw, "moe_intermediate_size")
    return ExpertsConfig(
        num_experts=raw["num_experts"],
        top_k=raw["top_k_experts"],
        intermediate_size=raw["moe_intermediate_size"],
        normalise_top_k=True,
        sparse_layers=tuple(range(raw["num_hidden_layers"])),
        beside_mlp=True,
    )


GEMMA4: Final = Family(
    read=_gemma4,
    defaults={"tie_word_embeddings": True},
    only={"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": ("vision",)},
    may_have=frozenset({"per_layer_config"}),
    norm_names=NormNames("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
