"""Files of `up` that have the settings of each thing under its name (`docs/operate.md`): read and held to their form before anything is written."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from bloomery.types.errors import InvalidInput

Config = TypeVar("Config")


class NamedFile(NamedTuple):
    """A file, the option of `up` that names it, what it names, and the setting that none of these is without."""

    file: Path
    option: str
    thing: str
    least: str

    def read(self, config: type[Config]) -> list[Config]:
        """Each under its name; InvalidInput says where the file is wrong."""
        return [self._one(config, str(name), settings) for name, settings in self._mapping().items()]

    def refused(self, problem: str) -> InvalidInput:
        """An error of this file."""
        return InvalidInput(f"{self.file}: {problem}", field=self.option)

    def _mapping(self) -> Mapping[Any, Any]:
        told = f"--{self.option} {self.file}"
        try:
            text = self.file.read_text()
            given, written = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
        except OSError as error:
            raise InvalidInput(f"{told} cannot be read: {error.strerror}", field=self.option) from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{told} is no YAML: {error}", field=self.option) from None
        except RecursionError:
            raise InvalidInput(f"{told} goes too deep to be read", field=self.option) from None
        if not isinstance(given, dict) or not given:
            raise InvalidInput(f"{told} names no {self.thing}: it has the settings of each under its name (docs/operate.md)", field=self.option)
        # Of those a mapping has the last alone.
        if twice := [name for name, times in Counter(name.value for name, _ in written.value).items() if times > 1]:
            raise self.refused(f"`{twice[0]}` stands there more than once: each {self.thing} has a name of its own")
        return given

    def _one(self, config: type[Config], name: str, settings: Any) -> Config:
        if not isinstance(settings, dict) or "name" in settings:
            raise self.refused(f"`{name}` has no settings: give it a `{self.least}` at least, and no other name")
        try:
            return TypeAdapter(config).validate_json(json.dumps(settings | {"name": name}))
        except ValidationError as error:
            first = error.errors()[0]
            raise self.refused(f"`{'.'.join(map(str, (name, *first['loc'])))}`: {first['msg']}") from None
        except (TypeError, ValueError) as error:
            raise self.refused(f"`{name}`: {error}") from None
