"""The kernels as one compiled library: whether it is there, whose it is, and how a function of it is called.

The others look here for `available`, so that all of them agree about who computes.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from bloomery.models.compiled import FLOAT as _F
from bloomery.models.compiled import INTEGER as _I
from bloomery.models.compiled import POINTER as _P
from bloomery.models.compiled import Compiled
from bloomery.models.pads import BLOCK_PLACES
from bloomery.models.program import current_recorder

BLOCK: Final = 512
"""Values that are added up before their sum is."""
TOGETHER: Final = 16
"""Queries whose scores are in the cache at a time, where a group of heads has no more."""
SCORES: Final = 1 << 16
"""Floats of queries and their scores that leave keys and values a place in the cache that a processor has for itself."""
QUERIES: Final = 48
"""Queries whose gradients are computed with the same keys."""
PANEL: Final = 32
"""Outputs of a product that lie side by side."""
ROWS: Final = 12
"""Of a product that are computed together, at most."""
_LIBRARY: Final = Compiled(
    "native",
    Path(__file__).parents[1] / "kernels",
    {
        "rms_norm": (_P, _P, _P, _I, _I, _P, _I, _I, _I, _F),
        "rms_norm_backward": (_P, _P, _P, _I, _I, _P, _P, _I, _I, _I),
        "rms_norm_weight_gradient": (_P, _P, _P, _I, _I, _P, _I, _I, _I),
        "add": (_P, _P, _P, _I, _I, _I),
        "rotate": (_P, _P, _I, _I, _P, _P, _F, _I, _I, _I),
        "swiglu": (_P, _P, _I, _I),
        "swiglu_backward": (_P, _P, _P, _I, _I),
        "logsumexp": (_P, _P, _I, _I),
        "softmax_gradient": (_P, _P, _P, _I, _I),
        "invert": (_P, _P, _P, _P, _I, _I, _I),
        "draw": (_P, _P, _P, _P, _P, _P, _P, _I, _I),
        "attend": (_P, _P, _P, _I, _I, _P, _P, _P, _P, _P, _I, _P, _I, _I, _I, _I, _I, _I, _P, _I, _I),
        "attend_backward": (_P, _P, _P, _P, _P, _I, _I, _P, _I, _I, _P, _I, _I, _P, _P, _P, _I, _I, _I, _I, _I, _P, _I, _I),
        "keep": (_P, _P, _P, _I, _I, _P, _I, _P, _I, _I, _I),
        "product": (_P, _I, _P, _I, _P, _I, _I, _I, _I, _I, _I),
        "product_unpacked": (_P, _I, _P, _I, _P, _I, _I, _I, _I, _P, _I),
        "pack": (_P, _P, _I, _I, _I, _I),
        "add_updates": (_P, _I, _P, _I, _P, _I, _I, _I, _I, _I),
        "add_half_updates": (_P, _I, _P, _I, _P, _I, _I, _I, _I, _I, _P, _I),
        "update_gradients": (_P, _I, _P, _I, _P, _I, _P, _P, _I, _I, _I, _I, _I, _P, _P, _I, _I),
        "split_product": (_P, _I, _P, _I, _I, _P, _I, _I, _I, _I, _I, _I, _P, _I),
        "split_product_granted": (_P,),
        "split_product_room": (_P, _I),
        "half_product": (_P, _I, _P, _I, _P, _I, _I, _I, _I),
        "half_product_unpacked": (_P, _I, _P, _I, _P, _I, _I, _I, _I, _P, _I),
        "half_product_room": (_P, _I, _I, _I),
        "half_pack": (_P, _P, _I, _I, _I, _I),
        "run": (_P, _I),
    },
    # Contracted products and sums would have other bits on processors that have them.
    flags=(
        *("-ffp-contract=off", "-fno-math-errno", "-fopenmp"),
        *(
            f"-D{name}={value}"
            for name, value in {"BLOCK": BLOCK, "TOGETHER": TOGETHER, "SCORES": SCORES, "QUERIES": QUERIES, "PANEL": PANEL}.items()
        ),
        *(f"-DPLACES={BLOCK_PLACES}", f"-DMOST_ROWS={ROWS}"),
    ),
    instead="torch",
)


def present() -> bool:
    """Whether there are kernels here."""
    return _LIBRARY.functions is not None


def identity() -> str:
    """Whose kernels compute, for the numerics id."""
    return f"{_LIBRARY.identity}{'-split' * tiles_are_granted()}" if present() else "torch"


def available(*tensors: Tensor) -> bool:
    """Whether kernels take them: float32 in main memory, where there are kernels."""
    return _LIBRARY.functions is not None and all(tensor.dtype is torch.float32 and tensor.is_cpu for tensor in tensors)


@cache
def tiles_are_granted() -> bool:
    """Whether the processor has tiles of bfloat16 and the system lets this process use them, which it is asked once."""
    return present() and bool(number("split_product_granted"))


def number(function: str, *arguments: int) -> int:
    """What a function of the library says."""
    found = _I(0)
    getattr(_LIBRARY.functions, function)(ctypes.addressof(found), *arguments)
    return found.value


def call(kernel: str, *arguments: Any) -> None:
    """A kernel, which goes into the program that is recorded, or has no place in one."""
    if (recorder := current_recorder()) is not None:
        if (address := _LIBRARY.address(f"call_{kernel}")) is None:
            recorder.refuse(kernel)
        else:
            recorder.add(address, arguments)
    getattr(_LIBRARY.functions, kernel)(*arguments)


def run(words: int, calls: int) -> None:
    """A program (`program.Program`)."""
    _LIBRARY.functions.run(words, calls)
