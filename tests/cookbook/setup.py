"""What the recipes run in: an environment with `tinker-cookbook` as it was published, and a folder that gives them models and data.

The recipes look up tokenizers and data sets by the names of a hub. Where a folder of such a name lies in the working directory, they take that
instead: nothing is patched, and once the environment is there, nothing is downloaded. `python -m tests.cookbook.setup FOLDER` makes both, for
trying recipes by hand.
"""

import fcntl
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

from bloomery.models import tiny
from tests.certificates import trusting
from tests.cookbook.rows import write_data_sets

ROOT: Final = Path(__file__).parents[2]
REQUIREMENTS: Final = ROOT / "requirements-cookbook.txt"
ENVIRONMENT: Final = ROOT / "build" / "cookbook"

BASE_MODEL: Final = "Qwen/Qwen3.5-9B-Base"
"""What the recipes train by default; its renderer is plain text."""
CHAT_MODEL: Final = "Qwen/Qwen3-8B"
"""Its renderer writes `<|im_start|>` and `<|im_end|>`, which bloomery-tiny has."""
SERVED: Final = tuple(f"--model={name}={tiny.PATH}" for name in (BASE_MODEL, CHAT_MODEL))

_PROJECT_PACKAGES: Final = Path(sysconfig.get_path("purelib")).resolve()
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "config.json")
_INSTALL_S: Final = 600.0


class Place(NamedTuple):
    """The interpreter that has the cookbook, and the folder to run recipes in."""

    python: Path
    folder: Path


def prepare(folder: Path) -> Place:
    """Make what is missing. Without a package index this fails with what pip said, unless the environment was made before."""
    for name in (BASE_MODEL, CHAT_MODEL):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file in _TOKENIZER_FILES:
            shutil.copyfile(tiny.PATH / file, folder / name / file)
    write_data_sets(folder)
    return Place(environment(ENVIRONMENT, REQUIREMENTS), folder)


def environment(place: Path, requirements: Path) -> Path:
    """The interpreter of a virtual environment that sees the project's packages by a path file, so that torch is there once; its own come first."""
    python = place / "bin" / "python"
    made_from = sha256(f"{requirements.read_text()}{sys.version}{_PROJECT_PACKAGES}".encode()).hexdigest()
    with _alone(place):
        ready = place / "ready"
        if ready.exists() and ready.read_text() == made_from:
            return python
        _run(sys.executable, "-m", "venv", "--clear", str(place))
        own_packages = place / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (own_packages / "project.pth").write_text(f"{_PROJECT_PACKAGES}\n")
        # Most of what they bring is never imported: what is, is compiled then.
        quietly = ("--no-compile", "--progress-bar=off", "--disable-pip-version-check")
        _run(str(python), "-m", "pip", "install", "--no-deps", *quietly, "-r", str(requirements))
        ready.write_text(made_from)
        return python


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Another worker of the suite may want the same environment at the same time: it waits."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False, env=trusting())
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed with status {done.returncode}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    print(prepare(Path(sys.argv[1]).absolute()).python)
