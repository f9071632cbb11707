"""Where `fireworks-delta-compression` runs: as it was published, in a virtual environment that sees the project's packages behind its own."""

import os
import subprocess
from pathlib import Path
from typing import Final

from tests.cookbook.setup import ROOT, environment

REQUIREMENTS: Final = ROOT / "requirements-arc.txt"
ENVIRONMENT: Final = ROOT / "build" / "arc"
_RUN_S: Final = 300.0
_PATIENCE: Final = {"ARC3_CANDIDATE_WAIT_MULTIPLIER": "1000000"}
"""So that arc_v3 waits for all that it tries, and the smallest does not depend on what else the machine does."""


def run(*arguments: str | Path) -> None:
    """`tests.sync.foreign.peer` there."""
    argv = [str(environment(ENVIRONMENT, REQUIREMENTS)), "-m", "tests.sync.foreign.peer", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **_PATIENCE}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_RUN_S, check=False, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
