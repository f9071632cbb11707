"""What kernels are tried with: rows of noise, as many of them as a pass or a step may have."""

from typing import Final

import torch
from torch import Tensor

from bloomery.models.pads import ROW_PAD

ROW_COUNTS: Final = (ROW_PAD, 8, 12, 36, 64, 132, 260, 708, 1028)
"""Decode has as many as 64 versions padded, prefill as a chunk of 512 with the pads of 64 prompts, training as a pass and more."""
FEW_ROWS: Final = tuple(range(1, ROW_PAD))


def noise(*shape: int, like: Tensor, seed: int = 0) -> Tensor:
    """The same numbers each time, of the dtype and on the device of another tensor."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)
