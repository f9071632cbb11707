"""Asking the server again, as rollouts are tried again: one failed answer must not end what hours were spent on."""

from collections.abc import Callable
from typing import TypeVar

from bloomery.types.errors import BloomeryError

T = TypeVar("T")


def patiently(attempts: int, ask: Callable[[], T]) -> T:
    """What is answered, of so many attempts; the last one's error is raised, and what is the caller's mistake at once."""
    for _ in range(attempts - 1):
        try:
            return ask()
        except BloomeryError as error:
            if error.category == "user":
                raise
    return ask()
