"""Llama, Ministral and Qwen3: grouped-query attention, some with a window, and a gated MLP or experts."""

from typing import Any, Final

from bloomery.models.families.experts import softmax_experts
from bloomery.models.families.family import Family, Raw
from bloomery.models.families.fields import rope, windows


def _llama(raw: Raw, head_dim: int) -> dict[str, Any]:
    return {"rope": rope(raw)}


def _ministral(raw: Raw, head_dim: int) -> dict[str, Any]:
    return _llama(raw, head_dim) | {"windows": _windows(raw, first_sliding=0)}


def _qwen3(raw: Raw, head_dim: int) -> dict[str, Any]:
    return _llama(raw, head_dim) | {"windows": _windows(raw, first_sliding=raw.get("max_window_layers", 28)), "qk_norm": True}


def _qwen3_moe(raw: Raw, head_dim: int) -> dict[str, Any]:
    return _qwen3(raw, head_dim) | {"experts": softmax_experts(raw)}


def _windows(raw: Raw, first_sliding: int) -> tuple[int | None, ...]:
    """Where a file does not say what each layer is, those from `first_sliding` on have a window."""
    layers = range(raw["num_hidden_layers"])
    return windows(raw, raw.get("layer_types") or ["sliding_attention" if layer >= first_sliding else "full_attention" for layer in layers])


LLAMA: Final = Family(read=_llama)
MINISTRAL: Final = Family(read=_ministral)
QWEN3: Final = Family(read=_qwen3)
QWEN3_MOE: Final = Family(read=_qwen3_moe)
