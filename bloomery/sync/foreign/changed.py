"""What a payload says of one tensor, and how it is held against the Adler-32 that travels beside it."""

import re
import zlib
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from bloomery.sync.foreign.gaps import Positions
from bloomery.types.errors import Corrupt, shown

Bits = NDArray[Any]
"""Elements [n] as unsigned numbers, little-endian."""
_CHECKSUM: Final = re.compile(r"0|[1-9][0-9]{0,9}")


class Changed(NamedTuple):
    """Positions of elements in their tensor, ascending, and what they become [n]."""

    positions: Positions
    values: Bits


def checksum_of(bits: Bits) -> int:
    """The Adler-32 of elements in a row."""
    return zlib.adler32(bits.view("u1").data)


def read_checksum(text: str) -> int:
    """As it stands in files: a number in decimal digits."""
    if not _CHECKSUM.fullmatch(text) or (found := int(text)) >> 32:
        raise Corrupt(f"`{shown(text)}` is no Adler-32")
    return found


def verify(changed: Changed, old: Bits, checksum: int) -> None:
    """Corrupt, when elements that were `old` [n] do not have this checksum once they are changed."""
    new = old.copy()
    new[changed.positions] = changed.values
    if (found := checksum_of(new)) != checksum:
        raise Corrupt(f"the weights would have the Adler-32 {found} behind the delta, and {checksum} is due: it is damaged, or of other weights")
