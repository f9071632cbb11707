"""Objects by keys, in a folder or a bucket: what is shared between machines that know nothing else of each other.

`bloomery.store.objects` has both. Whatever is done has a deadline; who misses it raises `Unavailable`, which names the store and the key.
"""

import re
from typing import Final, NamedTuple, Protocol

from bloomery.types.errors import InvalidInput

KEY: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
MAX_KEY: Final = 512


class Stored(NamedTuple):
    """What a store says of an object. Times are the store's own: compare them with each other, never with a clock of this machine."""

    key: str
    size: int
    tag: str
    """Another one whenever the bytes are others."""
    modified_us: int


class Objects(Protocol):
    """All or nothing and durable: a reader sees no half of an object, and what was put outlives the machine that put it."""

    name: str
    """The store, as messages call it."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Store `data`, in place of an earlier object of that key."""

    def create(self, key: str, data: bytes) -> str | None:
        """Store `data` unless there is an object of that key; its tag, None if something else is there.

        Equal bytes are one's own, from a request whose answer was lost.
        """

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        """Store `data` if the object is still the one of this tag; the new tag, None if it is another or none.

        `data` must differ from all that was there before.
        """

    def get(self, key: str, *, at_most: int) -> tuple[bytes, str]:
        """An object of no more than so many bytes, and its tag. NotFound if there is none, Corrupt if it is larger."""

    def part(self, key: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop`, not empty. NotFound if there is no object, Corrupt if it ends before."""

    def head(self, key: str) -> Stored | None:
        """What there is under the key."""

    def list(self, folder: str, *, after: str = "") -> list[Stored]:
        """All objects in a folder, in the order of their keys; only those behind the key `after`. What others left there under no key is none."""

    def delete(self, key: str) -> None:
        """Remove the object; one that is gone already is fine."""

    def tidy(self, before_us: int) -> None:
        """Remove what puts left behind that were broken off before that moment of the store's clock."""


def is_key(key: str) -> bool:
    """Whether it climbs nowhere, hides nothing and surprises no file system."""
    return len(key) <= MAX_KEY and KEY.fullmatch(key) is not None


def check_key(key: str) -> None:
    """Refuse what is no key."""
    if not is_key(key):
        raise InvalidInput(
            f"`{key[:80]}` is no key of an object: segments of letters, digits, `._-`, separated by `/`, none starting with a dot", field="key"
        )
