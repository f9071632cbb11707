"""How many threads torch computes with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
