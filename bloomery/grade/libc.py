"""Calls of the C library and of the kernel that Python has no names for."""

import ctypes
import os
from functools import cache


def call(name: str, *arguments: object) -> int:
    """A function that gives a negative number when it fails; raises OSError then."""
    given: int = getattr(_library(), name)(*arguments)
    if given < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return given


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
