"""Named places where a test may kill the process: `BLOOMERY_FAILPOINTS=journal.payload.synced@3:/tmp/marker`.

A failpoint kills with SIGKILL when it is reached for the n-th time in a process, once ever: the marker file it leaves disarms it for the
restarted process. One without a marker kills from the n-th time on, in every process.
Several are separated by commas. Without the variable a failpoint costs one dictionary look-up.
"""

import os
import signal
from collections import Counter
from pathlib import Path


def _parse(value: str) -> dict[str, tuple[int, Path | None]]:
    armed = {}
    for item in filter(None, value.split(",")):
        point, _, marker = item.partition(":")
        name, _, nth = point.partition("@")
        armed[name] = (int(nth or 1), Path(marker) if marker else None)
    return armed


_armed = _parse(os.environ.get("BLOOMERY_FAILPOINTS", ""))
_reached: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Die here if a test asked for it."""
    if name not in _armed:
        return
    nth, marker = _armed[name]
    _reached[name] += 1
    if marker is None and _reached[name] >= nth:
        os.kill(os.getpid(), signal.SIGKILL)
    elif marker is not None and _reached[name] == nth and not marker.exists():
        marker.write_text(f"{os.getpid()}\n")
        os.kill(os.getpid(), signal.SIGKILL)
