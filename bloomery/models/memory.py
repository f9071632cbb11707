"""How much more may be held where a model lives."""

import torch

from bloomery.obs.machine import free_memory_bytes


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory_bytes()
