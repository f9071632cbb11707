"""Files of `up` that have the settings of each thing under its name (`docs/operate.md`): read and held to their form before anything is written."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from bloomery.config.written import read_yaml
from bloomery.types.errors import InvalidInput

Config = TypeVar("Config")


class NamedFile:
    """A file of one option of `up`."""

    def __init__(self, file: Path, option: str, thing: str, least: str) -> None:
        """`option` names the file, which has settings of each `thing`; `least` is the setting that none of these is without."""
        self._file, self._option, self._thing, self._least = file, option, thing, least
        self._written: yaml.Node | None = None

    def read(self, config: type[Config]) -> list[Config]:
        """Each under its name; InvalidInput says where the file is wrong."""
        return [self._one(config, str(name), settings) for name, settings in self._mapping().items()]

    def refused(self, problem: str, *place: str | int) -> InvalidInput:
        """An error of this file; at a place in it, which is the name of a thing and where in its settings, with the line."""
        line = _line(self._written, place)
        return InvalidInput(f"{self._file}{'' if line is None else f', line {line}'}: {problem}", field=self._option)

    def _mapping(self) -> Mapping[Any, Any]:
        told = f"--{self._option} {self._file}"
        try:
            text = self._file.read_text()
            given = read_yaml(text)
            self._written = yaml.compose(text, yaml.SafeLoader)
        except OSError as error:
            raise InvalidInput(f"{told} cannot be read: {error.strerror}", field=self._option) from None
        except ValueError as error:
            raise InvalidInput(f"{told} is no YAML: {error}", field=self._option) from None
        if not isinstance(given, dict) or not given:
            raise InvalidInput(f"{told} names no {self._thing}: it has the settings of each under its name (docs/operate.md)", field=self._option)
        return given

    def _one(self, config: type[Config], name: str, settings: Any) -> Config:
        if not isinstance(settings, dict) or "name" in settings:
            raise self.refused(f"`{name}` has no settings: give it a `{self._least}` at least, and no other name", name)
        try:
            return TypeAdapter(config).validate_json(json.dumps(settings | {"name": name}))
        except ValidationError as error:
            first = error.errors()[0]
            raise self.refused(f"`{'.'.join(map(str, (name, *first['loc'])))}`: {first['msg']}", name, *first["loc"]) from None
        except (TypeError, ValueError) as error:
            raise self.refused(f"`{name}`: {error}", name) from None


def _line(written: yaml.Node | None, place: Sequence[str | int]) -> int | None:
    """Where the last of a place's names stands, or as much of it as stands there, the later of two; from 1."""
    line: int | None = None
    for name in place:
        below = written.value if isinstance(written, yaml.MappingNode) else ()
        found = [(key, value) for key, value in below if key.value == str(name)]
        if not found:
            break
        line, written = found[-1][0].start_mark.line + 1, found[-1][1]
    return line
