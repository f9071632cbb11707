"""The decoder core: one config-driven block for all families, over packed rows.

Shapes: R packed rows, D hidden, H query heads, K key/value heads, E head dimension, I intermediate. Weights keep their roles, not their files:
`load.py` fuses query, key and value into `qkv`, gate and up into `gate_up`.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.models.adapters import AdapterRows, adapted_linear
from bloomery.models.attention import Attention
from bloomery.models.config import DecoderConfig, LayerHeads
from bloomery.models.experts import Experts, Routing
from bloomery.models.latent_attention import LatentHeads, latent_rows
from bloomery.models.mlp import Mlp
from bloomery.models.parallel_experts import ParallelExperts
from bloomery.models.per_layer import PerLayerGate, PerLayerInputs
from bloomery.models.pointwise import rms_norm, unit_norm
from bloomery.models.rope import Rope, Rotation


class Trunk(NamedTuple):
    """Everything that rows tell each other: the residual `x_RD` and the last block's attention `mixed_RO`, before its output projection."""

    x_RD: Tensor
    mixed_RO: Tensor
    extra_RP: Tensor | None
    """The last block's per-layer input, of models that have these."""

    def rows(self, rows_C: Tensor) -> "Trunk":
        """Of these rows alone."""
        extra_RP = None if self.extra_RP is None else self.extra_RP.index_select(0, rows_C)
        return Trunk(self.x_RD.index_select(0, rows_C), self.mixed_RO.index_select(0, rows_C), extra_RP)


Shared = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of the layers to which later ones attend."""


class Decoder(nn.Module):
    """Token embedding, blocks and final norm; the head is `head_weight` for the functions of `head.py`."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = config
        with torch.device(device):
            self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype))
            self.per_layer = None if config.per_layer is None else PerLayerInputs(config, config.per_layer, dtype)
            self.layers = nn.ModuleList(Block(config, layer, dtype) for layer in range(config.num_layers))
            self.norm = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype))
            self.head = None if config.tied_head else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype))
        self.rope = Rope(config.rope, config.head_dim)
        self.full_rope = self.rope if config.full_rope is None else Rope(config.full_rope, config.head_dim)

    @property
    def head_weight(self) -> Tensor:
        """The unembedding [V, D]."""
        return self.embedding if self.head is None else self.head

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.embedding.device

    @property
    def ends_sparse(self) -> bool:
        """Whether the last block has experts."""
        return isinstance(self._blocks[-1].mlp, Experts) or self._blocks[-1].parallel is not None

    def hidden(self, tokens_R: Tensor, positions_R: Tensor, attention: Attention, adapters: AdapterRows, routing: Routing | None = None) -> Tensor:
        """Hidden states [R, D] after the final norm; `routing` keeps, or says, which experts the rows go to."""
        routing = Routing() if routing is None else routing
        return self.finish(self.trunk(tokens_R, positions_R, attention, adapters, routing), adapters, routing)

    def trunk(self, tokens_R: Tensor, positions_R: Tensor, attention: Attention, adapters: AdapterRows, routing: Routing) -> Trunk:
        """As far as a row depends on others; the rest is for `finish`, and for the rows alone whose hidden states are wanted."""
        x_RD = self._embedded(tokens_R)
        rotation = self.rope(positions_R, x_RD.dtype)
        full_rotation = rotation if self.full_rope is self.rope else self.full_rope(positions_R, x_RD.dtype)
        extras = [None] * len(self.layers) if self.per_layer is None else self.per_layer(tokens_R, x_RD).unbind(1)
        shared: Shared = {}
        for block, extra_RP in zip(self._blocks[:-1], extras, strict=False):
            x_RD = block(x_RD, full_rotation if block.window is None else rotation, attention, adapters, routing, shared, extra_RP)
        last = self._blocks[-1]
        return Trunk(x_RD, last.mix(x_RD, full_rotation if last.window is None else rotation, attention, adapters, shared), extras[-1])

    def finish(self, trunk: Trunk, adapters: AdapterRows, routing: Routing) -> Tensor:
        """Hidden states of the trunk's rows, after the last block and the final norm."""
        x_RD = self._blocks[-1].finish(trunk.x_RD, trunk.mixed_RO, adapters, routing, trunk.extra_RP)
        return rms_norm(x_RD, self.norm, self.config.norm_eps)

    @property
    def _blocks(self) -> list["Block"]:
        return [block for block in self.layers if isinstance(block, Block)]

    def _embedded(self, tokens_R: Tensor) -> Tensor:
        x_RD = F.embedding(tokens_R, self.embedding)
        # The factor is one of the compute dtype, as the families that have it compute.
        return x_RD if self.config.embedding_scale == 1.0 else x_RD * torch.tensor(self.config.embedding_scale, dtype=self.dtype).item()


class Block(nn.Module):
    """Attention and MLP (or experts), each behind a norm and added to the residual."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.layer, self.window, self.kind = config, layer, config.windows[layer], config.heads(layer)
        width, head, sandwich = config.hidden_size, self.kind.head_dim, config.sandwich_norms
        rows, mixed = _qkv_rows(config, layer), config.num_heads * value_dim(config, layer)
        self.attention_norm = _weight(width, dtype=dtype)
        self.qkv = _weight(rows, width, dtype=dtype)
        self.qkv_bias = _weight(rows, dtype=dtype) if config.qkv_bias else None
        self.q_norm = _weight(head, dtype=dtype) if config.qk_norm else None
        self.k_norm = _weight(head, dtype=dtype) if config.qk_norm and self.kind.source is None else None
        self.latent = None if config.latent is None else LatentHeads(config.latent, config.num_heads, dtype)
        self.o = _weight(width, mixed, dtype=dtype)
        self.attention_out_norm = _weight(width, dtype=dtype) if sandwich else None
        self.mlp_norm = _weight(width, dtype=dtype)
        self.mlp = _mlp(config, layer, dtype)
        self.parallel = _parallel(config, layer, dtype)
        self.mlp_out_norm = _weight(width, dtype=dtype) if sandwich else None
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
        """What attention gathers for every row, before the output projection."""
        name = f"layers.{self.layer}"
        normed_RD = rms_norm(x_RD, self.attention_norm, self.config.norm_eps)
        projected_RO = adapted_linear(normed_RD, self.qkv, f"{name}.qkv", adapters)
        q_RHE, k_RKE, v_RKE = self._heads(projected_RO, name, rotation, adapters, shared)
        mixed_RHE = attention(self.layer if self.kind.source is None else self.kind.source, q_RHE, k_RKE, v_RKE, self.window)
        return mixed_RHE[..., : value_dim(self.config, self.layer)].flatten(1)

    def finish(self, x_RD: Tensor, mixed_RO: Tensor, adapters: AdapterRows, routing: Routing, extra_RP: Tensor | None) -> Tensor:
        """Project it back, and the MLP: row by row."""
        name = f"layers.{self.layer}"
        x_RD = self._added(x_RD, adapted_linear(mixed_RO, self.o, f"{name}.o", adapters), self.attention_out_norm)
        normed_RD = rms_norm(x_RD, self.mlp_norm, self.config.norm_eps)
        mlp_RD = self.mlp(normed_RD, name, adapters, routing) if isinstance(self.mlp, Experts) else self.mlp(normed_RD, name, adapters)
        if self.parallel is not None:
            mlp_RD = self.parallel.add(mlp_RD, x_RD, name, adapters, routing)
        x_RD = self._added(x_RD, mlp_RD, self.mlp_out_norm)
        if self.per_layer is not None:
            x_RD = x_RD + self.per_layer(x_RD, extra_RP)
        return x_RD if self.scale is None else x_RD * self.scale

    def _added(self, x_RD: Tensor, update_RD: Tensor, norm: Tensor | None) -> Tensor:
        return x_RD + (update_RD if norm is None else rms_norm(update_RD, norm, self.config.norm_eps))

    def _heads(self, qkv_RO: Tensor, name: str, rotation: Rotation, adapters: AdapterRows, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [R, H, E], keys and values [R, K, E], as attention takes them."""
        if self.qkv_bias is not None:
            qkv_RO = qkv_RO + self.qkv_bias
        if self.latent is not None:
            q_RHE, k_RKE, v_RKE = self.latent(qkv_RO, name, rotation, adapters)
        else:
            q_RHE, k_RKE, v_RKE = self._grouped(qkv_RO, rotation, shared)
        if (scale := self.config.attention_scale) is not None:
            # Attention divides by the root of the head dimension.
            q_RHE = q_RHE * (scale * math.sqrt(q_RHE.shape[-1]))
        return q_RHE, k_RKE, v_RKE

    def _grouped(self, qkv_RO: Tensor, rotation: Rotation, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        kind, eps = self.kind, self.config.norm_eps
        q_RHE, *keys_and_values = qkv_RO.unflatten(1, (-1, kind.head_dim)).split([self.config.num_heads, *_kv_splits(kind)], dim=1)
        q_RHE = rotation.queries(q_RHE if self.q_norm is None else rms_norm(q_RHE, self.q_norm, eps))
        if kind.source is not None:
            return q_RHE, *shared[kind.source]
        k_RKE, v_RKE = keys_and_values[0], keys_and_values[-1]
        k_RKE = rotation.keys(k_RKE if self.k_norm is None else rms_norm(k_RKE, self.k_norm, eps))
        if self.config.value_norm:
            v_RKE = unit_norm(v_RKE, eps)
        if self.layer in self.config.kv_sources:
            shared[self.layer] = k_RKE, v_RKE
        return q_RHE, k_RKE, v_RKE


def value_dim(config: DecoderConfig, layer: int) -> int:
    """Dimensions of a value that go on to the output projection."""
    return config.heads(layer).head_dim if config.latent is None else config.latent.value_dim


def _qkv_rows(config: DecoderConfig, layer: int) -> int:
    if config.latent is not None:
        return latent_rows(config, config.latent)
    kind = config.heads(layer)
    return (config.num_heads + sum(_kv_splits(kind))) * kind.head_dim


def _kv_splits(kind: LayerHeads) -> list[int]:
    """Heads of the keys, and of the values, that a layer projects to."""
    return [] if kind.source is not None else [kind.kv_heads] * (1 + kind.own_values)


def _weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype))


def _parallel(config: DecoderConfig, layer: int, dtype: torch.dtype) -> ParallelExperts | None:
    experts = config.experts
    if experts is None or not experts.beside_mlp or layer not in experts.sparse_layers:
        return None
    return ParallelExperts(experts, config.hidden_size, config.activation, config.norm_eps, dtype)


def _mlp(config: DecoderConfig, layer: int, dtype: torch.dtype) -> nn.Module:
    if config.experts is not None and not config.experts.beside_mlp and layer in config.experts.sparse_layers:
        return Experts(config.experts, config.hidden_size, config.activation, dtype)
    return Mlp(config.hidden_size, config.inner(layer), config.activation, dtype)
