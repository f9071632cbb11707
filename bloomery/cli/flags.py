"""Flags from a file: a YAML file holds what a command's flags and arguments can say, and what the line says goes before it."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from bloomery.cli.specs import read
from bloomery.types.errors import InvalidInput

Command = TypeVar("Command", bound=Callable[..., Any])
_FILE = "file"


class Noun(typer.Typer):
    """The commands of a noun. Each takes `--file`; one with a `file` of its own reads that itself."""

    def command(self, *given: Any, **named: Any) -> Callable[[Command], Command]:
        """As typer's."""
        register = super().command(*given, **named)

        def add(function: Command) -> Command:
            register(function if _FILE in inspect.signature(function).parameters else _taking_file(function))
            return function

        return add


def _taking_file(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def command(**given: Any) -> Any:
        # By then it was read.
        del given[_FILE]
        return function(**given)

    signature = inspect.signature(function)
    added = inspect.Parameter(_FILE, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_FileOption)
    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), added])  # type: ignore[attr-defined]
    return command


def _take(ctx: typer.Context, file: Path | None) -> None:
    """Have what the file says stand where the line says nothing."""
    if file is None or ctx.resilient_parsing:
        return
    known = {name: param for param in ctx.command.params if param.name != _FILE for name in _names(param)}
    ctx.default_map = {}
    for key, value in read(file).items():
        if (param := known.get(str(key).replace("_", "-"))) is None:
            there = ", ".join(f"`{name}`" for name in known)
            raise InvalidInput(f"{file}: `{key}` is nothing that this command takes: {there} are", field=str(key))
        if value is not None:
            ctx.default_map[param.name] = _said(param, value, f"{file}: `{key}`")


_FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        exists=True,
        dir_okay=False,
        is_eager=True,
        callback=_take,
        help="A YAML file of what is not said here: `json: true` for --json.",
    ),
]


def _names(param: Any) -> list[str]:
    """What a file calls it: as its long flag, or as the argument."""
    return [name.lstrip("-").replace("_", "-") for name in param.opts if name.startswith("--") or not name.startswith("-")]


def _said(param: Any, value: Any, what: str) -> Any:
    """As the line would say it, which is text."""
    if getattr(param, "is_flag", False):
        if not isinstance(value, bool):
            raise InvalidInput(f"{what} is true or false, not {value!r}", field=param.name)
        return value
    if param.nargs == -1 or getattr(param, "multiple", False):
        return [_text(each, what, param) for each in (value if isinstance(value, list) else [value])]
    return _text(value, what, param)


def _text(value: Any, what: str, param: Any) -> str:
    # YAML takes a bare yes for true.
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidInput(f"{what} is one text or number, not {value!r}: put a text that YAML takes for something else in quotes", field=param.name)
    return str(value)
