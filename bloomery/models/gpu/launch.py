"""Whether there are kernels for GPUs here, and what they take."""

from functools import cache
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

DTYPES: Final = (torch.float32, torch.bfloat16)
_ALIGNED_BYTES: Final = 16


@cache
def kernels() -> ModuleType | None:
    """Theirs; None where there is no Triton, which comes with torch for GPUs."""
    try:
        return import_module("bloomery.models.gpu.kernels")
    except ImportError:
        return None


def loaded() -> ModuleType:
    """The same for callers that asked `available`."""
    found = kernels()
    assert found is not None
    return found


def available(*tensors: Tensor) -> bool:
    """Whether kernels take them: float32 or bfloat16 on a GPU, where there is Triton."""
    return all(tensor.is_cuda and tensor.dtype in DTYPES for tensor in tensors) and kernels() is not None


def identity() -> str:
    """Whose kernels compute, for the numerics id; those themselves are among our own sources."""
    return f"triton {version('triton')}"


def aligned(tensor: Tensor) -> Tensor:
    """It, or a copy that begins where whole vectors are read: kernels that read numbers one by one sum them in another order."""
    return tensor.clone() if tensor.data_ptr() % _ALIGNED_BYTES else tensor


def tile(width: int, most: int) -> int:
    """The least power of two that holds a width, or the most; 16 at least, which instructions for products ask for."""
    return min(most, power_of_two(max(16, width)))


def power_of_two(count: int) -> int:
    """The least that is no smaller."""
    return 1 << (count - 1).bit_length()
