"""Every tensor of a saved model: its Hugging Face name, its shape, and the place of ours that it fills. No torch: the supervisor reads it too.

Our parameters keep their roles, not their files: rows of `qkv` are queries, then keys, then values (or the latents that these come from); rows of
`gate_up` are gate, then up.
"""

from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple

from bloomery.models.config import UNGATED, DecoderConfig, ExpertsConfig, GatedDeltaConfig, LatentConfig, MambaConfig, PerLayerConfig


class Place(NamedTuple):
    """The rows of one of the decoder's tensors that a stored tensor fills, of one expert where there are experts."""

    parameter: str
    shape: tuple[int, ...]
    """Of the stored tensor."""
    rows: slice = slice(None)
    expert: int | None = None
    in_float32: bool = False
    """Whatever dtype the model is computed in."""


Stored = tuple[str, Place]


class Projection(NamedTuple):
    """A matrix that an adapter can be on, one per expert where there are experts."""

    module: str
    """Where a directory has it in its layer: `self_attn`, `mlp`, `mlp.shared_experts` or `experts`; numbers of experts stand in between."""
    name: str
    parameter: str
    """Ours, in its layer."""
    outputs: int
    inputs: int
    first_row: int = 0
    experts: int = 0
    part: Literal["attn", "mlp"] = "mlp"
    """Which of the parts that a run can train it belongs to."""
    adapted: bool = True
    """Otherwise no adapter is on it."""


class _Norms(NamedTuple):
    """What a directory calls the norms of a layer, in the order in which they apply."""

    attention: str
    attention_out: str
    mlp: str
    mlp_out: str


_NORMS: Final = _Norms("input_layernorm", "", "post_attention_layernorm", "")
_SANDWICH: Final[Mapping[str, _Norms]] = {
    "glm4": _Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    "gemma4_text": _Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}


_WORDS: Final[Mapping[str, Mapping[str, str]]] = {
    "nemotron_h": {
        "model": "backbone",
        "embed_tokens": "embeddings",
        "model.norm.weight": "backbone.norm_f.weight",
        **dict.fromkeys(("self_attn", "linear_attn", "mlp"), "mixer"),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), "norm"),
    },
}
"""A family's own words for parts of names, or for whole ones."""


def stored_places(config: DecoderConfig) -> Iterator[Stored]:
    """Name and place of every tensor that a directory with this config holds, in the order of the layers."""
    for name, place in _stored(config):
        yield _called(config, name), place


def module_of(stored: str) -> str:
    """What `transformers` calls a stored tensor in its model: one family is stored under another name than it has there."""
    return stored.replace("backbone.", "model.", 1) if stored.startswith("backbone.") else stored


def _called(config: DecoderConfig, name: str) -> str:
    if (words := _WORDS.get(config.model_type)) is None:
        return name
    return words.get(name) or ".".join(words.get(word, word) for word in name.split("."))


def _stored(config: DecoderConfig) -> Iterator[Stored]:
    yield "model.embed_tokens.weight", Place("embedding", (config.vocab_size, config.hidden_size))
    if config.per_layer is not None:
        yield from _per_layer_inputs(config, config.per_layer)
    for layer in range(config.num_layers):
        for name, place in _layer(config, layer):
            yield f"model.layers.{layer}.{name}", place._replace(parameter=f"layers.{layer}.{place.parameter}")
    yield "model.norm.weight", Place("norm", (config.hidden_size,))
    if not config.tied_head:
        yield "lm_head.weight", Place("head", (config.vocab_size, config.hidden_size))


def projections(config: DecoderConfig, layer: int) -> Iterator[Projection]:
    """The matrices of a layer, in a fixed order: those of attention, or of a mixer with a state, first."""
    for projection in _projections(config, layer):
        yield projection._replace(module=_called(config, projection.module))


def _projections(config: DecoderConfig, layer: int) -> Iterator[Projection]:
    mixer = config.mixer(layer)
    if mixer == "recurrent" and isinstance(config.recurrent, MambaConfig):
        yield Projection("linear_attn", "in_proj", "qkv", config.recurrent.projection_width, config.hidden_size, part="attn")
        # PEFT refuses an adapter on this one: kernels of others read its weight past the module.
        yield Projection("linear_attn", "out_proj", "o", config.hidden_size, config.recurrent.inner, part="attn", adapted=False)
    elif mixer == "recurrent" and isinstance(config.recurrent, GatedDeltaConfig):
        yield from _delta_projections(config.recurrent, config.hidden_size)
    elif mixer == "attention":
        yield from _grouped(config, layer) if config.latent is None else _latent(config, config.latent)
    if config.has_mlp(layer):
        yield from _mlps(config, layer)


def _mlps(config: DecoderConfig, layer: int) -> Iterator[Projection]:
    experts, width, gated = config.experts, config.hidden_size, config.activation not in UNGATED
    sparse = experts is not None and layer in experts.sparse_layers
    if experts is None or not sparse or experts.beside_mlp:
        yield from _mlp("mlp", "mlp", width, config.inner(layer), fused=config.fused_gate_up, gated=gated)
    if experts is None or not sparse:
        return
    if experts.beside_mlp:
        yield from _mlp("experts", "parallel", width, experts.intermediate_size, experts=experts.num_experts, fused=True)
        return
    if experts.latent_size is not None:
        yield Projection("mlp", "fc1_latent_proj", "mlp.latent_in", experts.latent_size, width)
        yield Projection("mlp", "fc2_latent_proj", "mlp.latent_out", width, experts.latent_size)
    yield from _mlp("mlp", "mlp", experts.latent_size or width, experts.intermediate_size, experts=experts.num_experts, gated=gated)
    if experts.shared_size:
        shared = "mlp.shared_expert" if experts.shared_gate else "mlp.shared_experts"
        yield from _mlp(shared, "mlp.shared", width, experts.shared_size, gated=gated)


def _layer(config: DecoderConfig, layer: int) -> Iterator[Stored]:
    width, norms = (config.hidden_size,), _SANDWICH[config.model_type] if config.sandwich_norms else _NORMS
    mixer, has_mlp = config.mixer(layer), config.has_mlp(layer)
    if mixer != "none":
        yield f"{norms.attention}.weight", Place("attention_norm", width)
    if mixer == "recurrent" and isinstance(config.recurrent, MambaConfig):
        yield from _mamba(config.recurrent)
    if mixer == "recurrent" and isinstance(config.recurrent, GatedDeltaConfig):
        yield from _gated_delta(config.recurrent)
    for projection in _projections(config, layer):
        yield from _matrices(projection)
        if projection.parameter == "qkv" and config.qkv_bias:
            yield f"{projection.module}.{projection.name}.bias", Place("qkv_bias", (projection.outputs,), _rows(projection))
    if mixer == "attention":
        yield from _attention_norms(config, layer)
    if has_mlp:
        yield f"{norms.mlp}.weight", Place("mlp_norm", width)
    if config.sandwich_norms:
        yield f"{norms.attention_out}.weight", Place("attention_out_norm", width)
        yield f"{norms.mlp_out}.weight", Place("mlp_out_norm", width)
    if config.experts is not None and layer in config.experts.sparse_layers:
        yield from _router(config.experts, config.hidden_size)
    if config.per_layer is not None:
        yield "per_layer_input_gate.weight", Place("per_layer.gate", (config.per_layer.width, config.hidden_size))
        yield "per_layer_projection.weight", Place("per_layer.projection", (config.hidden_size, config.per_layer.width))
        yield "post_per_layer_input_norm.weight", Place("per_layer.norm", width)
    if config.layer_scale:
        yield "layer_scalar", Place("scale", (1,))


def _per_layer_inputs(config: DecoderConfig, per_layer: PerLayerConfig) -> Iterator[Stored]:
    width = config.num_layers * per_layer.width
    yield "model.embed_tokens_per_layer.weight", Place("per_layer.embedding", (per_layer.vocab_size, width))
    yield "model.per_layer_model_projection.weight", Place("per_layer.projection", (width, config.hidden_size))
    yield "model.per_layer_projection_norm.weight", Place("per_layer.norm", (per_layer.width,))


def _router(experts: ExpertsConfig, width: int) -> Iterator[Stored]:
    count = experts.num_experts
    if experts.beside_mlp:
        yield "router.proj.weight", Place("parallel.router", (count, width))
        yield "router.scale", Place("parallel.router_scale", (width,))
        yield "router.per_expert_scale", Place("parallel.expert_scale", (count,))
        yield "pre_feedforward_layernorm_2.weight", Place("parallel.norm", (width,))
        yield "post_feedforward_layernorm_1.weight", Place("parallel.dense_out_norm", (width,))
        yield "post_feedforward_layernorm_2.weight", Place("parallel.out_norm", (width,))
        return
    yield "mlp.gate.weight", Place("mlp.router", (count, width))
    if experts.shared_gate:
        yield "mlp.shared_expert_gate.weight", Place("mlp.shared_gate", (1, width))
    if experts.scoring == "sigmoid":
        yield "mlp.gate.e_score_correction_bias", Place("mlp.choice_bias", (count,), in_float32=True)


def _mamba(mamba: MambaConfig) -> Iterator[Stored]:
    yield "linear_attn.conv1d.weight", Place("recurrent.conv", (mamba.channels, 1, mamba.conv_width))
    if mamba.conv_bias:
        yield "linear_attn.conv1d.bias", Place("recurrent.conv_bias", (mamba.channels,))
    yield "linear_attn.A_log", Place("recurrent.log_rate", (mamba.heads,))
    yield "linear_attn.D", Place("recurrent.skip", (mamba.heads,))
    yield "linear_attn.dt_bias", Place("recurrent.step_bias", (mamba.heads,))
    yield "linear_attn.norm.weight", Place("recurrent.norm", (mamba.inner,))


def _delta_projections(delta: GatedDeltaConfig, width: int) -> Iterator[Projection]:
    yield Projection("linear_attn", "in_proj_qkv", "qkv", delta.channels, width, part="attn")
    yield Projection("linear_attn", "in_proj_b", "qkv", delta.heads, width, delta.channels, part="attn")
    yield Projection("linear_attn", "in_proj_a", "qkv", delta.heads, width, delta.channels + delta.heads, part="attn")
    yield Projection("linear_attn", "in_proj_z", "qkv", delta.inner, width, delta.row_width, part="attn")
    yield Projection("linear_attn", "out_proj", "o", width, delta.inner, part="attn")


def _gated_delta(delta: GatedDeltaConfig) -> Iterator[Stored]:
    yield "linear_attn.conv1d.weight", Place("recurrent.conv", (delta.channels, 1, delta.conv_width))
    yield "linear_attn.A_log", Place("recurrent.log_rate", (delta.heads,))
    yield "linear_attn.dt_bias", Place("recurrent.step_bias", (delta.heads,))
    yield "linear_attn.norm.weight", Place("recurrent.norm", (delta.value_dim,))


def _matrices(projection: Projection) -> Iterator[Stored]:
    place = Place(projection.parameter, (projection.outputs, projection.inputs), _rows(projection))
    if projection.module == "experts":
        # All of them in one tensor.
        yield f"experts.{projection.name}", place._replace(shape=(projection.experts, *place.shape), rows=slice(None))
        return
    if not projection.experts:
        yield f"{projection.module}.{projection.name}.weight", place
    for expert in range(projection.experts):
        yield f"{projection.module}.experts.{expert}.{projection.name}.weight", place._replace(expert=expert)


def _rows(projection: Projection) -> slice:
    return slice(projection.first_row, projection.first_row + projection.outputs)


def _attention_norms(config: DecoderConfig, layer: int) -> Iterator[Stored]:
    if config.qk_norm:
        head = (config.heads(layer).head_dim,)
        yield "self_attn.q_norm.weight", Place("q_norm", head)
        if config.heads(layer).source is None:
            yield "self_attn.k_norm.weight", Place("k_norm", head)
    if config.latent is not None:
        yield "self_attn.kv_a_layernorm.weight", Place("latent.kv_norm", (config.latent.key_rank,))
        if config.latent.query_rank is not None:
            yield "self_attn.q_a_layernorm.weight", Place("latent.q_norm", (config.latent.query_rank,))


def _grouped(config: DecoderConfig, layer: int) -> Iterator[Projection]:
    kv_heads, head_dim, own_values, source = config.heads(layer)
    queries, keys, width = config.num_heads * head_dim, kv_heads * head_dim, config.hidden_size
    gated = queries * (1 + config.attention_gate)
    yield Projection("self_attn", "q_proj", "qkv", gated, width, part="attn")
    if source is None:
        yield Projection("self_attn", "k_proj", "qkv", keys, width, gated, part="attn")
    if source is None and own_values:
        yield Projection("self_attn", "v_proj", "qkv", keys, width, gated + keys, part="attn")
    yield Projection("self_attn", "o_proj", "o", width, queries, part="attn")


def _latent(config: DecoderConfig, latent: LatentConfig) -> Iterator[Projection]:
    heads, width, rank = config.num_heads, config.hidden_size, latent.query_rank
    queries = heads * (latent.plain_dim + latent.rope_dim)
    first, shared = queries if rank is None else rank, latent.key_rank + latent.rope_dim
    if rank is None:
        yield Projection("self_attn", "q_proj", "qkv", queries, width, part="attn")
    else:
        yield Projection("self_attn", "q_a_proj", "qkv", rank, width, part="attn")
        yield Projection("self_attn", "q_b_proj", "latent.q", queries, rank, part="attn")
    yield Projection("self_attn", "kv_a_proj_with_mqa", "qkv", shared, width, first, part="attn")
    yield Projection("self_attn", "kv_b_proj", "latent.kv", heads * (latent.plain_dim + latent.value_dim), latent.key_rank, part="attn")
    yield Projection("self_attn", "o_proj", "o", width, heads * latent.value_dim, part="attn")


def _mlp(module: str, ours: str, width: int, inner: int, *, experts: int = 0, fused: bool = False, gated: bool = True) -> Iterator[Projection]:
    if not gated:
        yield Projection(module, "up_proj", f"{ours}.gate_up", inner, width, experts=experts)
    elif fused:
        yield Projection(module, "gate_up_proj", f"{ours}.gate_up", 2 * inner, width, experts=experts)
    else:
        yield Projection(module, "gate_proj", f"{ours}.gate_up", inner, width, experts=experts)
        yield Projection(module, "up_proj", f"{ours}.gate_up", inner, width, inner, experts)
    yield Projection(module, "down_proj", f"{ours}.down", width, inner, experts=experts)
