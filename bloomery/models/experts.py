"""Top-k experts: each segment's rows go to their experts, padded per expert so that a row's result does not depend on its company.

Shapes: R rows, D hidden, I intermediate of one expert, X experts, T experts per token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.models.adapters import AdapterRows, Factors, FusedAdapter, low_rank_add
from bloomery.models.attention import ROW_PAD, pad_to
from bloomery.models.config import ExpertsConfig
from bloomery.models.pointwise import swiglu


class Experts(nn.Module):
    """Router and experts of one layer (Qwen3-MoE: softmax over all experts, then the top ones, optionally renormalised)."""

    def __init__(self, config: ExpertsConfig, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Parameter(torch.empty(config.num_experts, width, dtype=dtype))
        self.gate_up = nn.Parameter(torch.empty(config.num_experts, 2 * config.intermediate_size, width, dtype=dtype))
        self.down = nn.Parameter(torch.empty(config.num_experts, width, config.intermediate_size, dtype=dtype))

    def forward(self, x_RD: Tensor, name: str, adapters: AdapterRows) -> Tensor:
        """Route every row and add its experts' answers in ascending order of expert."""
        parts = [self._segment(x_RD[start:stop], name, adapter) for adapter, start, stop in adapters.segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _segment(self, x_RD: Tensor, name: str, adapter: FusedAdapter | None) -> Tensor:
        probabilities_RX = F.linear(x_RD, self.router).softmax(-1, dtype=torch.float32)
        weights_RT, chosen_RT = probabilities_RX.topk(self.config.top_k, dim=-1)
        if self.config.normalise_top_k:
            weights_RT = weights_RT / weights_RT.sum(-1, keepdim=True)
        weights_RT = weights_RT.to(x_RD.dtype)
        gate_up = adapter.get(f"{name}.gate_up") if adapter is not None else None
        down = adapter.get(f"{name}.down") if adapter is not None else None
        out_RD = torch.zeros_like(x_RD)
        for expert in chosen_RT.unique().tolist():
            rows, slot = torch.where(chosen_RT == expert)
            answer = self._expert(x_RD[rows], expert, _of_expert(gate_up, expert), _of_expert(down, expert))
            out_RD = out_RD.index_add(0, rows, answer * weights_RT[rows, slot, None])
        return out_RD

    def _expert(self, x_RD: Tensor, expert: int, gate_up: Factors | None, down: Factors | None) -> Tensor:
        count = x_RD.shape[0]
        x_RD = F.pad(x_RD, (0, 0, 0, pad_to(count, ROW_PAD) - count))
        inner_RI = swiglu(_adapted(F.linear(x_RD, self.gate_up[expert]), x_RD, gate_up))
        return _adapted(F.linear(inner_RI, self.down[expert]), inner_RI, down)[:count]


def _of_expert(factors: Factors | None, expert: int) -> Factors | None:
    return None if factors is None else Factors(factors.a[expert], factors.b[expert])


def _adapted(base: Tensor, x: Tensor, factors: Factors | None) -> Tensor:
    return base if factors is None else low_rank_add(base, x, factors)
