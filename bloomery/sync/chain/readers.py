"""What readers tell the store that they hold, so that nobody removes what they need next. They tell it again with every version."""

from typing import Final, NamedTuple

import msgspec

from bloomery.sync.chain.manifest import Sequence
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
    """Of readers who told it since that moment of the store's clock."""
    found = Claims([], [])
    for stored in objects.list(FOLDER):
        if stored.modified_us >= since_us:
            try:
                data, _ = objects.get(stored.key, at_most=_MAX_BYTES)
                found.versions.append(msgspec.json.decode(data, type=Holds).sequence)
            except NotFound:
                continue
            except (Corrupt, msgspec.MsgspecError, UnicodeDecodeError):
                found.unreadable.append(stored.key)
    return found
