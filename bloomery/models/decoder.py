"""The decoder core: one config-driven block for the Llama-like families, over packed rows.

Shapes: R packed rows, D hidden, H query heads, K key/value heads, E head dimension, I intermediate. Weights keep their roles, not their files:
`load.py` fuses query, key and value into `qkv`, gate and up into `gate_up`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.models.adapters import AdapterRows, adapted_linear
from bloomery.models.attention import Attention
from bloomery.models.config import DecoderConfig
from bloomery.models.experts import Experts, Routing
from bloomery.models.pointwise import rms_norm, rotate, swiglu
from bloomery.models.rope import Rope


class Decoder(nn.Module):
    """Token embedding, blocks and final norm; the head is `head_weight` for the functions of `head.py`."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = config
        with torch.device(device):
            self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype))
            self.layers = nn.ModuleList(Block(config, layer, dtype) for layer in range(config.num_layers))
            self.norm = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype))
            self.head = None if config.tied_head else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype))
        self.rope = Rope(config)

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

    def hidden(self, tokens_R: Tensor, positions_R: Tensor, attention: Attention, adapters: AdapterRows, routing: Routing | None = None) -> Tensor:
        """Hidden states [R, D] after the final norm; `routing` keeps, or says, which experts the rows go to."""
        routing = Routing() if routing is None else routing
        x_RD = F.embedding(tokens_R, self.embedding)
        rotation = self.rope(positions_R, x_RD.dtype)
        for block in self.layers:
            x_RD = block(x_RD, rotation, attention, adapters, routing)
        return rms_norm(x_RD, self.norm, self.config.norm_eps)


class Block(nn.Module):
    """Attention and MLP (or experts), each behind a norm and added to the residual."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.layer, self.window = config, layer, config.windows[layer]
        width, head = config.hidden_size, config.head_dim
        self.attention_norm = _weight(width, dtype=dtype)
        self.qkv = _weight((config.num_heads + 2 * config.num_kv_heads) * head, width, dtype=dtype)
        self.q_norm = _weight(head, dtype=dtype) if config.qk_norm else None
        self.k_norm = _weight(head, dtype=dtype) if config.qk_norm else None
        self.o = _weight(width, config.num_heads * head, dtype=dtype)
        self.mlp_norm = _weight(width, dtype=dtype)
        self.mlp = _mlp(config, layer, dtype)

    def forward(
        self,
        x_RD: Tensor,
        rotation: tuple[Tensor, Tensor, Tensor | None],
        attention: Attention,
        adapters: AdapterRows,
        routing: Routing,
    ) -> Tensor:
        """One block."""
        eps, name = self.config.norm_eps, f"layers.{self.layer}"
        normed_RD = rms_norm(x_RD, self.attention_norm, eps)
        q_RHE, k_RKE, v_RKE = self._heads(adapted_linear(normed_RD, self.qkv, f"{name}.qkv", adapters), rotation)
        mixed_RD = attention(self.layer, q_RHE, k_RKE, v_RKE, self.window).flatten(1)
        x_RD = x_RD + adapted_linear(mixed_RD, self.o, f"{name}.o", adapters)
        normed_RD = rms_norm(x_RD, self.mlp_norm, eps)
        mlp_RD: Tensor = self.mlp(normed_RD, name, adapters, routing)
        return x_RD + mlp_RD

    def _heads(self, qkv_RO: Tensor, rotation: tuple[Tensor, Tensor, Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        q_RHE, k_RKE, v_RKE = qkv_RO.unflatten(1, (-1, self.config.head_dim)).split([heads, kv_heads, kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_RHE, k_RKE = rms_norm(q_RHE, self.q_norm, self.config.norm_eps), rms_norm(k_RKE, self.k_norm, self.config.norm_eps)
        cos, sin, query_scale = rotation
        q_RHE, k_RKE = rotate(q_RHE, cos, sin), rotate(k_RKE, cos, sin)
        return q_RHE if query_scale is None else q_RHE * query_scale, k_RKE, v_RKE


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = _weight(2 * config.intermediate_size, config.hidden_size, dtype=dtype)
        self.down = _weight(config.hidden_size, config.intermediate_size, dtype=dtype)

    def forward(self, x_RD: Tensor, name: str, adapters: AdapterRows, routing: Routing) -> Tensor:
        """Gate, multiply, project back; there is nothing to route."""
        inner_RI = swiglu(adapted_linear(x_RD, self.gate_up, f"{name}.gate_up", adapters))
        return adapted_linear(inner_RI, self.down, f"{name}.down", adapters)


def _weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype))


def _mlp(config: DecoderConfig, layer: int, dtype: torch.dtype) -> nn.Module:
    if config.experts is not None and layer in config.experts.sparse_layers:
        return Experts(config.experts, config.hidden_size, dtype)
    return Mlp(config, dtype)
