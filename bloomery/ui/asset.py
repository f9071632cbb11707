"""A file that browsers are sent."""

import gzip
from dataclasses import dataclass, field
from typing import Final

_SHORTER: Final = 0.9
"""Of its length, what is sent compressed has at most so much."""


@dataclass(frozen=True, slots=True)
class Asset:
    """Its bytes, and what they are. A `lasting` one is never changed: its path holds a hash of it."""

    content: bytes
    media_type: str
    lasting: bool = False
    zipped: bytes | None = field(init=False)
    """The same in gzip, where that is shorter."""

    def __post_init__(self) -> None:
        # No time in it: the same bytes whenever the server was started.
        zipped = gzip.compress(self.content, mtime=0)
        object.__setattr__(self, "zipped", zipped if len(zipped) < _SHORTER * len(self.content) else None)
