"""What a benchmark ran on, which is part of every JSON line, and what processes took of it."""

import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from bloomery.obs.machine import processor_flags

_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "asimd")
"""The widest counts: it decides what a product costs, and whether bfloat16 helps."""


def machine() -> dict[str, object]:
    """What was asked, date, processor, usable cores, and versions.

    `million_additions_ms` is how long a loop of Python takes: absolute figures of machines that differ in it say little beside each other.
    """
    return {
        "command": f"python {' '.join(sys.orig_argv[1:])}",
        "date": datetime.now(UTC).date().isoformat(),
        "processor": _processor(),
        "instructions": next((name for name in _INSTRUCTIONS if name in processor_flags()), "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "million_additions_ms": round(1000 * min(_additions_s() for _ in range(5)), 1),
    }


def device_name(device: str) -> str:
    """Of a GPU its maker's, of a processor `cpu`: which one it is stands in the line already."""
    return "cpu" if device == "cpu" else torch.cuda.get_device_name(device)


def processor_s(ancestor: int, *, waited_for: bool = False) -> float:
    """Seconds of processor time that the living descendants of a process have had so far, and those that they have waited for, if asked."""
    parents, seconds = {}, {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            # Behind the name of the program, which may hold anything: state, parent, and from the twelfth on user and system time, its own and
            # that of children.
            told = (place / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(place.name)], seconds[int(place.name)] = (
            int(told[1]),
            sum(map(int, told[11 : 15 if waited_for else 13])) / os.sysconf("SC_CLK_TCK"),
        )
    family = {ancestor}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(seconds.get(child, 0.0) for child in family - {ancestor})


def _additions_s() -> float:
    began, total = time.perf_counter(), 0
    for number in range(1_000_000):
        total += number
    return time.perf_counter() - began


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
