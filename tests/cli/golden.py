"""What every command says of itself: `python -m tests.cli.golden` rewrites the golden file, whose diff is reviewed."""

import os
import subprocess
from pathlib import Path

import typer
from typer.core import TyperGroup

from bloomery.cli.main import app
from tests.live import BLOOMERY

GOLDEN = Path(__file__).parent.parent / "golden" / "cli_help.txt"
# Nothing else of the environment, but for where the code lies: CI systems ask for colours by variables of their own.
PLAIN = {"PATH": os.environ["PATH"], "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1", "PYTHONPATH": os.getenv("PYTHONPATH", "")}


def every_help() -> str:
    """The help of the program and of each command, 100 columns wide and without colours."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return "\n".join(_help(*command) for command in [(), *((name,) for name in group.commands)])


def _help(*command: str) -> str:
    argv = [BLOOMERY, *command, "--help"]
    said = subprocess.run(argv, env=PLAIN, capture_output=True, text=True, check=True).stdout
    lines = "\n".join(line.rstrip() for line in said.strip("\n").splitlines())
    return f"$ {' '.join(['bloomery', *argv[1:]])}\n{lines}\n"


if __name__ == "__main__":
    GOLDEN.write_text(every_help())
