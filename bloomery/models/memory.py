"""How much more may be held where a model lives, and room in large pages for what stays there."""

import mmap
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from bloomery.models.pads import pad_to
from bloomery.obs.machine import free_memory_bytes

_LARGE_PAGE: Final = 2 << 20
"""Bytes of one, on the processors that we know of."""
_STRETCH: Final = 32 * _LARGE_PAGE
"""Bytes that are asked for at a time, and stay as long as anything that lies there does."""
_ALIGNED: Final = 64
"""Bytes, as torch places its tensors."""


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory_bytes()


def large_pages(size_bytes: int) -> Tensor:
    """Zeros [bytes] in main memory, in large pages where the system has them. MemoryError where there is none.

    A processor that reads one number after the other reads faster there: it looks up fewer pages, and what it brings near by itself ends with a page.
    What nobody writes takes neither time nor memory, page by page.
    """
    size = pad_to(size_bytes, _LARGE_PAGE)
    try:
        pages = mmap.mmap(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system gives no {size_bytes} bytes of memory") from error
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    start = -memory.data_ptr() % _LARGE_PAGE
    if size and hasattr(mmap, "MADV_HUGEPAGE"):
        # A system can be built without them; what lies in small ones is read all the same.
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE, start, size)
    return memory[start : start + size_bytes]


class LargePages:
    """Room in large pages for what comes and goes together: one thing behind the other, in stretches that are given back when nothing lies there.

    So small things have large pages too, and all of them few mappings: a process may have 65,530.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size_bytes: int) -> Tensor:
        """Zeros [bytes]."""
        size = pad_to(size_bytes, _ALIGNED)
        if len(self._left) < size:
            self._left = large_pages(max(size, _STRETCH))
        taken, self._left = self._left[:size_bytes], self._left[size:]
        return taken
