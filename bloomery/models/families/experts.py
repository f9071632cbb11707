"""Mixtures of experts whose router is a softmax (Qwen), or scores each expert by itself (DeepSeek and those after it)."""

from bloomery.models.config import ExpertsConfig
from bloomery.models.families.family import Raw
from bloomery.models.families.fields import check_sizes
from bloomery.types.errors import InvalidInput


def softmax_experts(raw: Raw) -> ExpertsConfig | None:
    """None where the config has none, or all layers are dense."""
    name = "num_experts" if raw.get("num_experts") else "num_local_experts"
    if not raw.get(name) or not (sparse_layers := _sparse_layers(raw)):
        return None
    check_top_k(raw, "num_experts_per_tok", name)
    check_sizes(raw, "moe_intermediate_size")
    return ExpertsConfig(
        num_experts=raw[name],
        top_k=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        normalise_top_k=raw.get("norm_topk_prob", False),
        sparse_layers=sparse_layers,
    )


def sigmoid_experts(raw: Raw) -> ExpertsConfig | None:
    """None where all layers are dense."""
    check_sizes(raw, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
    check_sizes(raw, *(name for name in ("n_group", "topk_group") if name in raw))
    if not (sparse_layers := _sparse_layers(raw)):
        return None
    experts, top_k, groups, kept = raw["n_routed_experts"], raw["num_experts_per_tok"], raw.get("n_group", 1), raw.get("topk_group", 1)
    in_group = experts // groups
    if experts % groups or not 1 <= kept <= groups or top_k > kept * in_group or (groups > 1 and in_group < 2):
        says = f"{experts} experts in n_group {groups}, of which topk_group {kept} hold num_experts_per_tok {top_k}"
        raise InvalidInput(f"{says}: every group needs as many, at least two, and the chosen groups must hold them", field="n_group")
    return ExpertsConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=raw["moe_intermediate_size"],
        normalise_top_k=raw["norm_topk_prob"],
        sparse_layers=sparse_layers,
        scoring="sigmoid",
        groups=groups,
        groups_kept=kept,
        scale=float(raw.get("routed_scaling_factor", 1.0)),
        shared_size=raw["moe_intermediate_size"] * raw["n_shared_experts"],
    )


def check_top_k(raw: Raw, top_k: str, experts: str) -> None:
    """Refuse a number of experts per token, of the field `top_k`, that the number in the field `experts` does not reach."""
    check_sizes(raw, experts, top_k)
    if raw[top_k] > raw[experts]:
        raise InvalidInput(f"{top_k} is {raw[top_k]} of {raw[experts]} experts", field=top_k)


def _sparse_layers(raw: Raw) -> tuple[int, ...]:
    """Qwen counts steps and names dense layers, GLM and DeepSeek begin with dense ones, or say it of every layer."""
    _check_dense_layers(raw)
    layers, kinds = range(raw["num_hidden_layers"]), raw.get("mlp_layer_types")
    if kinds is not None:
        return tuple(layer for layer in layers if kinds[layer] == "sparse")
    first, step, dense = raw.get("first_k_dense_replace", 0), raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers", ())
    return tuple(layer for layer in layers if layer >= first and layer not in dense and (layer + 1) % step == 0)


def _check_dense_layers(raw: Raw) -> None:
    check_sizes(raw, *(("decoder_sparse_step",) if "decoder_sparse_step" in raw else ()))
    layers, first, kinds = raw["num_hidden_layers"], raw.get("first_k_dense_replace", 0), raw.get("mlp_layer_types")
    if not isinstance(first, int) or first < 0:
        raise InvalidInput(f"first_k_dense_replace is {first!r}: a number of layers is expected", field="first_k_dense_replace")
    if not isinstance(dense := raw.get("mlp_only_layers", []), list):
        raise InvalidInput(f"mlp_only_layers is {dense!r}: a list of layers is expected", field="mlp_only_layers")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds)):
        raise InvalidInput(f"mlp_layer_types must say dense or sparse for each of {layers} layers", field="mlp_layer_types")
