"""Per-layer inputs (Gemma 3n and 4): beside the residual, every layer gets a small vector of its own for each token.

It comes from a second token embedding and from the first one's result, and is let in through a gate behind the layer's MLP.
Shapes: R packed rows, D hidden, N layers, P width of a layer's input.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.models.config import DecoderConfig, PerLayerConfig
from bloomery.models.pointwise import rms_norm
from bloomery.models.products import linear


class PerLayerInputs(nn.Module):
    """What the layers of a model get for some tokens."""

    def __init__(self, config: DecoderConfig, per_layer: PerLayerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        width = config.num_layers * per_layer.width
        self.per_layer, self.eps = per_layer, config.norm_eps
        self.embedding = nn.Parameter(torch.empty(per_layer.vocab_size, width, dtype=dtype))
        self.projection = nn.Parameter(torch.empty(width, config.hidden_size, dtype=dtype))
        self.norm = nn.Parameter(torch.empty(per_layer.width, dtype=dtype))

    def forward(self, tokens_R: Tensor, embedded_RD: Tensor) -> Tensor:
        """[R, N, P]."""
        width = self.per_layer.width
        scale = torch.tensor(math.sqrt(width), dtype=embedded_RD.dtype).item()
        own_RNP = (F.embedding(tokens_R, self.embedding) * scale).unflatten(1, (-1, width))
        projected_RNP = (linear(embedded_RD, self.projection) * embedded_RD.shape[1] ** -0.5).unflatten(1, (-1, width))
        together_RNP: Tensor = (rms_norm(projected_RNP, self.norm, self.eps) + own_RNP) * math.sqrt(0.5)
        return together_RNP


class PerLayerGate(nn.Module):
    """Lets a layer's input into the residual."""

    def __init__(self, config: DecoderConfig, per_layer: PerLayerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.gate = nn.Parameter(torch.empty(per_layer.width, config.hidden_size, dtype=dtype))
        self.projection = nn.Parameter(torch.empty(config.hidden_size, per_layer.width, dtype=dtype))
        self.norm = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype))

    def forward(self, x_RD: Tensor, input_RP: Tensor) -> Tensor:
        """What is added to the residual."""
        gated_RP = per_layer_gate(linear(x_RD, self.gate)) * input_RP
        return rms_norm(linear(gated_RP, self.projection), self.norm, self.eps)


def per_layer_gate(x_RP: Tensor) -> Tensor:
    """How much of each input is let in."""
    return F.gelu(x_RP, approximate="tanh")
