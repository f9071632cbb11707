"""What a benchmark ran on: part of every JSON line."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path


def machine() -> dict[str, object]:
    """Date, processor, usable cores, and versions."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
