"""The file that names models elsewhere (`docs/operate.md`): read and held to its form before anything is written, with the key of each looked for."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import TypeAdapter, ValidationError

from bloomery.config import EndpointConfig
from bloomery.types.errors import InvalidInput

_FIELD: Final = "endpoints"
_OURS: Final = "tinker"
"""Paths of weights begin so (`tinker://`), and are models of this server."""


def read(file: Path, environment: Mapping[str, str]) -> tuple[EndpointConfig, ...]:
    """The endpoints in a file, each under its name. A `key_file` that is no whole path lies beside the file."""
    given = _mapping(file)
    found = tuple(_endpoint(file, str(name), settings) for name, settings in given.items())
    for endpoint in found:
        endpoint.key(environment)
    return found


def announce(endpoint: EndpointConfig) -> str:
    """One line for people."""
    models = "any model" if endpoint.models is None else f"{len(endpoint.models)} models"
    key = f"key from {endpoint.key_env or endpoint.key_file}" if endpoint.key_env or endpoint.key_file else "no key"
    return f"endpoint {endpoint.name}: {endpoint.base_url}, {models}, {key}, for {', '.join(endpoint.projects)}"


def _mapping(file: Path) -> dict[Any, Any]:
    try:
        given = yaml.safe_load(file.read_text())
    except OSError as error:
        raise InvalidInput(f"--endpoints {file} cannot be read: {error.strerror}", field=_FIELD) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--endpoints {file} is no YAML: {error}", field=_FIELD) from None
    if not isinstance(given, dict) or not given:
        raise InvalidInput(f"--endpoints {file} names no endpoint: it has the settings of each under its name (docs/operate.md)", field=_FIELD)
    return given


def _endpoint(file: Path, name: str, settings: Any) -> EndpointConfig:
    if name == _OURS:
        raise InvalidInput(f"{file}: `{_OURS}` names weights of this server: call the endpoint otherwise", field=_FIELD)
    if not isinstance(settings, dict) or "name" in settings:
        raise InvalidInput(f"{file}: `{name}` has no settings: give it a `base_url` at least, and no other name", field=_FIELD)
    try:
        text = json.dumps(settings | {"name": name})
        found = TypeAdapter(EndpointConfig).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(f"{file}: `{'.'.join(map(str, (name, *first['loc'])))}`: {first['msg']}", field=_FIELD) from None
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{file}: `{name}`: {error}", field=_FIELD) from None
    return found if found.key_file is None else replace(found, key_file=str(file.resolve().parent / Path(found.key_file).expanduser()))
