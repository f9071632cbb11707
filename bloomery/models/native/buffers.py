"""Memory as kernels take it: room for answers, rows with vectors in one piece, numbers at an address."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bloomery.models.compiled import INTEGER as _I
from bloomery.models.memory import LargePages
from bloomery.models.program import current_recorder


def floats(*shape: int, zeros: bool = False) -> Tensor:
    """Room for an answer, whatever the process that we are part of takes for its default dtype and device."""
    if not zeros and (recorder := current_recorder()) is not None:
        return recorder.floats(shape)
    return (torch.zeros if zeros else torch.empty)(shape, dtype=torch.float32, device="cpu")


def lasting(pages: LargePages | None, *shape: int, dtype: torch.dtype) -> Tensor:
    """Room for what stays, in these pages where there are some."""
    if pages is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return pages.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def halves(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cpu")


def rows(x: Tensor) -> Tensor:
    """With vectors in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def integers(numbers: Iterable[int]) -> Any:
    """What a kernel reads at an address; programs keep it."""
    own = tuple(numbers)
    return (_I * len(own))(*own)
