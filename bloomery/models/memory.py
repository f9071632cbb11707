"""How much more may be held where a model lives, and memory in pages that fit it."""

import mmap
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from bloomery.obs.machine import free_memory_bytes

_LARGE_PAGE: Final = 2 << 20
"""Bytes of one, on the processors that we know of."""


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory_bytes()


def large_pages(size_bytes: int) -> Tensor:
    """Zeros [bytes] in main memory, for what stays and is read again and again: in large pages where the system has them, but for what fills none.

    A processor that reads one after the other reads faster, for it looks up fewer, and brings near what follows only as far as a page goes. What
    nobody writes takes neither time nor memory.
    """
    pages = mmap.mmap(-1, size_bytes + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    start, whole = -memory.data_ptr() % _LARGE_PAGE, size_bytes // _LARGE_PAGE * _LARGE_PAGE
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        # A system can be built without them.
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return memory[start : start + size_bytes]
