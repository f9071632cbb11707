"""How many threads torch computes with."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch

FEW_NUMBERS: Final = 1 << 20
"""Of which one thread updates, copies or compares no later than two on an idle machine; on a busy one it waits for nobody."""


def compute_with(threads: int) -> None:
    """Have torch compute with so many from here on."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute with one for a while."""
    threads = torch.get_num_threads()
    compute_with(1)
    try:
        yield
    finally:
        compute_with(threads)


def threads_for(numbers: int) -> AbstractContextManager[None]:
    """One thread for what is done with each of a few numbers, whose bits depend on no number of threads; else all."""
    return one_thread() if numbers <= FEW_NUMBERS else nullcontext()
