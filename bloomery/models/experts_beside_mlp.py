"""Experts beside a dense MLP (Gemma 4): both read the residual, each behind norms of its own, and their answers are added.

Shapes: R packed rows, D hidden, X experts, T experts per token.
"""

import torch
from torch import Tensor, nn

from bloomery.models.adapters import AdapterRows
from bloomery.models.config import ExpertsConfig
from bloomery.models.experts import Experts, Routing
from bloomery.models.pointwise import rms_norm, row_sum, unit_norm
from bloomery.models.products import linear


class ExpertsBesideMlp(Experts):
    """Router and experts of one layer, the norms around them, and the norm behind the dense MLP."""

    def __init__(self, config: ExpertsConfig, width: int, activation: str, eps: float, dtype: torch.dtype) -> None:
        super().__init__(config, width, activation, dtype)
        self.eps = eps
        self.router_scale = nn.Parameter(torch.empty(width, dtype=dtype))
        self.expert_scale = nn.Parameter(torch.empty(config.num_experts, dtype=dtype))
        self.norm, self.out_norm, self.dense_out_norm = (nn.Parameter(torch.empty(width, dtype=dtype)) for _ in range(3))

    def add(self, dense_RD: Tensor, x_RD: Tensor, name: str, adapters: AdapterRows, routing: Routing) -> Tensor:
        """What the dense MLP and the experts say of the residual `x_RD`."""
        weights_RT, chosen_RT = self._routed(x_RD, routing)
        answers_RD = self._answers(rms_norm(x_RD, self.norm, self.eps), weights_RT, chosen_RT, name, adapters)
        return rms_norm(dense_RD, self.dense_out_norm, self.eps) + rms_norm(answers_RD, self.out_norm, self.eps)

    def _routed(self, x_RD: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        scaled_RD = unit_norm(x_RD, self.eps) * self.router_scale * x_RD.shape[1] ** -0.5
        probabilities_RX = linear(scaled_RD, self.router).softmax(-1, dtype=torch.float32)
        chosen_RT = routing.choose(probabilities_RX, self.config.top_k)
        weights_RT = probabilities_RX.gather(1, chosen_RT)
        weights_RT = weights_RT / row_sum(weights_RT)
        return routing.weigh((weights_RT * self.expert_scale[chosen_RT]).to(x_RD.dtype)), chosen_RT
