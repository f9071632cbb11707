"""Who wants to hear that something changed, so that nobody has to look for it again and again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Listeners:
    """Called on the event loop, in the moment of the change: they only take note of it."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[], None]] = []

    @property
    def count(self) -> int:
        """How many want to hear now."""
        return len(self._listeners)

    @contextmanager
    def calling(self, listener: Callable[[], None]) -> Iterator[None]:
        """One more of them, until left."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def tell(self) -> None:
        """It has changed."""
        for listener in list(self._listeners):
            listener()
