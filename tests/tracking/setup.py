"""Where trackers are: their packages as they were published, in a virtual environment that sees the project's packages behind its own."""

import json
import os
import subprocess
from pathlib import Path
from typing import Final

from tests.cookbook.setup import ROOT, environment

REQUIREMENTS: Final = ROOT / "requirements-trackers.txt"
ENVIRONMENT: Final = ROOT / "build" / "trackers"
_READ_S: Final = 120.0

Series = dict[str, list[tuple[int, float]]]
"""Steps and values of a metric, by its name."""


def python() -> Path:
    """The interpreter that has them."""
    return environment(ENVIRONMENT, REQUIREMENTS)


def around(**more: str) -> dict[str, str]:
    """The environment variables of a program that runs there, which talks to nobody."""
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    return {**os.environ, "PYTHONPATH": str(ROOT), **quiet, **more}


def read_back(tracker: str, target: str, job: str) -> Series:
    """What a tracker has of a job, by the means of its own package."""
    argv = [str(python()), "-m", "tests.tracking.read_back", tracker, target, job]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_READ_S, check=False, cwd=ROOT, env=around())
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return {name: [(int(step), value) for step, value in series] for name, series in found.items()}
