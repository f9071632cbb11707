"""The development key: made at the first start, or preset by the environment; the api reads the file and stores only a hash."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from bloomery.disk.durable import write_privately
from bloomery.types.errors import InvalidInput
from bloomery.types.keys import PREFIX, new_key

VARIABLE: Final = "BLOOMERY_API_KEY"
_MIN_CHARS: Final = 16


class DevelopmentKey(NamedTuple):
    """The key, and how the user comes by it; `replaced`: the environment's took the place of another one."""

    value: str
    created: bool
    preset: bool
    replaced: bool = False


def development_key(path: Path, environment: Mapping[str, str]) -> DevelopmentKey:
    """The key of this start, written to `path` if that does not hold it yet."""
    stored = path.read_text().strip() if path.exists() else None
    if preset := preset_key(environment):
        if preset != stored:
            write_privately(path, f"{preset}\n".encode())
        return DevelopmentKey(preset, created=False, preset=True, replaced=stored not in (None, "", preset))
    if stored:
        return DevelopmentKey(stored, created=False, preset=False)
    fresh = new_key()
    write_privately(path, f"{fresh}\n".encode())
    return DevelopmentKey(fresh, created=True, preset=False)


def announce(key: DevelopmentKey, path: Path) -> str:
    """The line that says where it comes from; only one that was made just now is shown."""
    if key.created:
        return f"API key: {key.value}  (shown once; it is kept in {path})"
    if not key.preset:
        return f"API key: see {path}"
    return f"API key: from {VARIABLE}" + (f", which replaced the one in {path}: that one is refused from now on" if key.replaced else "")


def preset_key(environment: Mapping[str, str]) -> str | None:
    """The key that the environment asks for."""
    value = environment.get(VARIABLE)
    if not value:
        return None
    plain = value.isascii() and value.isprintable() and " " not in value
    if not value.startswith(PREFIX) or len(value) < _MIN_CHARS or not plain:
        raise InvalidInput(f"{VARIABLE} must start with {PREFIX} and have at least {_MIN_CHARS} printable characters without spaces", field=VARIABLE)
    return value
