"""Identifiers: time-ordered uuid7 inside; every contract's own names are alias rows."""

import os
import time
from typing import Final

NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Of data sets, jobs, deployments and whatever else its maker calls as he likes."""


def new_id(kind: str) -> str:
    """A fresh id such as `run-0197f3a2c4d07b3e9f1a2b3c4d5e6f70`: uuid7 as hex behind its kind, sorted by birth."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"{kind}-{value:032x}"


def now_us() -> int:
    """Microseconds since the epoch, UTC: the unit of every stored time."""
    return time.time_ns() // 1_000


def expiry_us(ttl_s: int | None, since_us: int) -> int | None:
    """When what lives for `ttl_s` ends; None for what lives for ever."""
    return None if ttl_s is None else since_us + ttl_s * 1_000_000
