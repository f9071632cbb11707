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
from bloomery.models.config import DecoderConfig, GatedDeltaConfig, LayerHeads
from bloomery.models.experts import Experts, Routing
from bloomery.models.experts_beside_mlp import ExpertsBesideMlp
from bloomery.models.gated_delta import GatedDelta
from bloomery.models.latent_attention import LatentHeads, latent_rows
from bloomery.models.mamba import Mamba
from bloomery.models.mlp import Mlp
from bloomery.models.per_layer import PerLayerGate, PerLayerInputs
from bloomery.models.pointwise import centred_norm, rms_norm, unit_norm
from bloomery.models.recurrent import Recurrence
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


class Wanted(NamedTuple):
    """The rows whose hidden states are of use, and whose adapter applies to which of them; a multiple of `ROW_PAD` where bits matter."""

    rows_C: Tensor
    adapters: AdapterRows


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

    def hidden(
        self,
        tokens_R: Tensor,
        positions_R: Tensor,
        attention: Attention,
        adapters: AdapterRows,
        routing: Routing | None = None,
        wanted: Wanted | None = None,
    ) -> Tensor:
        """Hidden states [R, D] after the final norm, or [C, D] of the wanted rows; `routing` keeps, or says, which experts the rows go to."""
        routing = Routing() if routing is None else routing
        trunk = self.trunk(tokens_R, positions_R, attention, adapters, routing)
        if wanted is None:
            return self.finish(trunk, adapters, routing)
        if self.ends_sparse:
            # Where a row goes is told of all of them.
            return self.finish(trunk, adapters, routing).index_select(0, wanted.rows_C)
        trunk = trunk.rows(wanted.rows_C)
        return self.finish(trunk, wanted.adapters, routing) if len(wanted.rows_C) else trunk.x_RD

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
        return norm(x_RD, self.norm, self.config)

    @property
    def _blocks(self) -> list["Block"]:
        return [block for block in self.layers if isinstance(block, Block)]

    def _embedded(self, tokens_R: Tensor) -> Tensor:
        x_RD = F.embedding(tokens_R, self.embedding)
        # The factor is one of the compute dtype, as the families that have it compute.
        return x_RD if self.config.embedding_scale == 1.0 else x_RD * torch.tensor(self.config.embedding_scale, dtype=self.dtype).item()


class Block(nn.Module):
    """A mixer (attention, or a state) and an MLP (or experts), each behind a norm and added to the residual; some layers have one of them."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.layer, self.window, self.kind = config, layer, config.windows[layer], config.heads(layer)
        mixer, has_mlp, width = config.mixer(layer), config.has_mlp(layer), config.hidden_size
        mixes, attends, head, sandwich = mixer != "none", mixer == "attention", self.kind.head_dim, config.sandwich_norms
        rows, mixed = _projected(config, layer)
        self.place = _place(config, layer)
        self.attention_norm = _weight(width, dtype=dtype) if mixes else None
        self.qkv = _weight(rows, width, dtype=dtype) if mixes else None
        self.qkv_bias = _weight(rows, dtype=dtype) if config.qkv_bias and attends else None
        self.q_norm = _weight(head, dtype=dtype) if config.qk_norm and attends else None
        self.k_norm = _weight(head, dtype=dtype) if config.qk_norm and attends and self.kind.source is None else None
        self.latent = None if config.latent is None or not attends else LatentHeads(config.latent, config.num_heads, dtype)
        self.recurrent = _recurrence(config, dtype) if mixer == "recurrent" else None
        self.o = _weight(width, mixed, dtype=dtype) if mixes else None
        self.attention_out_norm = _weight(width, dtype=dtype) if sandwich else None
        self.mlp_norm = _weight(width, dtype=dtype) if has_mlp else None
        self.mlp = _mlp(config, layer, dtype) if has_mlp else None
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
        """What the mixer gathers for every row, before the output projection; nothing where there is none."""
        if self.qkv is None or self.attention_norm is None:
            return x_RD[:, :0]
        name = f"layers.{self.layer}"
        projected_RO = adapted_linear(norm(x_RD, self.attention_norm, self.config), self.qkv, f"{name}.qkv", adapters)
        if self.recurrent is not None:
            read_RI = attention.recur(self.place, self.recurrent, self.recurrent.remembered(projected_RO))
            return self.recurrent.gated(read_RI, projected_RO)
        q_RHE, k_RKE, v_RKE = self._heads(projected_RO, name, rotation, adapters, shared)
        mixed_RHE = attention(self.place, q_RHE, k_RKE, v_RKE, self.window)
        mixed_RO = mixed_RHE[..., : value_dim(self.config, self.layer)].flatten(1)
        return mixed_RO * self._gate(projected_RO).sigmoid() if self.config.attention_gate else mixed_RO

    def finish(self, x_RD: Tensor, mixed_RO: Tensor, adapters: AdapterRows, routing: Routing, extra_RP: Tensor | None) -> Tensor:
        """Project it back, and the MLP: row by row."""
        name = f"layers.{self.layer}"
        if self.o is not None:
            x_RD = self._added(x_RD, adapted_linear(mixed_RO, self.o, f"{name}.o", adapters), self.attention_out_norm)
        if self.mlp is not None and self.mlp_norm is not None:
            normed_RD = norm(x_RD, self.mlp_norm, self.config)
            mlp_RD = self.mlp(normed_RD, name, adapters, routing) if isinstance(self.mlp, Experts) else self.mlp(normed_RD, name, adapters)
            if self.parallel is not None:
                mlp_RD = self.parallel.add(mlp_RD, x_RD, name, adapters, routing)
            x_RD = self._added(x_RD, mlp_RD, self.mlp_out_norm)
        if self.per_layer is not None:
            x_RD = x_RD + self.per_layer(x_RD, extra_RP)
        return x_RD if self.scale is None else x_RD * self.scale

    def _added(self, x_RD: Tensor, update_RD: Tensor, out_norm: Tensor | None) -> Tensor:
        return x_RD + (update_RD if out_norm is None else norm(update_RD, out_norm, self.config))

    def _gate(self, projected_RO: Tensor) -> Tensor:
        """What lies behind every query."""
        heads_RHE: Tensor = projected_RO.unflatten(1, (-1, self.kind.head_dim))
        return heads_RHE[:, 1 : _query_heads(self.config) : 2].flatten(1)

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
        kind, config = self.kind, self.config
        q_RHE, *keys_and_values = qkv_RO.unflatten(1, (-1, kind.head_dim)).split([_query_heads(config), *_kv_splits(kind)], dim=1)
        if config.attention_gate:
            q_RHE = q_RHE[:, ::2]
        q_RHE = rotation.queries(q_RHE if self.q_norm is None else norm(q_RHE, self.q_norm, config))
        if kind.source is not None:
            return q_RHE, *shared[kind.source]
        k_RKE, v_RKE = keys_and_values[0], keys_and_values[-1]
        k_RKE = rotation.keys(k_RKE if self.k_norm is None else norm(k_RKE, self.k_norm, config))
        if config.value_norm:
            v_RKE = unit_norm(v_RKE, config.norm_eps)
        if self.layer in config.kv_sources:
            shared[self.layer] = k_RKE, v_RKE
        return q_RHE, k_RKE, v_RKE


def norm(x: Tensor, weight: Tensor, config: DecoderConfig) -> Tensor:
    """The model's norm, over the last dimension."""
    return (centred_norm if config.centred_norms else rms_norm)(x, weight, config.norm_eps)


def value_dim(config: DecoderConfig, layer: int) -> int:
    """Dimensions of a value that go on to the output projection."""
    return config.heads(layer).head_dim if config.latent is None else config.latent.value_dim


def _place(config: DecoderConfig, layer: int) -> int:
    """Which of the layers with a state, or with keys and values, it is, or attends to."""
    if config.mixer(layer) == "recurrent":
        return config.state_layers.index(layer)
    source = config.heads(layer).source
    return config.kv_layers.index(layer if source is None else source) if config.mixer(layer) == "attention" else -1


def _recurrence(config: DecoderConfig, dtype: torch.dtype) -> Recurrence:
    recurrent = config.recurrent
    assert recurrent is not None
    return GatedDelta(recurrent, config.norm_eps, dtype) if isinstance(recurrent, GatedDeltaConfig) else Mamba(recurrent, config.norm_eps, dtype)


def _projected(config: DecoderConfig, layer: int) -> tuple[int, int]:
    """To how many numbers a mixer projects a row, and from how many back."""
    if config.recurrent is not None and config.mixer(layer) == "recurrent":
        return config.recurrent.projection_width, config.recurrent.inner
    kind, mixed = config.heads(layer), config.num_heads * value_dim(config, layer)
    if config.latent is not None:
        return latent_rows(config, config.latent), mixed
    return (_query_heads(config) + sum(_kv_splits(kind))) * kind.head_dim, mixed


def _query_heads(config: DecoderConfig) -> int:
    """Heads of queries, each with that of its gate behind it."""
    return config.num_heads * (1 + config.attention_gate)


def _kv_splits(kind: LayerHeads) -> list[int]:
    """Heads of the keys, and of the values, that a layer projects to."""
    return [] if kind.source is not None else [kind.kv_heads] * (1 + kind.own_values)


def _weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype))


def _parallel(config: DecoderConfig, layer: int, dtype: torch.dtype) -> ExpertsBesideMlp | None:
    experts = config.experts
    if experts is None or not experts.beside_mlp or layer not in experts.sparse_layers:
        return None
    return ExpertsBesideMlp(experts, config.hidden_size, config.activation, config.norm_eps, dtype)


def _mlp(config: DecoderConfig, layer: int, dtype: torch.dtype) -> nn.Module:
    if config.experts is not None and not config.experts.beside_mlp and layer in config.experts.sparse_layers:
        return Experts(config.experts, config.hidden_size, config.activation, dtype)
    return Mlp(config.hidden_size, config.inner(layer), config.activation, dtype)
