"""The memory that operations are admitted to: what is free now, and how much there is at all."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from bloomery.models.memory import free_bytes
from bloomery.obs.machine import total_memory_bytes

Bytes = Callable[[torch.device], int]


def whole_bytes(device: torch.device) -> int:
    """All memory where a model lives, whoever holds it."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else total_memory_bytes()


def reusable_bytes(device: torch.device) -> int:
    """What is free, and what this process keeps for its next tensors."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return free_bytes(device) + kept


class Memory(NamedTuple):
    """Where to ask."""

    free: Bytes = reusable_bytes
    whole: Bytes = whole_bytes
