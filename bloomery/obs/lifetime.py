"""Processes that must not outlive the one that started them."""

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def end_with(parent: int, number: int) -> Callable[[], None] | None:
    """Runs in the child before the program: the kernel sends it `number` when the thread that started it ends, however that happens."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)

    return arrange
