"""What benchmarks have in common: their options, and the JSON line, whose first fields are the same in all of them."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench.machine import machine

RESULTS: Final = Path(__file__).parent / "results"
"""The lines that are committed, in files named after their benchmark, mostly with instructions, and a date."""


def newest(name: str) -> dict[str, Any]:
    """The first line of the file of this name with the latest date; of several the last by its name."""
    latest = max(RESULTS.glob(f"{name}-*.json"), key=lambda path: (path.stem[-len("2026-01-31") :], path.name))
    found: dict[str, Any] = json.loads(latest.read_text().splitlines()[0])
    return found


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """For the options of a benchmark; `--help` shows its docstring first."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


class Line:
    """Made before anything is measured, because it says what else the machine was busy with then."""

    def __init__(self, bench: str) -> None:
        self._header = {"bench": bench, **machine()}

    def tell(self, found: Mapping[str, object]) -> None:
        """Print it: how it was measured, and what came of it."""
        print(json.dumps({**self._header, **found}))
