"""Rests in long work that is done beside others: beside decode steps, as whoever copies, hashes and probes new weights does it.

Python's lock goes round among threads. Work that is mostly short calls takes it back as soon as a call returns, before those who wait for it are
awake, so a step that needs it a hundred times waits for up to half of its own time, and in the worst of some dozens for more than a step.
`resting` says whom a thread works beside; `rest`, between two pieces of its work, gives them as long as these took. Elsewhere it does nothing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import Final

PIECE_S: Final = 0.0002
"""Work that needs no rest: a fraction of the step of a small model, and more than it takes to wake up."""
_LONGEST_REST_S: Final = 0.0005
"""What takes longer is a single call, which has no use for Python's lock."""
_of_thread = local()


@dataclass(slots=True)
class _Beside:
    """Whom a thread works beside, and since when without a rest."""

    busy: Callable[[], bool]
    piece_s: float
    began_s: float


@contextmanager
def resting(busy: Callable[[], bool], *, piece_s: float = PIECE_S) -> Iterator[None]:
    """This thread rests behind every piece of its work, while others are `busy`."""
    outer = _beside()
    _of_thread.beside = _Beside(busy, piece_s, time.perf_counter())
    try:
        yield
    finally:
        _of_thread.beside = outer


def rest() -> None:
    """A piece of work may end here."""
    if (beside := _beside()) is None:
        return
    worked_s = time.perf_counter() - beside.began_s
    if worked_s >= beside.piece_s and beside.busy():
        time.sleep(min(worked_s, _LONGEST_REST_S))
        beside.began_s = time.perf_counter()


def _beside() -> _Beside | None:
    return getattr(_of_thread, "beside", None)
