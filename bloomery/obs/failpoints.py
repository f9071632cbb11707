"""Named places where a test may kill the process: `BLOOMERY_FAILPOINTS=journal.payload.synced@3:/tmp/marker`.

A failpoint kills with SIGKILL when it is reached for the n-th time in a process, once ever: the marker file it leaves disarms it for the
restarted process. One without a marker kills from the n-th time on, in every process. `engine.pass.7!SIGSEGV` kills with another signal.
Several are separated by commas. Without the variable a failpoint costs one dictionary look-up.
"""

import os
import signal
from collections import Counter
from pathlib import Path
from typing import NamedTuple


class _Armed(NamedTuple):
    """When and how to die at a point."""

    nth: int
    kills_with: signal.Signals
    marker: Path | None


def _parse(value: str) -> dict[str, _Armed]:
    armed = {}
    for item in filter(None, value.split(",")):
        point, _, marker = item.partition(":")
        place, _, kills_with = point.partition("!")
        name, _, nth = place.partition("@")
        armed[name] = _Armed(int(nth or 1), signal.Signals[kills_with or "SIGKILL"], Path(marker) if marker else None)
    return armed


_armed = _parse(os.environ.get("BLOOMERY_FAILPOINTS", ""))
_reached: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Die here if a test asked for it."""
    if name not in _armed:
        return
    nth, kills_with, marker = _armed[name]
    _reached[name] += 1
    if marker is None and _reached[name] >= nth:
        signal.raise_signal(kills_with)
    elif marker is not None and _reached[name] == nth and not marker.exists():
        marker.write_text(f"{os.getpid()}\n")
        signal.raise_signal(kills_with)
