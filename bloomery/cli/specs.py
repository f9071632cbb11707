"""Specs of what is to be done, from files and flags."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from bloomery.config.written import read_yaml
from bloomery.types.errors import InvalidInput, misfit

Spec = TypeVar("Spec", bound=BaseModel)


def read(file: Path) -> dict[str, Any]:
    """The fields in a file of YAML or JSON."""
    try:
        given = read_yaml(file.read_text())
    except ValueError as error:
        raise InvalidInput(f"{file} is no YAML: {error}", field="file") from None
    if not isinstance(given, dict):
        raise InvalidInput(f"{file} holds no fields of a spec", field="file")
    return given


def put(spec: dict[str, Any], field: str, value: Any) -> None:
    """Set a field, whose name has dots where it is below others."""
    *above, last = field.split(".")
    for part in above:
        inner = spec.setdefault(part, {})
        if not isinstance(inner, dict):
            raise InvalidInput(f"`{field}`: `{part}` has no fields", field=field)
        spec = inner
    spec[last] = value


def put_options(spec: dict[str, Any], options: Sequence[str] | None) -> None:
    """The same of options FIELD=VALUE, whose values are YAML."""
    for option in options or []:
        field, is_one, text = option.partition("=")
        if not is_one:
            raise InvalidInput(f"--set takes FIELD=VALUE, not `{option}`", field=option)
        try:
            value = read_yaml(text)
        except ValueError as error:
            raise InvalidInput(f"--set {option}: the value is no YAML: {error}", field=field) from None
        put(spec, field, value)


def checked(kind: type[Spec], given: dict[str, Any]) -> Spec:
    """The spec, or which field is wrong."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise misfit(error.errors()[0], given) from None
