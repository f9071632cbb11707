"""Where Eval Protocol runs: the package as it was published, in a virtual environment that sees the project's packages behind its own."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx

from tests.cookbook.setup import ROOT, environment
from tests.live import READY_S, STOP_S, wait_until

REQUIREMENTS: Final = ROOT / "requirements-eval-protocol.txt"
ENVIRONMENT: Final = ROOT / "build" / "eval-protocol"


def interpreter() -> Path:
    """Make it where it is missing."""
    return environment(ENVIRONMENT, REQUIREMENTS)


def surroundings(folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    """The package keeps records in its user's home, and looks up prices unless it is told not to."""
    own = {"PYTHONPATH": str(ROOT), "HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own, **more}


@contextmanager
def rollout_server(port: int, gateway_url: str, folder: Path) -> Iterator[None]:
    """The server of `tests.eval_protocol.server`, as its user starts it."""
    said = folder / "server.log"
    with said.open("wb") as output:
        command = [str(interpreter()), "-m", "tests.eval_protocol.server", str(port)]
        env = surroundings(folder, {"FW_TRACING_GATEWAY_BASE_URL": gateway_url})
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
    try:
        wait_until(lambda: _answers(port) or process.poll() is not None, READY_S)
        assert process.poll() is None, said.read_text()
        yield
    finally:
        process.terminate()
        process.wait(STOP_S)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/openapi.json").is_success
    except httpx.TransportError:
        return False
