"""Every tensor of a saved model: its Hugging Face name, its shape, and the place of ours that it fills. No torch: the supervisor reads it too.

Our parameters keep their roles, not their files: rows of `qkv` are queries, then keys, then values (or the latents that these come from); rows of
`gate_up` are gate, then up.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from bloomery.models.config import UNGATED, DecoderConfig, ExpertsConfig, GatedDeltaConfig, LatentConfig, LayerHeads, MambaConfig, PerLayerConfig
from bloomery.models.families import FAMILIES


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


def stored_places(config: DecoderConfig) -> Iterator[Stored]:
    """Name and place of every tensor that a directory with this config holds, in the order of the layers."""
    for name, place in _stored(config):
        yield _called(config, name), place


def module_of(stored: str) -> str:
    """What `transformers` calls a stored tensor in its model: one family is stored under another name than it has there."""
    return stored.replace("backbone.", "model.", 1) if stored.startswith("backbone.") else stored


def _called(config: DecoderConfig, name: str) -> str:
    words = FAMILIES[config.model_type].words
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
    yield from _mixer(config, layer).projections
    yield from _mlps(config, layer)


class _Mixer(NamedTuple):
    """What a layer's mixer has."""

    projections: tuple[Projection, ...] = ()
    between: tuple[Stored, ...] = ()
    """Tensors of a state, between the two projections."""
    norms: tuple[Stored, ...] = ()
    """Of queries, keys and latents."""


def _mixer(config: DecoderConfig, layer: int) -> _Mixer:
    match config.mixer_config(layer):
        case None:
            return _Mixer()
        case LayerHeads() as heads:
            return _Mixer(tuple(_grouped(config, heads)), norms=tuple(_grouped_norms(config, heads)))
        case LatentConfig() as latent:
            return _Mixer(tuple(_latent(config, latent)), norms=tuple(_latent_norms(latent)))
        case GatedDeltaConfig() as delta:
            return _Mixer(tuple(_delta_projections(delta, config.hidden_size)), between=tuple(_gated_delta(delta)))
        case MambaConfig() as mamba:
            return _Mixer(tuple(_mamba_projections(mamba, config.hidden_size)), between=tuple(_mamba(mamba)))


def _mlps(config: DecoderConfig, layer: int) -> Iterator[Projection]:
    kind, experts, width, gated = config.feed_forward(layer), config.experts, config.hidden_size, config.activation not in UNGATED
    if kind in ("mlp", "both"):
        yield from _mlp("mlp", "mlp", width, config.inner(layer), fused=config.fused_gate_up, gated=gated)
    if kind == "both" and experts is not None:
        yield from _mlp("experts", "parallel", width, experts.intermediate_size, experts=experts.num_experts, fused=True)
    if kind == "experts" and experts is not None:
        yield from _experts(experts, width, gated=gated)


def _experts(experts: ExpertsConfig, width: int, *, gated: bool) -> Iterator[Projection]:
    if experts.latent_size is not None:
        yield Projection("mlp", "fc1_latent_proj", "mlp.latent_in", experts.latent_size, width)
        yield Projection("mlp", "fc2_latent_proj", "mlp.latent_out", width, experts.latent_size)
    yield from _mlp("mlp", "mlp", experts.latent_size or width, experts.intermediate_size, experts=experts.num_experts, gated=gated)
    if experts.shared_size:
        shared = "mlp.shared_expert" if experts.shared_gate else "mlp.shared_experts"
        yield from _mlp(shared, "mlp.shared", width, experts.shared_size, gated=gated)


def _layer(config: DecoderConfig, layer: int) -> Iterator[Stored]:
    width, norms = (config.hidden_size,), FAMILIES[config.model_type].norm_names
    mixer, feed_forward = _mixer(config, layer), config.feed_forward(layer)
    if mixer.projections:
        yield f"{norms.attention}.weight", Place("attention_norm", width)
    yield from mixer.between
    for projection in _projections(config, layer):
        yield from _matrices(projection)
        if projection.parameter == "qkv" and config.qkv_bias:
            yield f"{projection.module}.{projection.name}.bias", Place("qkv_bias", (projection.outputs,), _rows(projection))
    yield from mixer.norms
    if feed_forward != "none":
        yield f"{norms.mlp}.weight", Place("mlp_norm", width)
    if config.sandwich_norms:
        yield f"{norms.attention_out}.weight", Place("attention_out_norm", width)
        yield f"{norms.mlp_out}.weight", Place("mlp_out_norm", width)
    if feed_forward in ("experts", "both") and config.experts is not None:
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


def _mamba_projections(mamba: MambaConfig, width: int) -> Iterator[Projection]:
    yield Projection("linear_attn", "in_proj", "qkv", mamba.projection_width, width, part="attn")
    # PEFT refuses an adapter on this one: kernels of others read its weight past the module.
    yield Projection("linear_attn", "out_proj", "o", width, mamba.inner, part="attn", adapted=False)


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


def _grouped(config: DecoderConfig, heads: LayerHeads) -> Iterator[Projection]:
    queries, keys, width = config.num_heads * heads.head_dim, heads.kv_heads * heads.head_dim, config.hidden_size
    gated = queries * (1 + config.attention_gate)
    yield Projection("self_attn", "q_proj", "qkv", gated, width, part="attn")
    if heads.source is None:
        yield Projection("self_attn", "k_proj", "qkv", keys, width, gated, part="attn")
    if heads.source is None and heads.own_values:
        yield Projection("self_attn", "v_proj", "qkv", keys, width, gated + keys, part="attn")
    yield Projection("self_attn", "o_proj", "o", width, queries, part="attn")


def _grouped_norms(config: DecoderConfig, heads: LayerHeads) -> Iterator[Stored]:
    if config.qk_norm:
        yield "self_attn.q_norm.weight", Place("q_norm", (heads.head_dim,))
    if config.qk_norm and heads.source is None:
        yield "self_attn.k_norm.weight", Place("k_norm", (heads.head_dim,))


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


def _latent_norms(latent: LatentConfig) -> Iterator[Stored]:
    yield "self_attn.kv_a_layernorm.weight", Place("latent.kv_norm", (latent.key_rank,))
    if latent.query_rank is not None:
        yield "self_attn.q_a_layernorm.weight", Place("latent.q_norm", (latent.query_rank,))


def _mlp(module: str, ours: str, width: int, inner: int, *, experts: int = 0, fused: bool = False, gated: bool = True) -> Iterator[Projection]:
    if not gated:
        yield Projection(module, "up_proj", f"{ours}.gate_up", inner, width, experts=experts)
    elif fused:
        yield Projection(module, "gate_up_proj", f"{ours}.gate_up", 2 * inner, width, experts=experts)
    else:
        yield Projection(module, "gate_proj", f"{ours}.gate_up", inner, width, experts=experts)
        yield Projection(module, "up_proj", f"{ours}.gate_up", inner, width, inner, experts)
    yield Projection(module, "down_proj", f"{ours}.down", width, inner, experts=experts)
