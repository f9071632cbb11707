"""Work on many things by several threads, whose results come in the order of the things."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Final, TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")
_AHEAD: Final = 2
"""Things that are begun per thread before their results are asked for: what bounds the memory that they take."""


def in_order(work: Callable[[_T], _R], things: Iterable[_T], workers: int) -> Iterator[tuple[_T, _R]]:
    """Each thing with what came of it, in the context of whoever asks, who is the only worker if there is one; what fails ends it, at its place."""
    if workers == 1:
        yield from ((thing, work(thing)) for thing in things)
        return
    waiting: deque[tuple[_T, Future[_R]]] = deque()
    with ThreadPoolExecutor(workers, "codec") as pool:
        try:
            for thing in things:
                waiting.append((thing, pool.submit(copy_context().run, work, thing)))
                if len(waiting) >= workers * _AHEAD:
                    first, result = waiting.popleft()
                    yield first, result.result()
            while waiting:
                first, result = waiting.popleft()
                yield first, result.result()
        finally:
            for _, result in waiting:
                result.cancel()
