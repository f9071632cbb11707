"""Specs of what is to be done, from files and flags."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
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


def checked(kind: type[Spec], given: dict[str, Any], flags: Mapping[str, str] | None = None) -> Spec:
    """The spec, or which field is wrong: one that there is not before one that is missing, because the one is often the other, misspelled."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        problems = error.errors()
        problem = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
        found = misfit(problem, given)
        field = str(problem["loc"][-1])
        if problem["type"] == "extra_forbidden" and (near := _near(kind, field)):
            there = "another `kind` has it" if found.field in near else f"there is {' and '.join(f'`{path}`' for path in near)}"
            raise InvalidInput(f"{found.message}; {there}", field=found.field) from None
        if problem["type"] == "missing" and (flag := (flags or {}).get(found.field or "")):
            raise InvalidInput(f"{found.message}; give {flag}", field=found.field) from None
        raise found from None


def _near(kind: type[BaseModel], name: str) -> list[str]:
    """The fields of that name that stand elsewhere, or of the name that is most like it."""
    schema = kind.model_json_schema()
    paths = list(dict.fromkeys(_paths(schema, schema.get("$defs", {}))))
    like = difflib.get_close_matches(name, dict.fromkeys(path.rpartition(".")[2] for path in paths), n=1, cutoff=0.7)
    return [path for path in paths if path.rpartition(".")[2] in like]


def _paths(schema: Mapping[str, Any], named: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """All fields of a JSON schema, with dots where they are below others; those in lists have no such name."""
    if "$ref" in schema:
        yield from _paths(named[schema["$ref"].rpartition("/")[2]], named, above)
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _paths(choice, named, above)
    for name, inner in schema.get("properties", {}).items():
        yield f"{above}{name}"
        yield from _paths(inner, named, f"{above}{name}.")
