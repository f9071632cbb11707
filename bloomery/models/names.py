"""Every tensor of a saved model: its Hugging Face name, its shape, and the place of ours that it fills. No torch: the supervisor reads it too.

Our parameters keep their roles, not their files: rows of `qkv` are queries, then keys, then values; rows of `gate_up` are gate, then up.
"""

from collections.abc import Iterator
from typing import NamedTuple

from bloomery.models.config import DecoderConfig


class Place(NamedTuple):
    """The rows of one of the decoder's parameters that a stored tensor fills, of one expert where there are experts."""

    parameter: str
    shape: tuple[int, ...]
    """Of the stored tensor."""
    rows: slice = slice(None)
    expert: int | None = None


Stored = tuple[str, Place]


def stored_places(config: DecoderConfig) -> Iterator[Stored]:
    """Name and place of every tensor that a directory with this config holds, in the order of the layers."""
    yield "model.embed_tokens.weight", Place("embedding", (config.vocab_size, config.hidden_size))
    for layer in range(config.num_layers):
        yield from _layer(config, layer)
    yield "model.norm.weight", Place("norm", (config.hidden_size,))
    if not config.tied_head:
        yield "lm_head.weight", Place("head", (config.vocab_size, config.hidden_size))


def _layer(config: DecoderConfig, layer: int) -> Iterator[Stored]:
    stored, ours, width = f"model.layers.{layer}", f"layers.{layer}", config.hidden_size
    yield f"{stored}.input_layernorm.weight", Place(f"{ours}.attention_norm", (width,))
    yield from _attention(config, f"{stored}.self_attn", ours)
    yield f"{stored}.post_attention_layernorm.weight", Place(f"{ours}.mlp_norm", (width,))
    if config.experts is None or layer not in config.experts.sparse_layers:
        yield from _mlp(f"{stored}.mlp", f"{ours}.mlp", width, config.intermediate_size)
        return
    yield f"{stored}.mlp.gate.weight", Place(f"{ours}.mlp.router", (config.experts.num_experts, width))
    for expert in range(config.experts.num_experts):
        yield from _mlp(f"{stored}.mlp.experts.{expert}", f"{ours}.mlp", width, config.experts.intermediate_size, expert)


def _attention(config: DecoderConfig, stored: str, ours: str) -> Iterator[Stored]:
    queries, keys, width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.hidden_size
    yield f"{stored}.q_proj.weight", Place(f"{ours}.qkv", (queries, width), slice(queries))
    yield f"{stored}.k_proj.weight", Place(f"{ours}.qkv", (keys, width), slice(queries, queries + keys))
    yield f"{stored}.v_proj.weight", Place(f"{ours}.qkv", (keys, width), slice(queries + keys, queries + 2 * keys))
    yield f"{stored}.o_proj.weight", Place(f"{ours}.o", (width, queries))
    if config.qk_norm:
        yield f"{stored}.q_norm.weight", Place(f"{ours}.q_norm", (config.head_dim,))
        yield f"{stored}.k_norm.weight", Place(f"{ours}.k_norm", (config.head_dim,))


def _mlp(stored: str, ours: str, width: int, inner: int, expert: int | None = None) -> Iterator[Stored]:
    yield f"{stored}.gate_proj.weight", Place(f"{ours}.gate_up", (inner, width), slice(inner), expert)
    yield f"{stored}.up_proj.weight", Place(f"{ours}.gate_up", (inner, width), slice(inner, 2 * inner), expert)
    yield f"{stored}.down_proj.weight", Place(f"{ours}.down", (width, inner), expert=expert)
