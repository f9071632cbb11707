"""How commands show things: tables for people, JSON for programs."""

import json
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from bloomery.types.resources import Fidelity

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PIPED_COLUMNS: Final = 1000
"""A table in a file or a pipe has whole cells."""


def console() -> Console:
    """Where tables go; what comes from rows and names is text, whatever it looks like."""
    output = Console(markup=False, highlight=False, emoji=False)
    if not output.is_terminal:
        output.width = _PIPED_COLUMNS
    return output


def print_json(shown: BaseModel | Sequence[BaseModel]) -> None:
    """One thing, or a list."""
    typer.echo(shown.model_dump_json() if isinstance(shown, BaseModel) else json.dumps([each.model_dump(mode="json") for each in shown]))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns without lines."""
    table = Table(*headings, box=None)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def harmless(text: str) -> str:
    """What people and models wrote, with whatever a terminal would obey spelled out."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def utc(time_us: int) -> str:
    """A time as people read it."""
    return f"{datetime.fromtimestamp(time_us / 1e6, UTC):%Y-%m-%d %H:%M}"


def number(value: float | None) -> str:
    """To four digits."""
    return "-" if value is None else f"{value:.4g}"


def size_words(size_bytes: int) -> str:
    """Of a file, or of what travelled."""
    return f"{size_bytes / 1e6:,.1f} MB" if size_bytes >= 1e6 else f"{size_bytes:,} bytes"


def fidelity_words(card: Fidelity | None) -> str:
    """A card in a few words."""
    return "not measured yet" if card is None else f"{card.verdict}, {card.mode}, k3 {card.k3:.2g}"
