"""`DecoderConfig`: what the decoder core must know about a model. `families` reads it from a Hugging Face `config.json`. No torch: the supervisor
and the api read it too."""

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from bloomery.types.routing import RoutingShape

UNGATED: Final = ("relu_squared",)
"""Activations of MLPs and experts that have no gate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding: `kind` is one of none, default, linear, llama3, yarn, proportional; `scaling` holds that kind's own numbers."""

    kind: str
    theta: float
    scaling: dict[str, Any]
    query_beta: float = 0.0
    """Ministral 3 lengthens queries by `1 + beta * log(1 + floor(position / original context))`; 0 means it does not."""
    rotary_dim: int | None = None
    """Leading dimensions of a head that turn; None means all."""
    interleaved: bool = False
    """A pair that turns together is two neighbouring dimensions, not one of each half."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """Mixture of experts in the layers `sparse_layers`."""

    num_experts: int
    top_k: int
    intermediate_size: int
    normalise_top_k: bool
    sparse_layers: tuple[int, ...]
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """With sigmoid, scores are independent, computed in float32, and a stored bias takes part in the choice but not in the weights."""
    groups: int = 1
    groups_kept: int = 1
    """Experts stand in `groups` groups; a token goes to experts of the best `groups_kept` alone."""
    scale: float = 1.0
    """Of the weights, after they are normalised."""
    shared_size: int = 0
    """Intermediate size of the experts that every token goes to; 0 means there are none."""
    beside_mlp: bool = False
    """Sparse layers have their dense MLP too, and both answers are added."""
    shared_gate: bool = False
    """What the shared experts answer is multiplied by the sigmoid of one number per row."""
    latent_size: int | None = None
    """Experts, but not the shared ones, work on a projection of the row to this size; None means on the row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig:
    """Multi-head latent attention: queries, keys and values are expanded from latents of low rank."""

    query_rank: int | None
    """None: queries are projected directly."""
    key_rank: int
    """Of the latent from which keys and values come."""
    plain_dim: int
    """Dimensions of a query and key without position."""
    rope_dim: int
    """Dimensions with position, behind the others; the key's are shared by all heads."""
    value_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaConfig:
    """A gated delta net in the layers that have a state instead of keys and values."""

    key_heads: int
    """Of queries and keys; each serves `heads // key_heads` heads of values."""
    heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    chunk_rows: int = 64
    """How a sequence is cut, in training and in sampling alike: another number gives other bits, and the same model."""

    @property
    def inner(self) -> int:
        """Numbers per row that all heads have together."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.inner

    @property
    def row_width(self) -> int:
        """Numbers that later rows of a chunk must know of a row: beside the channels how much each head writes, and how much it forgets."""
        return self.channels + 2 * self.heads

    @property
    def projection_width(self) -> int:
        """Numbers that a row is projected to: those, and the gate."""
        return self.row_width + self.inner

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of one layer and sequence."""
        return self.key_heads, self.key_dim, self.inner // self.key_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaConfig:
    """Mamba-2 in the layers that have a state instead of keys and values."""

    heads: int
    head_dim: int
    state_size: int
    """Dimensions of what writes to the state and of what reads from it."""
    groups: int
    """Heads of a group write and read with the same vectors, and their outputs are normed together."""
    conv_width: int
    conv_bias: bool
    least_step: float
    """Smaller steps count as this one."""
    chunk_rows: int = 64
    """As of `GatedDeltaConfig`, whatever a config.json says of the kernels that others use."""

    @property
    def inner(self) -> int:
        """Numbers per row that all heads have together."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: inputs of all heads, and what writes to and reads from the state."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def row_width(self) -> int:
        """Numbers that later rows of a chunk must know of a row: beside the channels the step of each head."""
        return self.channels + self.heads

    @property
    def projection_width(self) -> int:
        """Numbers that a row is projected to: those, and the gate."""
        return self.row_width + self.inner

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of one layer and sequence."""
        return self.groups, self.state_size, self.inner // self.groups


RecurrentConfig = GatedDeltaConfig | MambaConfig
Mixer = Literal["attention", "recurrent", "none"]
"""How the rows of a layer learn of those before them; in a layer with "none" they do not."""
FeedForward = Literal["mlp", "experts", "both", "none"]
"""What a layer computes row by row; with "both" a dense MLP and experts read the same residual."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PerLayerConfig:
    """A small input of its own that every layer gets for each token, beside the residual."""

    vocab_size: int
    width: int


class LayerHeads(NamedTuple):
    """Keys and values of one layer."""

    kv_heads: int
    head_dim: int
    own_values: bool = True
    """Otherwise the projected keys are the values too."""
    source: int | None = None
    """The layer before it whose keys and values this one attends to, having none of its own."""


MixerConfig = LayerHeads | LatentConfig | RecurrentConfig
"""Of grouped-query attention, of latent attention, or of a mixer with a state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """One config-driven block: grouped-query or latent attention, RMSNorm, optional query and key norm, a gated MLP or top-k experts."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Of the layer that has most."""
    head_dim: int
    """Of queries and keys, and what values are padded to, in the layer with the widest."""
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
    latent: LatentConfig | None = None
    layer_heads: tuple[LayerHeads, ...] = ()
    """Per layer, where layers differ."""
    layer_inner: tuple[int, ...] = ()
    """Per layer, the intermediate size, where layers differ; `intermediate_size` is the largest."""
    per_layer: PerLayerConfig | None = None
    full_rope: RopeConfig | None = None
    """Of layers without a window, where theirs is another one."""
    activation: Literal["silu", "gelu_tanh", "relu_squared"] = "silu"
    """Of the gate, or, if `UNGATED`, of MLPs and experts that have none."""
    qkv_bias: bool = False
    fused_gate_up: bool = False
    """A directory holds gate and up of a dense MLP as one tensor."""
    sandwich_norms: bool = False
    """Attention and MLP are normed before they are added to the residual, beside before they begin."""
    value_norm: bool = False
    """Values are normed too, without a weight."""
    layer_scale: bool = False
    """Each layer's result is multiplied by a stored number, which is not trained."""
    attention_scale: float | None = None
    """What products of query and key are multiplied by; None means by one over the root of the head dimension."""
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    """Logits are `cap * tanh(logits / cap)`."""
    attention_gate: bool = False
    """What a query gathers is multiplied by the sigmoid of a gate of as many dimensions, which is projected beside it."""
    centred_norms: bool = False
    """Norms weigh by one more than their stored weight, but for those of a mixer's own."""
    recurrent: RecurrentConfig | None = None
    mixers: tuple[Mixer, ...] = ()
    """Per layer, where not all attend."""
    mlps: tuple[bool, ...] = ()
    """Per layer, whether it has an MLP or experts, where not all have."""
    passed_over_layers: int = 0
    """Layers for predicting further tokens, which a directory may hold behind the model's own; they take no part."""

    @property
    def routing(self) -> RoutingShape | None:
        """Of a mixture of experts."""
        experts = self.experts
        # Experts beside an MLP have a factor each, which may be of either sign.
        return None if experts is None else RoutingShape(experts.sparse_layers, experts.top_k, experts.num_experts, signed_weights=experts.beside_mlp)

    @property
    def partly_dense(self) -> bool:
        """Whether a mixture of experts has dense MLPs, or experts that every token goes to, beside the others."""
        if self.experts is None:
            return False
        kinds = {self.feed_forward(layer) for layer in range(self.num_layers)}
        return "both" in kinds or ("experts" in kinds and ("mlp" in kinds or self.experts.shared_size > 0))

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers that have keys and values of their own."""
        return tuple(layer for layer in range(self.num_layers) if self.mixer(layer) == "attention" and self.heads(layer).source is None)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Layers that have a state."""
        return tuple(layer for layer in range(self.num_layers) if self.mixer(layer) == "recurrent")

    @property
    def kv_sources(self) -> frozenset[int]:
        """Layers whose keys and values later ones attend to."""
        return frozenset(heads.source for heads in self.layer_heads if heads.source is not None)

    def mixer(self, layer: int) -> Mixer:
        """How a layer's rows learn of those before them."""
        return self.mixers[layer] if self.mixers else "attention"

    def mixer_config(self, layer: int) -> MixerConfig | None:
        """What a layer's mixer is made of; None where there is none. Its type says which kind of mixer it is."""
        mixer = self.mixer(layer)
        if mixer == "attention":
            return self.heads(layer) if self.latent is None else self.latent
        return self.recurrent if mixer == "recurrent" else None

    def feed_forward(self, layer: int) -> FeedForward:
        """What a layer computes row by row."""
        if not self.has_mlp(layer):
            return "none"
        if self.experts is None or layer not in self.experts.sparse_layers:
            return "mlp"
        return "both" if self.experts.beside_mlp else "experts"

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP or experts."""
        return self.mlps[layer] if self.mlps else True

    def heads(self, layer: int) -> LayerHeads:
        """Keys and values of a layer."""
        return self.layer_heads[layer] if self.layer_heads else LayerHeads(self.num_kv_heads, self.head_dim)

    def inner(self, layer: int) -> int:
        """Intermediate size of a layer's dense MLP."""
        return self.layer_inner[layer] if self.layer_inner else self.intermediate_size
