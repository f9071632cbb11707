"""What readers tell the store that they hold, so that nobody removes what they need next. They tell it again with every version."""

from typing import Final, NamedTuple

import msgspec

from bloomery.sync.chain.manifest import Sequence
from bloomery.sync.chain.plan import AT_ONCE
from bloomery.sync.codec.ordered import in_order
from bloomery.types.errors import Corrupt, NotFound
from bloomery.types.objects import Objects, check_key
from bloomery.types.wire import Wire

FOLDER: Final = "readers"
_MAX_BYTES: Final = 1 << 12


class Holds(Wire, frozen=True):
    """A reader's version."""

    sequence: Sequence


def check_name(name: str) -> None:
    """InvalidInput unless it can be part of a key."""
    check_key(f"{FOLDER}/{name}")


def name_version(objects: Objects, name: str, sequence: int) -> None:
    """Tell it."""
    objects.put(f"{FOLDER}/{name}", msgspec.json.encode(Holds(sequence=sequence)))


def leave(objects: Objects, name: str) -> None:
    """A reader that is gone for good needs nothing."""
    objects.delete(f"{FOLDER}/{name}")


class Claims(NamedTuple):
    """What readers said that they hold."""

    versions: list[int]
    unreadable: list[str]
    """Keys of readers of whom nobody knows what they said: they may hold any version that is there."""


def held_by_others(objects: Objects, since_us: float) -> Claims:
    """Of readers who told it since that moment of the store's clock; several are read side by side."""
    told = [stored.key for stored in objects.list(FOLDER) if stored.modified_us >= since_us]
    found = Claims([], [])
    for _, (versions, unreadable) in in_order(lambda key: _said(objects, key), told, max(1, min(AT_ONCE, len(told)))):
        found.versions.extend(versions)
        found.unreadable.extend(unreadable)
    return found


def _said(objects: Objects, key: str) -> Claims:
    """By one of them, who may have left meanwhile."""
    try:
        data, _ = objects.get(key, at_most=_MAX_BYTES)
        return Claims([msgspec.json.decode(data, type=Holds).sequence], [])
    except NotFound:
        return Claims([], [])
    except (Corrupt, msgspec.MsgspecError, UnicodeDecodeError):
        return Claims([], [key])
