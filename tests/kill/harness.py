"""The workload's process, started and read by the tests of this folder.

It runs apart (`python -m tests.kill.workload`), so that a reference and a disturbed run have nothing in common but the operations they submit.
"""

import json
import subprocess
import sys
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


def finish(workload: "subprocess.Popen[str]") -> Outcome:
    """What the workload wrote down, and what came of it: of every tenant each loss and the final weights hash."""
    output, _ = workload.communicate(timeout=WORK_S)
    assert workload.returncode == 0, output
    *diary, reports = [json.loads(line) for line in output.splitlines()]
    return Outcome(diary, reports)
