"""AdamW as torch defines it, over one flat vector per run."""

import math

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from bloomery.types.errors import InvalidInput
from bloomery.types.operations import AdamParams

_CLIP_EPS = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""
_LARGEST_NORM = 1e19
"""The second moment holds squares of gradients: above this one would become infinite, and its parameter never move again."""
_PIECE = 1 << 20
"""Elements of which float64 squares exist at once."""


class AdamW:
    """Both moments and the number of steps taken."""

    def __init__(self, masters: Tensor) -> None:
        self.first = torch.zeros_like(masters)
        self.second = torch.zeros_like(masters)
        self.steps = 0

    def step(self, masters: Tensor, gradients: Tensor, params: AdamParams) -> float:
        """Change `masters` in place (and scale `gradients` where they are clipped); returns the norm before clipping."""
        norm = gradient_norm(gradients)
        if not math.isfinite(norm):
            raise InvalidInput(f"the gradient norm is {norm}: no step was taken and the gradients were cleared; lower the loss's weights")
        if (min(norm, params.grad_clip_norm) if params.grad_clip_norm > 0 else norm) > _LARGEST_NORM:
            raise InvalidInput(
                f"the gradient norm is {norm:.3g}, whose square no float32 holds: no step was taken and the gradients were cleared; "
                f"lower the loss's weights, or set grad_clip_norm"
            )
        if params.grad_clip_norm > 0:
            gradients.mul_(min(1.0, params.grad_clip_norm / (norm + _CLIP_EPS)))
        adamw(
            [masters],
            [gradients],
            [self.first],
            [self.second],
            [],
            [torch.tensor(float(self.steps), device=masters.device)],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=params.beta1,
            beta2=params.beta2,
            lr=params.learning_rate,
            weight_decay=params.weight_decay,
            eps=params.eps,
        )
        self.steps += 1
        return norm


def gradient_norm(gradients: Tensor) -> float:
    """Euclidean norm in float64, added up in one order whatever the number of threads, a piece at a time."""
    return math.sqrt(sum(float(np.sum(np.square(piece.cpu().numpy(), dtype=np.float64))) for piece in gradients.split(_PIECE)))
