"""Where work on the body of a request or an answer is done: at once while it is small, else on a thread, so that it holds nobody up."""

import asyncio
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SMALL_BYTES: Final = 1 << 16
"""To hand work to a thread and back costs more than to decode or encode so much."""


async def off_loop(size_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns; `size_bytes` is how much it reads or writes."""
    if size_bytes <= SMALL_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
