"""Multi-head latent attention (DeepSeek V2 and later, arXiv 2405.04434): queries, keys and values of every head from latents of low rank.

They are expanded before they are attended to and cached, so that trainer and sampler share one form. The block's `qkv` projects to the latents:
rows of queries (their latent, or the queries themselves), then the latent of keys and values, then the positional key that all heads share.
Shapes: R packed rows, H heads, E dimension of a query and key, V of a value.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.models.adapters import AdapterRows, adapted_linear
from bloomery.models.config import DecoderConfig, LatentConfig
from bloomery.models.pointwise import rms_norm
from bloomery.models.rope import Rotation

_EPS: Final = 1e-6
"""Of the norms of the latents, whatever the model's own is."""


class LatentHeads(nn.Module):
    """From latents to queries, keys and values, the values padded to the width of the keys."""

    def __init__(self, latent: LatentConfig, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.latent, self.heads = latent, heads
        wide = latent.plain_dim + latent.rope_dim
        rank = latent.query_rank
        self.q_norm = nn.Parameter(torch.empty(rank, dtype=dtype)) if rank is not None else None
        self.q = nn.Parameter(torch.empty(heads * wide, rank, dtype=dtype)) if rank is not None else None
        self.kv_norm = nn.Parameter(torch.empty(latent.key_rank, dtype=dtype))
        self.kv = nn.Parameter(torch.empty(heads * (latent.plain_dim + latent.value_dim), latent.key_rank, dtype=dtype))

    def forward(self, latents_RO: Tensor, name: str, rotation: Rotation, adapters: AdapterRows) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [R, H, E], keys [R, H, E] and values [R, H, E] of the rows' latents."""
        latent = self.latent
        query_RO, key_RO, shared_RO = latents_RO.split([latents_RO.shape[1] - latent.key_rank - latent.rope_dim, latent.key_rank, latent.rope_dim], 1)
        q_RHE = self._queries(query_RO, name, adapters).unflatten(1, (self.heads, -1))
        plain_RHE, turning_RHE = q_RHE.split([latent.plain_dim, latent.rope_dim], -1)
        q_RHE = torch.cat([plain_RHE, rotation.queries(turning_RHE)], -1)
        expanded_RO = adapted_linear(rms_norm(key_RO, self.kv_norm, _EPS), self.kv, f"{name}.kv", adapters)
        plain_RHE, v_RHV = expanded_RO.unflatten(1, (self.heads, -1)).split([latent.plain_dim, latent.value_dim], -1)
        shared_RHE = rotation.keys(shared_RO[:, None]).expand(-1, self.heads, -1)
        return q_RHE, torch.cat([plain_RHE, shared_RHE], -1), F.pad(v_RHV, (0, q_RHE.shape[-1] - latent.value_dim))

    def _queries(self, query_RO: Tensor, name: str, adapters: AdapterRows) -> Tensor:
        if self.q is None or self.q_norm is None:
            return query_RO
        return adapted_linear(rms_norm(query_RO, self.q_norm, _EPS), self.q, f"{name}.q", adapters)


def latent_rows(config: DecoderConfig, latent: LatentConfig) -> int:
    """Rows of a block's `qkv`."""
    queries = latent.query_rank if latent.query_rank is not None else config.num_heads * (latent.plain_dim + latent.rope_dim)
    return queries + latent.key_rank + latent.rope_dim
