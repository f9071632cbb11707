"""Element formats as they are written in safetensors, and changes of elements as whole numbers.

`ordered` maps the bits of a float to a whole number of as many bits (two's complement) that grows with the float: neighbours differ by one, however
small or large they are, so what an optimizer does to a weight is mostly a step of one. It is a bijection over all bits, with both zeros (which are
neighbours) and every nan, and differences are taken modulo 2**width, so whatever was added can be taken away again.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bloomery.sync.state_hash import UNSIGNED, Bits, StateHash


class Changes(NamedTuple):
    """Where elements changed, and to what."""

    indices: NDArray[np.uint32]
    """[n], ascending."""
    values: Bits
    """[n], the new bits."""
    state: StateHash
    """Of the elements once they have changed, where it is known what it was before; else what changes add to it."""


class Differences(NamedTuple):
    """Where elements changed, and by how much."""

    indices: NDArray[np.uint32]
    """[n], ascending."""
    by: Bits
    """[n], what to add to the ordered elements, modulo 2**width; none is zero."""


@dataclass(frozen=True, slots=True)
class Number:
    """A format of elements."""

    name: str
    """In safetensors."""
    item_bytes: int
    exponent_bits: int = 0
    """None of a whole number."""
    exponent_shift: int = 0
    """Bits below the exponent."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the bits of an element."""
        return np.dtype(UNSIGNED[self.item_bytes])

    @property
    def flips(self) -> int:
        """The bits that `ordered` turns around where the sign is set."""
        return (1 << (8 * self.item_bytes - 1)) - 1 if self.exponent_bits else 0

    def ordered(self, bits: Bits) -> Bits:
        """Elements as numbers that grow with them, or such numbers as elements: it is its own inverse."""
        if not self.flips:
            return bits
        negative = bits >> self.dtype.type(8 * self.item_bytes - 1)
        found: Bits = bits ^ (negative * self.dtype.type(self.flips))
        return found

    def exponents(self, bits: Bits) -> Bits:
        """The exponent fields [n]; zeros for whole numbers."""
        found: Bits = (bits >> self.dtype.type(self.exponent_shift)) & self.dtype.type((1 << self.exponent_bits) - 1)
        return found


NUMBERS: Final = {
    number.name: number
    for number in (
        Number("BF16", 2, 8, 7),
        Number("F16", 2, 5, 10),
        Number("F32", 4, 8, 23),
        Number("F64", 8, 11, 52),
        Number("F8_E4M3", 1, 4, 3),
        Number("F8_E5M2", 1, 5, 2),
        *(Number(name, 1) for name in ("U8", "I8", "BOOL", "F8_E8M0")),
        *(Number(f"{sign}{8 * size}", size) for size in (2, 4, 8) for sign in "UI"),
    )
}
"""By their names."""
