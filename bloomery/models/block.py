"""One layer of the decoder: a mixer, by which rows learn of those before them, and an MLP or experts, each behind a norm and added to the residual.

`make_block` chooses the class by the layer's mixer: grouped-query attention, latent attention, a state, or none.
Shapes: R packed rows, D hidden, H query heads, K key/value heads, E head dimension, O numbers that a mixer projects a row to, or mixes it to, P of a
layer's own input. Weights keep their roles, not their files: `load.py` fuses query, key and value into `qkv`, gate and up into `gate_up`.
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bloomery.models.adapters import AdapterRows, adapted_linear
from bloomery.models.attention import Attention
from bloomery.models.config import DecoderConfig, GatedDeltaConfig, LatentConfig, LayerHeads, MambaConfig, RecurrentConfig
from bloomery.models.experts import Experts, Routing
from bloomery.models.experts_beside_mlp import ExpertsBesideMlp
from bloomery.models.gated_delta import GatedDelta
from bloomery.models.latent_attention import LatentHeads, latent_rows
from bloomery.models.mamba import Mamba
from bloomery.models.mlp import Mlp
from bloomery.models.per_layer import PerLayerGate
from bloomery.models.pointwise import add, centred_norm, rms_norm, unit_norm
from bloomery.models.recurrent import Recurrence
from bloomery.models.rope import Rotation

Shared = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of the layers to which later ones attend."""


def make_block(config: DecoderConfig, layer: int, dtype: torch.dtype) -> "Block":
    """A layer of this model."""
    match config.mixer_config(layer):
        case None:
            return Block(config, layer, dtype)
        case LayerHeads():
            return GroupedBlock(config, layer, dtype)
        case LatentConfig():
            return LatentBlock(config, layer, dtype)
        case _:
            return RecurrentBlock(config, layer, dtype)


def norm(x: Tensor, weight: Tensor, config: DecoderConfig) -> Tensor:
    """The model's norm, over the last dimension."""
    return (centred_norm if config.centred_norms else rms_norm)(x, weight, config.norm_eps)


class Block(nn.Module):
    """A layer without a mixer, whose rows learn nothing of each other. The others are made from it."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.layer, self.name = config, layer, f"layers.{layer}"
        self.window, self.feed_forward = config.windows[layer], config.feed_forward(layer)
        # First: runs that train all parameters hold them in the order in which they are made here.
        self._add_mixer(dtype)
        self.mlp_norm = None if self.feed_forward == "none" else _weight(config.hidden_size, dtype=dtype)
        self.mlp = _mlp(config, layer, dtype)
        self.parallel = _parallel(config, layer, dtype)
        self.mlp_out_norm = _weight(config.hidden_size, dtype=dtype) if config.sandwich_norms else None
        self.per_layer = None if config.per_layer is None else PerLayerGate(config, config.per_layer, dtype)
        self.scale: Tensor | None
        self.register_buffer("scale", torch.empty(1, dtype=dtype) if config.layer_scale else None)

    def forward(
        self,
        x_RD: Tensor,
        rotation: Rotation,
        attention: Attention,
        adapters: AdapterRows,
        routing: Routing,
        shared: Shared,
        extra_RP: Tensor | None,
    ) -> Tensor:
        """One block; `extra_RP` is its per-layer input, of models that have these."""
        return self.finish(x_RD, self.mix(x_RD, rotation, attention, adapters, shared), adapters, routing, extra_RP)

    def mix(self, x_RD: Tensor, rotation: Rotation, attention: Attention, adapters: AdapterRows, shared: Shared) -> Tensor:
        """What the mixer gathers for every row [R, O], before the output projection; nothing where there is none."""
        return x_RD[:, :0]

    def finish(self, x_RD: Tensor, mixed_RO: Tensor, adapters: AdapterRows, routing: Routing, extra_RP: Tensor | None) -> Tensor:
        """What comes behind the mixer, row by row: its output projection, then the MLP or experts."""
        if self.mlp is not None and self.mlp_norm is not None:
            normed_RD = norm(x_RD, self.mlp_norm, self.config)
            routed = (routing,) if self.feed_forward == "experts" else ()
            mlp_RD = self.mlp(normed_RD, f"{self.name}.mlp", adapters, *routed)
            if self.parallel is not None:
                mlp_RD = self.parallel.add(mlp_RD, x_RD, f"{self.name}.parallel", adapters, routing)
            x_RD = self._added(x_RD, mlp_RD, self.mlp_out_norm)
        if self.per_layer is not None:
            x_RD = add(x_RD, self.per_layer(x_RD, extra_RP))
        return x_RD if self.scale is None else x_RD * self.scale

    def _add_mixer(self, dtype: torch.dtype) -> None:
        """Make what the mixer has."""

    def _added(self, x_RD: Tensor, update_RD: Tensor, out_norm: Tensor | None) -> Tensor:
        return add(x_RD, update_RD if out_norm is None else norm(update_RD, out_norm, self.config))


class MixingBlock(Block):
    """A layer with a mixer between two projections, `qkv` and `o`."""

    place: int
    """Which of the layers with a state, or of those with keys and values, it is, or attends to."""

    def finish(self, x_RD: Tensor, mixed_RO: Tensor, adapters: AdapterRows, routing: Routing, extra_RP: Tensor | None) -> Tensor:
        """With the mixer's output projection before the rest."""
        x_RD = self._added(x_RD, adapted_linear(mixed_RO, self.o, f"{self.name}.o", adapters), self.attention_out_norm)
        return super().finish(x_RD, mixed_RO, adapters, routing, extra_RP)

    def _add_input(self, outputs: int, dtype: torch.dtype) -> None:
        self.attention_norm = _weight(self.config.hidden_size, dtype=dtype)
        self.qkv = _weight(outputs, self.config.hidden_size, dtype=dtype)

    def _add_output(self, inputs: int, dtype: torch.dtype) -> None:
        self.o = _weight(self.config.hidden_size, inputs, dtype=dtype)
        self.attention_out_norm = _weight(self.config.hidden_size, dtype=dtype) if self.config.sandwich_norms else None

    def _projected(self, x_RD: Tensor, adapters: AdapterRows) -> Tensor:
        return adapted_linear(norm(x_RD, self.attention_norm, self.config), self.qkv, f"{self.name}.qkv", adapters)


class RecurrentBlock(MixingBlock):
    """A layer with a state."""

    def mix(self, x_RD: Tensor, rotation: Rotation, attention: Attention, adapters: AdapterRows, shared: Shared) -> Tensor:
        """What rows read of the state, gated."""
        projected_RO = self._projected(x_RD, adapters)
        read_RI = attention.recur(self.place, self.recurrent, self.recurrent.scan_inputs(projected_RO))
        return self.recurrent.gated(read_RI, projected_RO)

    def _add_mixer(self, dtype: torch.dtype) -> None:
        recurrent = self.config.recurrent
        assert recurrent is not None
        self.place = self.config.state_layers.index(self.layer)
        self._add_input(recurrent.projection_width, dtype)
        self.recurrent = _recurrence(recurrent, self.config.norm_eps, dtype)
        self._add_output(recurrent.inner, dtype)


class Heads(NamedTuple):
    """What attention takes: queries [R, H, E], keys and values [R, K, E]."""

    q_RHE: Tensor
    k_RKE: Tensor
    v_RKE: Tensor
    gate_RO: Tensor | None = None
    """By whose sigmoid what the queries gather is multiplied."""


class AttentionBlock(MixingBlock, ABC):
    """A layer that attends."""

    value_dim: int
    """Dimensions of a value that go on to the output projection."""

    def mix(self, x_RD: Tensor, rotation: Rotation, attention: Attention, adapters: AdapterRows, shared: Shared) -> Tensor:
        """What queries gather."""
        q_RHE, k_RKE, v_RKE, gate_RO = self._heads(self._projected(x_RD, adapters), rotation, adapters, shared)
        if (scale := self.config.attention_scale) is not None:
            # Attention divides by the root of the head dimension.
            q_RHE = q_RHE * (scale * math.sqrt(q_RHE.shape[-1]))
        mixed_RHE = attention(self.place, q_RHE, k_RKE, v_RKE, self.window)
        mixed_RO = mixed_RHE[..., : self.value_dim].flatten(1)
        return mixed_RO if gate_RO is None else mixed_RO * gate_RO.sigmoid()

    @abstractmethod
    def _heads(self, projected_RO: Tensor, rotation: Rotation, adapters: AdapterRows, shared: Shared) -> Heads:
        """Of the projected rows."""

    @property
    def _kv_place(self) -> int:
        source = self.config.heads(self.layer).source
        return self.config.kv_layers.index(self.layer if source is None else source)


class GroupedBlock(AttentionBlock):
    """A layer with grouped-query attention."""

    def _add_mixer(self, dtype: torch.dtype) -> None:
        config, heads = self.config, self.config.heads(self.layer)
        self.heads, self.value_dim, self.place = heads, heads.head_dim, self._kv_place
        rows = sum(self._projected_heads()) * heads.head_dim
        self._add_input(rows, dtype)
        self.qkv_bias = _weight(rows, dtype=dtype) if config.qkv_bias else None
        self.q_norm = _weight(heads.head_dim, dtype=dtype) if config.qk_norm else None
        self.k_norm = _weight(heads.head_dim, dtype=dtype) if config.qk_norm and heads.source is None else None
        self._add_output(config.num_heads * heads.head_dim, dtype)

    def _projected_heads(self) -> list[int]:
        """How many heads of queries, each with that of its gate behind it, of keys and of values a row is projected to."""
        config, heads = self.config, self.heads
        return [config.num_heads * (1 + config.attention_gate), *([] if heads.source is not None else [heads.kv_heads] * (1 + heads.own_values))]

    def _heads(self, projected_RO: Tensor, rotation: Rotation, adapters: AdapterRows, shared: Shared) -> Heads:
        """Split, normed and turned."""
        config, heads = self.config, self.heads
        if self.qkv_bias is not None:
            projected_RO = add(projected_RO, self.qkv_bias)
        q_RHE, *keys_and_values = projected_RO.unflatten(1, (-1, heads.head_dim)).split(self._projected_heads(), dim=1)
        gate_RO = None
        if config.attention_gate:
            q_RHE, gate_RO = q_RHE[:, ::2], q_RHE[:, 1::2].flatten(1)
        q_RHE = rotation.queries(q_RHE if self.q_norm is None else norm(q_RHE, self.q_norm, config))
        if heads.source is not None:
            return Heads(q_RHE, *shared[heads.source], gate_RO)
        k_RKE, v_RKE = keys_and_values[0], keys_and_values[-1]
        k_RKE = rotation.keys(k_RKE if self.k_norm is None else norm(k_RKE, self.k_norm, config))
        if config.value_norm:
            v_RKE = unit_norm(v_RKE, config.norm_eps)
        if self.layer in config.kv_sources:
            shared[self.layer] = k_RKE, v_RKE
        return Heads(q_RHE, k_RKE, v_RKE, gate_RO)


class LatentBlock(AttentionBlock):
    """A layer with multi-head latent attention."""

    def _add_mixer(self, dtype: torch.dtype) -> None:
        config, latent = self.config, self.config.latent
        assert latent is not None
        self.value_dim, self.place = latent.value_dim, self._kv_place
        self._add_input(latent_rows(config, latent), dtype)
        self.latent = LatentHeads(latent, config.num_heads, dtype)
        self._add_output(config.num_heads * latent.value_dim, dtype)

    def _heads(self, projected_RO: Tensor, rotation: Rotation, adapters: AdapterRows, shared: Shared) -> Heads:
        """Expanded from the latents."""
        return Heads(*self.latent(projected_RO, f"{self.name}.latent", rotation, adapters))


def _recurrence(recurrent: RecurrentConfig, eps: float, dtype: torch.dtype) -> Recurrence:
    match recurrent:
        case GatedDeltaConfig():
            return GatedDelta(recurrent, eps, dtype)
        case MambaConfig():
            return Mamba(recurrent, eps, dtype)


def _mlp(config: DecoderConfig, layer: int, dtype: torch.dtype) -> nn.Module | None:
    kind, experts = config.feed_forward(layer), config.experts
    if kind == "experts" and experts is not None:
        return Experts(experts, config.hidden_size, config.activation, dtype)
    return None if kind == "none" else Mlp(config.hidden_size, config.inner(layer), config.activation, dtype)


def _parallel(config: DecoderConfig, layer: int, dtype: torch.dtype) -> ExpertsBesideMlp | None:
    if config.feed_forward(layer) != "both" or config.experts is None:
        return None
    return ExpertsBesideMlp(config.experts, config.hidden_size, config.activation, config.norm_eps, dtype)


def _weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype))
