"""The MLP of a dense layer, and of the experts that every token goes to. Shapes: R packed rows, D hidden, I intermediate.

Where an activation has no gate, `gate_up` is up alone.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from bloomery.models.adapters import AdapterRows, adapted_linear
from bloomery.models.config import UNGATED
from bloomery.models.pointwise import geglu, relu_squared, swiglu

ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {"silu": swiglu, "gelu_tanh": geglu, "relu_squared": relu_squared}
"""What makes of gate and up, side by side, the inner values."""


def gate_up_rows(inner: int, activation: str) -> int:
    """Rows of `gate_up`."""
    return inner if activation in UNGATED else 2 * inner


class Mlp(nn.Module):
    """Project up, activate, project back."""

    def __init__(self, width: int, inner: int, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(gate_up_rows(inner, activation), width, dtype=dtype))
        self.down = nn.Parameter(torch.empty(width, inner, dtype=dtype))
        self.activation = activation

    def forward(self, x_RD: Tensor, name: str, adapters: AdapterRows) -> Tensor:
        """`down(activation(gate) * up)`, or `down(activation(up))`, with the adapters of `name`."""
        inner_RI = ACTIVATIONS[self.activation](adapted_linear(x_RD, self.gate_up, f"{name}.gate_up", adapters))
        return adapted_linear(inner_RI, self.down, f"{name}.down", adapters)
