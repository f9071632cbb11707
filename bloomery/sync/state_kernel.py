"""`state_hash.c`, compiled for this machine when something is first hashed. Without a compiler numpy adds up the same sums, many times as slowly.

Whole numbers have no rounding, so nobody has to know which of the two it was. No torch: the manifest is described by processes that have none.
"""

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bloomery.models.compiled import INTEGER, POINTER, Compiled

_KEYS_AND_SUMS: Final = (INTEGER, ctypes.c_uint64, ctypes.c_uint64, POINTER)
_SUM: Final[dict[str, tuple[Any, ...]]] = {f"sum_{item_bytes}": (POINTER, POINTER, *_KEYS_AND_SUMS) for item_bytes in (1, 2, 4, 8)}
_CHANGE: Final[dict[str, tuple[Any, ...]]] = {f"change_{item_bytes}": (POINTER, POINTER, POINTER, *_KEYS_AND_SUMS) for item_bytes in (1, 2, 4, 8)}
_KERNELS: Final = Compiled("state_hash", Path(__file__).parent, _SUM | _CHANGE, instead="numpy")


def sums(bits: NDArray[Any], stops: Sequence[int], one: int, two: int) -> list[list[int]] | None:
    """Both sums of each part of unsigned elements [n] in one piece, whose first keys are of `one` and `two`; None where there is no kernel.

    Parts follow one another and end before `stops`, the last at n.
    """
    if (library := _KERNELS.functions) is None or not bits.flags.aligned or sys.byteorder != "little":
        return None
    ends, found = np.array(stops, np.int64), np.empty((len(stops), 2), np.uint64)
    getattr(library, f"sum_{bits.itemsize}")(bits.ctypes.data, ends.ctypes.data, len(ends), one, two, found.ctypes.data)
    whole: list[list[int]] = found.tolist()
    return whole


def change(indices: NDArray[np.uint64], old: NDArray[Any], new: NDArray[Any], one: int, two: int) -> list[int] | None:
    """By how much both sums grow when unsigned elements at `indices` [n] become `new` [n]; None where there is no kernel.

    All in one piece, `old` and `new` of one type; the keys of the element at 0 are of `one` and `two`.
    """
    if (library := _KERNELS.functions) is None or sys.byteorder != "little" or not all(each.flags.aligned for each in (indices, old, new)):
        return None
    found = np.empty(2, np.uint64)
    getattr(library, f"change_{old.itemsize}")(indices.ctypes.data, old.ctypes.data, new.ctypes.data, len(indices), one, two, found.ctypes.data)
    sums: list[int] = found.tolist()
    return sums
