"""What every command says of itself: `python -m tests.cli.golden` rewrites the golden file, whose diff is reviewed."""

import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import typer
from typer.core import TyperGroup

from bloomery.cli.main import app

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/cli_help.txt"
# Nothing else of the environment, but for where the code lies: CI systems ask for colours by variables of their own.
PLAIN = {"PATH": os.environ["PATH"], "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1", "PYTHONPATH": os.getenv("PYTHONPATH", "")}


def every_help() -> str:
    """The help of the program and of each command, 100 columns wide and without colours."""
    # A process of its own, since the variables are read when the modules are imported; one for all commands, since it takes half a second to start.
    argv = [sys.executable, "-c", "from tests.cli.golden import print_helps; print_helps()"]
    return subprocess.run(argv, env=PLAIN, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def print_helps() -> None:
    """As this process is surrounded."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    print("\n".join(_help(group, *command) for command in [(), *((name,) for name in group.commands)]), end="")


def _help(group: TyperGroup, *command: str) -> str:
    said = StringIO()
    with redirect_stdout(said):
        group.main([*command, "--help"], prog_name="bloomery", standalone_mode=False)
    lines = "\n".join(line.rstrip() for line in said.getvalue().strip("\n").splitlines())
    return f"$ {' '.join(['bloomery', *command, '--help'])}\n{lines}\n"


if __name__ == "__main__":
    GOLDEN.write_text(every_help())
