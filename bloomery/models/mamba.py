"""Mamba-2: a layer whose heads each carry one matrix along the sequence, which decays from row to row.

Within a chunk rows look at the rows before them as attention does, weighted by the decay between the two; what lies before the chunk is in the
state. All of it is float32, whatever the compute dtype is. Formulas: arXiv 2405.21060, where the step is delta, what writes to the state B, and what
reads from it C.
Shapes: R packed rows, O numbers that a row is projected to, X those of them that are scanned, N chunks, L rows of a chunk and the few before it,
T rows of a chunk, C channels, I numbers of all heads, G groups of heads, M heads of a group, H = G * M, P dimensions of a head, S dimensions of the
vectors that write to the state and read from it, K = G * S. A state is [G, S, M * P].
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.models.config import MambaConfig
from bloomery.models.pointwise import row_mean
from bloomery.models.recurrent import InterChunk, Recurrence, convolved


class _Inputs(NamedTuple):
    """Of every row in a chunk; each lies as its products take it, for any N."""

    x_NGMTP: Tensor
    step_NGMT: Tensor
    write_NGTS: Tensor
    read_NGTS: Tensor


class _IntraChunk(NamedTuple):
    """What chunks give without a state."""

    own_NTI: Tensor
    """What rows read of their own chunk."""
    added_NGSI: Tensor
    """What a chunk adds to the state behind it."""
    read_NGTS: Tensor
    """What rows read the state before the chunk with."""
    kept_NGTM: Tensor
    """The part of that state which each row still finds."""


class Mamba(Recurrence):
    """The mixer between `in_proj`, which gives a row's gate [I], the convolution's input and the step of every head, and `out_proj`."""

    config: MambaConfig

    def __init__(self, config: MambaConfig, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.conv = nn.Parameter(torch.empty(config.channels, 1, config.conv_width, dtype=dtype))
        self.conv_bias = nn.Parameter(torch.empty(config.channels, dtype=dtype)) if config.conv_bias else None
        self.step_bias, self.log_rate, self.skip = (nn.Parameter(torch.empty(config.heads, dtype=dtype)) for _ in range(3))
        self.norm = nn.Parameter(torch.empty(config.inner, dtype=dtype))

    def scan_inputs(self, projected_RO: Tensor) -> Tensor:
        """All but the gate [R, X]."""
        return projected_RO[:, self.config.inner :]

    def intra_chunk(self, rows_NLX: Tensor) -> _IntraChunk:
        """As attention, each score weighted by the decay between its rows."""
        x_NGMTP, step_NGMT, write_NGTS, read_NGTS = self._inputs(rows_NLX)
        # Logarithms, since the chunk began; in float64, because it is differences of these sums that count.
        decay_NGMT = (step_NGMT * -self._by_head(self.log_rate).exp()[..., None]).double().cumsum(3)
        fed_NGMTP = x_NGMTP * step_NGMT[..., None]
        own_NGMTP = _decayed(read_NGTS @ write_NGTS.transpose(2, 3), decay_NGMT) @ fed_NGMTP
        own_NGMTP = own_NGMTP + x_NGMTP * self._by_head(self.skip)[..., None, None]
        left_NGMT = (decay_NGMT[..., -1:] - decay_NGMT).float().exp()
        added_NGSI = write_NGTS.transpose(2, 3) @ (fed_NGMTP * left_NGMT[..., None]).transpose(2, 3).flatten(3)
        return _IntraChunk(own_NGMTP.permute(0, 3, 1, 2, 4).flatten(2), added_NGSI, read_NGTS, decay_NGMT.float().exp().transpose(2, 3))

    def inter_chunk(self, intra: Sequence[Tensor], state_N: Tensor, carried: int) -> InterChunk:
        """Add what the rows read of the state before their chunk, and carry the first `carried` states over theirs."""
        own_NTI, added_NGSI, read_NGTS, kept_NGTM = _IntraChunk(*intra)
        before_NGTMP = (read_NGTS @ state_N).unflatten(3, (kept_NGTM.shape[3], -1)) * kept_NGTM[..., None]
        kept_NG1I = kept_NGTM[:carried, :, -1:].repeat_interleave(self.config.head_dim, 3)
        return InterChunk(own_NTI + before_NGTMP.transpose(1, 2).flatten(2), state_N[:carried] * kept_NG1I + added_NGSI[:carried])

    def gated(self, read_RI: Tensor, projected_RO: Tensor) -> Tensor:
        """Gated, then normed group by group; in the compute dtype."""
        gated_RI = read_RI.float() * F.silu(projected_RO[:, : self.config.inner].float())
        groups_RGI = gated_RI.unflatten(1, (self.config.groups, -1))
        normed_RGI = groups_RGI * torch.rsqrt(row_mean(groups_RGI.square()) + self.eps)
        mixed_RI: Tensor = (normed_RGI.flatten(1) * self.norm.float()).to(projected_RO.dtype)
        return mixed_RI

    def _inputs(self, rows_NLX: Tensor) -> _Inputs:
        config, groups = self.config, self.config.groups
        keys = groups * config.state_size
        conv_NLC, step_NLH = rows_NLX.float().split([config.channels, config.heads], -1)
        mixed_NTC = convolved(conv_NLC, self.conv.float()[:, 0])
        if self.conv_bias is not None:
            mixed_NTC = mixed_NTC + self.conv_bias.float()
        x_NTI, write_NTK, read_NTK = F.silu(mixed_NTC).split([config.inner, keys, keys], -1)
        step_NTH = F.softplus(step_NLH[:, config.conv_width - 1 :] + self.step_bias.float()).clamp(min=config.least_step)
        return _Inputs(
            x_NGMTP=x_NTI.unflatten(2, (groups, -1, config.head_dim)).permute(0, 2, 3, 1, 4).contiguous(),
            step_NGMT=step_NTH.unflatten(2, (groups, -1)).permute(0, 2, 3, 1).contiguous(),
            write_NGTS=write_NTK.unflatten(2, (groups, -1)).transpose(1, 2).contiguous(),
            read_NGTS=read_NTK.unflatten(2, (groups, -1)).transpose(1, 2).contiguous(),
        )

    def _by_head(self, values_H: Tensor) -> Tensor:
        """[G, M], in float32."""
        values_GM: Tensor = values_H.float().unflatten(0, (self.config.groups, -1))
        return values_GM


def _decayed(scores_NGTT: Tensor, decay_NGMT: Tensor) -> Tensor:
    """Scores [N, G, M, T, T] of every head's rows for the rows up to themselves."""
    later_TT = torch.ones(decay_NGMT.shape[3], decay_NGMT.shape[3], dtype=torch.bool, device=decay_NGMT.device).triu(1)
    # Minus infinity before `exp`: of later rows the difference is positive, and would overflow.
    between_NGMTT = (decay_NGMT[..., :, None] - decay_NGMT[..., None, :]).float().masked_fill(later_TT, float("-inf")).exp()
    return scores_NGTT[:, :, None] * between_NGMTT
