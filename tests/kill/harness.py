"""The workload's process, started and read by the tests of this folder.

It runs apart (`python -m tests.kill.workload`), so that a reference and a disturbed run have nothing in common but the operations they submit.
"""

import json
import subprocess
import sys
from typing import Any

from tests.live import LiveServer

WORK_S = 240.0


def start_workload(to: LiveServer, seed: int = 1) -> "subprocess.Popen[str]":
    """Submit the operations from another process; `finish` reads what came of them."""
    argv = [sys.executable, "-m", "tests.kill.workload", to.url, to.key, str(seed)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def finish(workload: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """The workload's diary; the last line is its report: every loss, and the final weights hash."""
    output, _ = workload.communicate(timeout=WORK_S)
    assert workload.returncode == 0, output
    return [json.loads(line) for line in output.splitlines()]
