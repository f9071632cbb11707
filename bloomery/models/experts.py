"""Top-k experts: each segment's rows go to their experts, padded per expert so that a row's result does not depend on its company.

Shapes: R rows, D hidden, I intermediate of one expert, X experts, T experts per token.
"""

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.models.adapters import AdapterRows, adapted_linear
from bloomery.models.config import ExpertsConfig
from bloomery.models.factors import Factors, low_rank_add
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.mlp import ACTIVATIONS, Mlp, gate_up_rows
from bloomery.models.pads import ROW_PAD, pad_to
from bloomery.models.pointwise import row_sum
from bloomery.models.products import linear

_VECTOR: Final = 8
"""Numbers of a row, of `ROW_PAD` rows together, that kernels compute as they compute those of many."""


class Routing:
    """Which experts the rows of one forward go to, and how much the answer of each counts, in each sparse layer in turn: recorded, and replayed where
    it is given.

    `given_RLT` [R, L, T] holds numbers of experts, or -1 in rows that the routers are free to send; `given_weights_RLT` float32 [R, L, T] what the
    answers are multiplied with, constants, or nan in rows whose experts the routers weigh. Shapes: L sparse layers.
    """

    def __init__(self, given_RLT: Tensor | None = None, given_weights_RLT: Tensor | None = None) -> None:
        self._given_RLT, self._given_weights_RLT = given_RLT, given_weights_RLT
        self._chosen: list[Tensor] = []
        self._weights: list[Tensor] = []

    @property
    def chosen_RLT(self) -> Tensor:
        """What was chosen, [R, L, T]."""
        return torch.stack(self._chosen, 1)

    @property
    def weights_RLT(self) -> Tensor:
        """What the answers were multiplied with [R, L, T], in the compute dtype."""
        return torch.stack(self._weights, 1)

    def choose(self, scores_RX: Tensor, top_k: int) -> Tensor:
        """The experts [R, T] of the next layer."""
        chosen_RT = scores_RX.topk(top_k, dim=-1).indices
        if self._given_RLT is not None:
            given_RT = self._given_RLT[:, len(self._chosen)]
            chosen_RT = torch.where(given_RT >= 0, given_RT, chosen_RT)
        self._chosen.append(chosen_RT)
        return chosen_RT

    def weigh(self, weights_RT: Tensor) -> Tensor:
        """The weights [R, T] of the experts just chosen, where `weights_RT` are the router's."""
        if self._given_weights_RLT is not None:
            given_RT = self._given_weights_RLT[:, len(self._weights)]
            weights_RT = torch.where(given_RT.isnan(), weights_RT, given_RT.to(weights_RT.dtype))
        self._weights.append(weights_RT.detach())
        return weights_RT


class Experts(nn.Module):
    """Router and experts of one layer, and those that every token goes to."""

    def __init__(self, config: ExpertsConfig, width: int, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.activation = config, activation
        self.router = nn.Parameter(torch.empty(config.num_experts, width, dtype=dtype))
        self.choice_bias: Tensor | None
        # In float32 whatever the dtype is: it tells apart experts that half precision would call equal.
        self.register_buffer("choice_bias", torch.empty(config.num_experts, dtype=torch.float32) if config.scoring == "sigmoid" else None)
        inner, own = config.intermediate_size, width if config.latent_size is None else config.latent_size
        self.gate_up = nn.Parameter(torch.empty(config.num_experts, gate_up_rows(inner, activation), own, dtype=dtype))
        self.down = nn.Parameter(torch.empty(config.num_experts, own, inner, dtype=dtype))
        self.latent_in = None if config.latent_size is None else nn.Parameter(torch.empty(own, width, dtype=dtype))
        self.latent_out = None if config.latent_size is None else nn.Parameter(torch.empty(width, own, dtype=dtype))
        self.shared = Mlp(width, config.shared_size, activation, dtype) if config.shared_size else None
        self.shared_gate = nn.Parameter(torch.empty(1, width, dtype=dtype)) if config.shared_gate else None

    def forward(self, x_RD: Tensor, name: str, adapters: AdapterRows, routing: Routing) -> Tensor:
        """Route every row and add its experts' answers in ascending order of expert, then that of the shared ones."""
        weights_RT, chosen_RT = self._routed(x_RD, routing)
        asked_RD = x_RD if self.latent_in is None else adapted_linear(x_RD, self.latent_in, f"{name}.latent_in", adapters)
        out_RD = self._answers(asked_RD, weights_RT, chosen_RT, name, adapters)
        if self.latent_out is not None:
            out_RD = adapted_linear(out_RD, self.latent_out, f"{name}.latent_out", adapters)
        if self.shared is None:
            return out_RD
        shared_RD: Tensor = self.shared(x_RD, f"{name}.shared", adapters)
        return out_RD + (shared_RD if self.shared_gate is None else shared_RD * _gate(x_RD, self.shared_gate))

    def _routed(self, x_RD: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Weight and number of every row's experts."""
        config = self.config
        if self.choice_bias is None:
            scores_RX = linear(x_RD, self.router).softmax(-1, dtype=torch.float32)
            chosen_RT = routing.choose(scores_RX, config.top_k)
        else:
            scores_RX = linear(x_RD.float(), self.router.float()).sigmoid()
            chosen_RT = routing.choose(_in_best_groups(scores_RX.detach() + self.choice_bias, config.groups, config.groups_kept), config.top_k)
        weights_RT = scores_RX.gather(1, chosen_RT)
        if config.normalise_top_k:
            weights_RT = weights_RT / row_sum(weights_RT)
        weights_RT = weights_RT if config.scale == 1.0 else weights_RT * config.scale
        return routing.weigh(weights_RT.to(x_RD.dtype)), chosen_RT

    def _answers(self, x_RD: Tensor, weights_RT: Tensor, chosen_RT: Tensor, name: str, adapters: AdapterRows) -> Tensor:
        parts = [
            self._segment(x_RD[start:stop], weights_RT[start:stop], chosen_RT[start:stop], name, adapter)
            for adapter, start, stop in adapters.segments
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _segment(self, x_RD: Tensor, weights_RT: Tensor, chosen_RT: Tensor, name: str, adapter: FusedAdapter | None) -> Tensor:
        # Taken apart once: a backward through `self.down[expert]` would write a gradient of all experts for each of them.
        gate_ups = _by_expert(self.gate_up, adapter.get(f"{name}.gate_up") if adapter is not None else None)
        downs = _by_expert(self.down, adapter.get(f"{name}.down") if adapter is not None else None)
        out_RD = torch.zeros_like(x_RD)
        for expert in chosen_RT.unique().tolist():
            rows, slot = torch.where(chosen_RT == expert)
            answer = _answer(x_RD[rows], gate_ups[expert], downs[expert], self.activation)
            out_RD = out_RD.index_add(0, rows, answer * weights_RT[rows, slot, None])
        return out_RD


def _gate(x_RD: Tensor, weight_1D: Tensor) -> Tensor:
    """One number for each row [R, 1], summed row by row: a product with so narrow a matrix depends on the number of rows."""
    sum_R1 = row_sum(x_RD.float() * weight_1D.float()).to(x_RD.dtype)
    # Side by side so often that the last rows fill a vector, as others do.
    return sum_R1.repeat(1, _VECTOR).sigmoid()[:, :1]


class _Projection(NamedTuple):
    """One expert's weight, and its adapter's factors."""

    weight: Tensor
    factors: Factors | None

    def __call__(self, x_RI: Tensor) -> Tensor:
        base_RO = linear(x_RI, self.weight)
        return base_RO if self.factors is None else low_rank_add(base_RO, x_RI, self.factors)


def _by_expert(weight_XOI: Tensor | nn.ParameterList, factors: Factors | None) -> list[_Projection]:
    # Packed ones are matrices of their own (`models/packed`).
    weights = weight_XOI.unbind() if isinstance(weight_XOI, Tensor) else list(weight_XOI)
    if factors is None:
        return [_Projection(weight, None) for weight in weights]
    parts = zip(weights, factors.a.unbind(), factors.b.unbind(), strict=True)
    return [_Projection(weight, Factors(a, b)) for weight, a, b in parts]


def _answer(x_RD: Tensor, gate_up: _Projection, down: _Projection, activation: str) -> Tensor:
    count = x_RD.shape[0]
    x_RD = F.pad(x_RD, (0, 0, 0, pad_to(count, ROW_PAD) - count))
    return down(ACTIVATIONS[activation](gate_up(x_RD)))[:count]


def _in_best_groups(scores_RX: Tensor, groups: int, kept: int) -> Tensor:
    """Scores, minus infinity outside the groups whose two best experts have the largest sum."""
    if kept == groups:
        return scores_RX
    grouped_RGX = scores_RX.unflatten(1, (groups, -1))
    best_RG = grouped_RGX.topk(2, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
    dropped_RG = torch.ones_like(grouped_RGX[..., 0], dtype=torch.bool).scatter_(1, best_RG, False)
    masked_RX: Tensor = grouped_RGX.masked_fill(dropped_RG[..., None], float("-inf")).flatten(1)
    return masked_RX
