"""The file that names models elsewhere (`docs/operate.md`): read and held to its form before anything is written, with the key of each looked for."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from bloomery.config import EndpointConfig
from bloomery.up.addresses import wrong_url
from bloomery.up.named import NamedFile

_OURS: Final = "tinker"
"""Paths of weights begin so (`tinker://`), and are models of this server."""


def read(file: Path, environment: Mapping[str, str]) -> tuple[EndpointConfig, ...]:
    """The endpoints in a file, each under its name. A `key_file` that is no whole path lies beside the file."""
    given = NamedFile(file, "endpoints", "endpoint", "base_url")
    found = tuple(_beside(file, endpoint) for endpoint in given.read(EndpointConfig))
    for endpoint in found:
        if endpoint.name == _OURS:
            raise given.refused(f"`{_OURS}` names weights of this server: call the endpoint otherwise", _OURS)
        if (wrong := wrong_url(endpoint.base_url)) is not None:
            raise given.refused(f"`{endpoint.name}.base_url`: {wrong}", endpoint.name, "base_url")
        endpoint.key(environment)
    return found


def announce(endpoint: EndpointConfig) -> str:
    """One line for people."""
    models = "any model" if endpoint.models is None else f"{len(endpoint.models)} models"
    key = f"key from {endpoint.key_env or endpoint.key_file}" if endpoint.key_env or endpoint.key_file else "no key"
    return f"endpoint {endpoint.name}: {endpoint.base_url}, {models}, {key}, for {', '.join(endpoint.projects)}"


def _beside(file: Path, endpoint: EndpointConfig) -> EndpointConfig:
    if endpoint.key_file is None:
        return endpoint
    return replace(endpoint, key_file=str(file.resolve().parent / Path(endpoint.key_file).expanduser()))
