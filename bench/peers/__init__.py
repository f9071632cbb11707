"""Peers: programs that others wrote, each in a virtual environment of its own, and the scripts that run inside them.

The scripts import nothing of Bloomery, but for the spike that puts another engine behind its protocol.
Environments lie in `bench/.venvs` and are made once, from the package index.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

VENVS: Final = Path(__file__).parents[1] / ".venvs"
PACKAGES: Final = {
    # torch first and pinned: an open range would bring a CUDA build. So would SkyRL's extra `jax`.
    "arc": ("torch==2.13.0", "fireworks-delta-compression==0.1.0", "numpy", "zstandard"),
    # `uv`, because it starts its engine through it.
    "skyrl": ("torch==2.13.0", "skyrl-tx[tinker]==0.3.0", "uv", "jax>=0.8,<1.0", "flax>=0.12.2", "optax>=0.2.5"),
    "tinker-0.16": ("tinker==0.16.1", "numpy"),
    "trl": ("torch==2.13.0", "trl==1.16.0", "peft==0.21.2", "transformers==5.23.0", "datasets"),
}


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment, which is made when it is missing."""
    place = VENVS / peer
    interpreter, ready = place / "bin" / "python", place / "ready"
    if not ready.exists():
        print(f"making {place} for {', '.join(PACKAGES[peer])}, once; it takes some minutes", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        # The first again with the rest, or one of these may bring another version of it.
        for packages in (PACKAGES[peer][:1], PACKAGES[peer]):
            _install(interpreter, packages)
        ready.touch()
    return interpreter


def command(peer: str, *arguments: object) -> str:
    """What was run, for the JSON line, with the packages of the environment it ran in."""
    return f"({' '.join(PACKAGES[peer])}) python {' '.join(map(str, arguments))}"


def _install(interpreter: Path, packages: Sequence[str]) -> None:
    subprocess.run([interpreter, "-m", "pip", "install", "-q", "--progress-bar", "off", *packages], check=True, stdout=sys.stderr)
