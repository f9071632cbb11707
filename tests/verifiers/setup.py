"""Where environments of `verifiers` run: the published package in a virtual environment that sees the project's packages behind its own."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

from tests.cookbook.setup import ROOT, environment
from tests.live import LiveServer

REQUIREMENTS: Final = ROOT / "requirements-verifiers.txt"
ENVIRONMENT: Final = ROOT / "build" / "verifiers"
_RUN_S: Final = 240.0


def run(server: LiveServer, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows that `tests.verifiers.loop` prints."""
    python = environment(ENVIRONMENT, REQUIREMENTS)
    done = subprocess.run(
        [str(python), "-m", "tests.verifiers.loop", *arguments],
        capture_output=True,
        text=True,
        timeout=_RUN_S,
        check=False,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "BLOOMERY_URL": server.url,
            "BLOOMERY_API_KEY": server.key,
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "hf"),
        },
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
