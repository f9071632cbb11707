"""The gated delta net of Qwen3.5: a state per head that maps keys to values, and that every row corrects by what it knows better.

A row lets the state decay, looks up its key, and writes a part of the difference to its value (arXiv 2412.06464). Within a chunk these corrections
are a triangular system, which is solved once for the chunk (arXiv 2406.06484); what came before the chunk is in the state. All of it is float32.
Shapes: N chunks, T rows of a chunk, L those and the rows before them that the convolution sees, X numbers of a row, G heads of queries and keys, M
heads of values for each, H = G * M, E dimension of a key, V of a value, I = H * V.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.models.config import GatedDeltaConfig
from bloomery.models.pointwise import rms_norm, row_sum
from bloomery.models.recurrent import InterChunk, Recurrence, convolved

_UNIT_EPS = 1e-6
"""Of the norms of queries and keys, whatever the model's own is."""


class _Heads(NamedTuple):
    """Queries and keys of length 1, the queries but for the root of the dimension, and values."""

    q_NGTE: Tensor
    k_NGTE: Tensor
    v_NGMTV: Tensor


class _IntraChunk(NamedTuple):
    """What chunks give without a state."""

    q_NGTE: Tensor
    k_NGTE: Tensor
    wanted_NGMTV: Tensor
    """Values, as far as their rows write them."""
    written_NGMT1: Tensor
    """The part of what the state before the chunk holds of a key that its row takes out."""
    kept_NGMT1: Tensor
    """The part of the state before the chunk which each row still finds."""
    left_NGMT1: Tensor
    """The part of what a row writes that is left behind the chunk."""
    solved_NGMTT: Tensor
    """The inverse of the system of the rows' corrections."""
    own_NGMTT: Tensor
    """Scores of the rows for those up to themselves."""


class GatedDelta(Recurrence):
    """A row is projected to queries, keys and values of all heads, per head how much it writes and how much is forgotten, and the gate."""

    config: GatedDeltaConfig

    def __init__(self, config: GatedDeltaConfig, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.conv = nn.Parameter(torch.empty(config.channels, 1, config.conv_width, dtype=dtype))
        self.log_rate = nn.Parameter(torch.empty(config.heads, dtype=dtype))
        self.step_bias = nn.Parameter(torch.empty(config.heads, dtype=dtype))
        self.norm = nn.Parameter(torch.empty(config.value_dim, dtype=dtype))

    def scan_inputs(self, projected_RO: Tensor) -> Tensor:
        """All but the gate."""
        return projected_RO[:, : self.config.row_width]

    def intra_chunk(self, rows_NLX: Tensor) -> _IntraChunk:
        """Solve the system of the corrections."""
        config = self.config
        inputs_NLC, write_NLH, forget_NLH = rows_NLX.float().split([config.channels, config.heads, config.heads], -1)
        q_NGTE, k_NGTE, v_NGMTV = self._heads(F.silu(convolved(inputs_NLC, self.conv.float()[:, 0])))
        first = config.conv_width - 1
        write_NGMT1 = self._by_head(write_NLH[:, first:].sigmoid())[..., None]
        decay_NTH = -self.log_rate.float().exp() * F.softplus(forget_NLH[:, first:] + self.step_bias.float())
        total_NGMT = self._by_head(decay_NTH.cumsum(1))
        later_TT = torch.ones(config.chunk_rows, config.chunk_rows, dtype=torch.bool, device=rows_NLX.device).triu(1)
        # Masked before `exp`, which would overflow behind a row.
        between_NGMTT = (total_NGMT[..., :, None] - total_NGMT[..., None, :]).masked_fill(later_TT, float("-inf")).exp()
        system_NGMTT = (k_NGTE @ k_NGTE.mT)[:, :, None] * between_NGMTT * write_NGMT1
        one_TT = torch.eye(config.chunk_rows, device=rows_NLX.device)
        # Of the system nothing but what lies below the diagonal is read.
        solved_NGMTT = torch.linalg.solve_triangular(system_NGMTT, one_TT.expand_as(system_NGMTT), upper=False, unitriangular=True)
        own_NGMTT = (q_NGTE @ k_NGTE.mT)[:, :, None] * between_NGMTT
        kept_NGMT1 = total_NGMT.exp()[..., None]
        left_NGMT1 = (total_NGMT[..., -1:] - total_NGMT).exp()[..., None]
        wanted_NGMTV, written_NGMT1 = v_NGMTV * write_NGMT1, write_NGMT1 * kept_NGMT1
        return _IntraChunk(q_NGTE, k_NGTE, wanted_NGMTV, written_NGMT1, kept_NGMT1, left_NGMT1, solved_NGMTT, own_NGMTT)

    def inter_chunk(self, intra: Sequence[Tensor], state_N: Tensor, carried: int) -> InterChunk:
        """Read from the states [N, G, E, M * V] and from the rows before in the chunk."""
        q_NGTE, k_NGTE, wanted_NGMTV, written_NGMT1, kept_NGMT1, left_NGMT1, solved_NGMTT, own_NGMTT = _IntraChunk(*intra)
        known_NGMTV, before_NGMTV = (self._values(x_NGTE @ state_N) for x_NGTE in (k_NGTE, q_NGTE))
        new_NGMTV = solved_NGMTT @ (wanted_NGMTV - written_NGMT1 * known_NGMTV)
        read_NGMTV = before_NGMTV * kept_NGMT1 + own_NGMTT @ new_NGMTV
        read_NTI = read_NGMTV.permute(0, 3, 1, 2, 4).flatten(2)
        if not carried:
            return InterChunk(read_NTI, state_N[:0])
        added_NGTF = (new_NGMTV[:carried] * left_NGMT1[:carried]).transpose(2, 3).flatten(3)
        kept_NG1M1 = kept_NGMT1[:carried, :, :, -1:].transpose(2, 3)
        kept_NGEF = (state_N[:carried].unflatten(3, (-1, self.config.value_dim)) * kept_NG1M1).flatten(3)
        return InterChunk(read_NTI, kept_NGEF + k_NGTE[:carried].mT @ added_NGTF)

    def gated(self, read_RI: Tensor, projected_RO: Tensor) -> Tensor:
        """What each head reads, normed and then gated."""
        gate_RI = projected_RO[:, self.config.row_width :]
        heads_RHV = read_RI.to(gate_RI.dtype).unflatten(1, (self.config.heads, -1))
        return (rms_norm(heads_RHV, self.norm, self.eps).flatten(1) * F.silu(gate_RI.float())).to(gate_RI.dtype)

    def _heads(self, mixed_NTX: Tensor) -> _Heads:
        config = self.config
        keys = config.key_heads * config.key_dim
        q_NTX, k_NTX, v_NTI = mixed_NTX.split([keys, keys, config.inner], -1)
        q_NGTE, k_NGTE = (_unit(x_NTX.unflatten(2, (config.key_heads, -1))).transpose(1, 2) for x_NTX in (q_NTX, k_NTX))
        v_NGMTV = v_NTI.unflatten(2, (config.key_heads, -1, config.value_dim)).permute(0, 2, 3, 1, 4)
        return _Heads(q_NGTE * config.key_dim**-0.5, k_NGTE, v_NGMTV)

    def _by_head(self, x_NTH: Tensor) -> Tensor:
        """[N, G, M, T]."""
        x_NGMT: Tensor = x_NTH.transpose(1, 2).unflatten(1, (self.config.key_heads, -1))
        return x_NGMT

    def _values(self, x_NGTF: Tensor) -> Tensor:
        """Heads side by side [N, G, T, M * V], apart [N, G, M, T, V]."""
        x_NGMTV: Tensor = x_NGTF.unflatten(3, (-1, self.config.value_dim)).transpose(2, 3)
        return x_NGMTV


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(row_sum(x.square()) + _UNIT_EPS)
