"""`DecoderConfig`: what the decoder core must know about a model. `families.py` reads it from a Hugging Face `config.json`. No torch: the
supervisor reads it."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from bloomery.types.routing import RoutingShape


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding: `kind` is one of default, linear, llama3, yarn, proportional; `scaling` holds that kind's own numbers."""

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
    """Per layer, where layers differ; those without keys and values of their own are the last."""
    layer_inner: tuple[int, ...] = ()
    """Per layer, the intermediate size, where layers differ; `intermediate_size` is the largest."""
    per_layer: PerLayerConfig | None = None
    full_rope: RopeConfig | None = None
    """Of layers without a window, where theirs is another one."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
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
    passed_over_layers: int = 0
    """Layers for predicting further tokens, which a directory may hold behind the model's own; they take no part."""

    @property
    def routing(self) -> RoutingShape | None:
        """Of a mixture of experts."""
        experts = self.experts
        return None if experts is None else RoutingShape(experts.sparse_layers, experts.top_k, experts.num_experts)

    @property
    def kv_layers(self) -> int:
        """How many layers have keys and values of their own, from the first on."""
        return self.num_layers - sum(heads.source is not None for heads in self.layer_heads)

    @property
    def kv_sources(self) -> frozenset[int]:
        """Layers whose keys and values later ones attend to."""
        return frozenset(heads.source for heads in self.layer_heads if heads.source is not None)

    def heads(self, layer: int) -> LayerHeads:
        """Keys and values of a layer."""
        return self.layer_heads[layer] if self.layer_heads else LayerHeads(self.num_kv_heads, self.head_dim)

    def inner(self, layer: int) -> int:
        """Intermediate size of a layer's dense MLP."""
        return self.layer_inner[layer] if self.layer_inner else self.intermediate_size
