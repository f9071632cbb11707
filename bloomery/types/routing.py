"""The routing of a mixture of experts: what shape it has in a model, and whether a given one is of that shape.

A routing of N tokens is int [N, L, T]: for each of the L sparse layers the T experts that a token is sent to. -1 in all T places leaves the router
free.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput

_DENSE_AT_FIRST: Final[Mapping[str, int]] = {"deepseek_v3": 3, "kimi_k2": 1, "glm4_moe": 1, "glm4_moe_lite": 1}
"""Layers of a family, where its config does not say how many."""
_NEMOTRON_LAYERS: Final[Mapping[str, str]] = {
    **{kind: kind for kind in ("linear_attention", "full_attention", "mlp", "moe")},
    "mamba": "linear_attention",
    "attention": "full_attention",
    "M": "linear_attention",
    "*": "full_attention",
    "-": "mlp",
    "E": "moe",
}
"""What files of several ages call the kinds of layers."""


class RoutingShape(NamedTuple):
    """Of one model."""

    sparse_layers: tuple[int, ...]
    top_k: int
    experts: int

    @classmethod
    def of_config(cls, raw: Mapping[str, Any]) -> "RoutingShape | None":
        """From the text of a `config.json`; None for a dense model."""
        experts = raw.get("num_experts") or raw.get("num_local_experts") or raw.get("n_routed_experts")
        if not experts or raw.get("enable_moe_block") is False:
            return None
        if raw.get("model_type") == "nemotron_h":
            sparse = tuple(layer for layer, kind in enumerate(nemotron_layers(raw)) if kind == "moe")
            return cls(sparse, raw["num_experts_per_tok"], experts) if sparse else None
        top_k = raw["top_k_experts"] if raw.get("enable_moe_block") else raw["num_experts_per_tok"]
        return cls(tuple(layer for layer in range(raw["num_hidden_layers"]) if _is_sparse(raw, layer)), top_k, experts)


def _is_sparse(raw: Mapping[str, Any], layer: int) -> bool:
    """Qwen counts steps and names dense layers, GLM and DeepSeek begin with dense ones, or say it of every layer."""
    kinds, first = raw.get("mlp_layer_types"), raw.get("first_k_dense_replace")
    if kinds:
        return bool(kinds[layer] == "sparse")
    if first is None:
        first = _DENSE_AT_FIRST.get(raw.get("model_type", ""), 0)
    step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    return bool(layer >= first and layer not in dense and (layer + 1) % step == 0)


def nemotron_layers(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """What each layer of a Nemotron is: `linear_attention`, `full_attention`, `mlp` or `moe`. Older files have a letter for each."""
    kinds = raw.get("layers_block_type") or raw.get("hybrid_override_pattern")
    if not isinstance(kinds, list | str) or not all(isinstance(kind, str) and kind in _NEMOTRON_LAYERS for kind in kinds):
        says = f"layers_block_type must be a list of {', '.join(dict.fromkeys(_NEMOTRON_LAYERS.values()))}"
        raise InvalidInput(f"{says}, one for each layer, or hybrid_override_pattern their letters (M, *, -, E)", field="layers_block_type")
    return tuple(_NEMOTRON_LAYERS[kind] for kind in kinds)


def check_routing(routing: Array, tokens: int, shape: RoutingShape | None, field: str) -> None:
    """Refuse what does not say for every token where each sparse layer sends it."""
    if shape is None:
        raise InvalidInput(f"`{field}`: this model has no experts to route to, leave it out", field=field)
    expected = (tokens, len(shape.sparse_layers), shape.top_k)
    if routing.dtype == "float32" or routing.shape != expected:
        raise InvalidInput(f"`{field}` is {routing.dtype}{list(routing.shape)}, expected integers {list(expected)}", field=field)
    chosen = np.sort(routing.numpy(), axis=-1)
    free = (chosen == -1).all(-1)
    if (chosen[~free] < 0).any() or (chosen >= shape.experts).any():
        raise InvalidInput(f"`{field}` names experts from 0 to {shape.experts - 1}, or -1 for all of a layer", field=field)
    if (chosen[~free][:, 1:] == chosen[~free][:, :-1]).any():
        raise InvalidInput(f"`{field}` sends a token to one expert twice in one layer", field=field)
