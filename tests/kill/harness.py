"""The workload's process, started and read by the tests of this folder.

It runs apart (`python -m tests.kill.workload`), so that a reference and a disturbed run have nothing in common but the operations they submit.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.live import LiveServer

WORK_S = 240.0


class Outcome(NamedTuple):
    """Of one workload."""

    diary: list[dict[str, Any]]
    reports: list[dict[str, Any]]


def start_workload(to: LiveServer, tenants: int = 1, *, poisoned: int | None = None) -> "subprocess.Popen[str]":
    """Submit the operations from another process; `finish` reads what came of them."""
    argv = [sys.executable, "-m", "tests.kill.workload", to.url, to.key, str(tenants), *([] if poisoned is None else [str(poisoned)])]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def finish(workload: "subprocess.Popen[str]", meanwhile: Callable[[int], None] = lambda written: None) -> Outcome:
    """What the workload wrote down, and what came of it: of every tenant each loss and the final weights hash.

    `meanwhile` is told how many lines were written as each appears.
    """
    late = threading.Timer(WORK_S, workload.kill)
    late.start()
    lines: list[Any] = []
    try:
        with workload:
            assert workload.stdout is not None
            for line in workload.stdout:
                lines.append(json.loads(line))
                meanwhile(len(lines))
    finally:
        late.cancel()
    assert workload.returncode == 0, lines
    *diary, reports = lines
    return Outcome(diary, reports)
