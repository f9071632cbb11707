"""What starts fast stays slim: the command line, the api and the client load no torch, seen from outside."""

import subprocess
import sys

import pytest

REPORT = "import sys; import {module}; print(*sorted({heavy} & set(sys.modules)))"
HEAVY = {"torch", "transformers", "sklearn", "scipy"}


@pytest.mark.parametrize(
    "module",
    [
        "bloomery.cli.main",
        "bloomery.api.app",
        "bloomery.client",
        "bloomery.up.start",
        "bloomery.services.core",
        "bloomery.grade.pool",
        "bloomery.sync.chain.receiver",
    ],
)
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", REPORT.format(module=module, heavy=HEAVY)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["doctor", "--help"], ["--version"]], ids=" ".join)
def test_asking_for_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print('loaded:', *sorted({HEAVY} & set(sys.modules))))\n"
        "from bloomery.cli.main import app\n"
        f"app({arguments!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split() == ["loaded:"]
