"""How many rows are computed at once: with fewer, others wait less; with more, less is spent on what does not grow with them."""

from typing import Final

MIN_ROWS: Final = 512
MAX_ROWS: Final = 1024
_FILLED: Final = 1 << 18
"""Numbers in a tensor of the model's width from which on a CPU computes about as fast as it can."""


def rows_at_once(width: int) -> int:
    """Rows of a pass, and of a micro-batch of an adapter, in a model of this width."""
    return max(MIN_ROWS, min(MAX_ROWS, _FILLED // width))


def micro_batch_tokens(width: int, *, rank: int) -> int:
    """The budget of a new run, which keeps it for life, because replays must split alike.

    All parameters (rank 0) have gradients as large as the model, written once per micro-batch.
    """
    return MAX_ROWS if rank == 0 else rows_at_once(width)
