"""The memory that runs and operations are admitted to: what is free now, how much there is at all, and who waits for some."""

from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from bloomery.models.memory import free_bytes
from bloomery.obs.machine import total_memory_bytes

MEMORY_WAIT_S: Final = 60.0
"""How long whoever finds none waits for memory that others hold."""
_LOOK_S: Final = 0.2
"""So long after it was not there it is looked for again."""

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


class _Wait(NamedTuple):
    """Since when somebody waits, and when there is reason to look for memory again."""

    since_s: float
    look_at_s: float


class MemoryWaits:
    """Who waits for memory, by name."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._waits: dict[str, _Wait] = {}

    @property
    def anybody(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waits)

    def go_on(self, who: str) -> bool:
        """Wait, and look again in a moment; False when the time for it is over."""
        now_s = self._clock_s()
        since_s = self._waits[who].since_s if who in self._waits else now_s
        if now_s >= since_s + MEMORY_WAIT_S:
            return False
        self._waits[who] = _Wait(since_s, now_s + _LOOK_S)
        return True

    def end(self, who: str) -> None:
        """Wait no more."""
        self._waits.pop(who, None)

    def due_in_s(self, who: str) -> float:
        """How long until there is reason to look: 0 for whoever does not wait."""
        return max(0.0, self._waits[who].look_at_s - self._clock_s()) if who in self._waits else 0.0
