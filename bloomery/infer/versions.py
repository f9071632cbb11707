"""The weights that requests are served with: an adapter over the engine's base model, or a whole model of its own.

What was used last stays in memory, within a number of versions and a number of bytes. A request keeps its weights to its end.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Final, NamedTuple, NoReturn, Protocol

from bloomery.models.adapters import FusedAdapter
from bloomery.models.decoder import Decoder
from bloomery.types.errors import Unavailable
from bloomery.types.generation import Weights

VERSIONS_IN_MEMORY: Final = 16
_SHARE_OF_FREE: Final = 4
"""Versions may fill one part in so many of the memory that is free when the sampler begins."""
_LOADING: Final = 2
"""While weights are loaded they are in memory twice: as they are stored, and as they are used."""


class Model(NamedTuple):
    """The weights of some rows; equal versions are equal weights."""

    version: str
    decoder: Decoder
    adapter: FusedAdapter | None


class Source(Protocol):
    """Where weights come from."""

    def weigh(self, weights: Weights) -> int:
        """Bytes of memory that they take, beside the base model."""
        ...

    def load(self, weights: Weights) -> Model:
        """The weights, proved to be what their version says."""
        ...


class Versions:
    """Loads weights when a request first names them, and lets go of what was used least recently."""

    def __init__(self, source: Source, free_bytes: Callable[[], int], *, limit_bytes: int | None = None) -> None:
        self._source, self._free_bytes = source, free_bytes
        self._limit_bytes = free_bytes() // _SHARE_OF_FREE if limit_bytes is None else limit_bytes
        self._held: OrderedDict[str, _Held] = OrderedDict()

    @property
    def held_bytes(self) -> int:
        """Memory of all versions that are held."""
        return sum(held.bytes for held in self._held.values())

    def get(self, weights: Weights, *, in_use: Collection[str]) -> Model:
        """The model of a version; `in_use` are the versions of running requests, which would not free anything if they were let go."""
        if weights.version not in self._held:
            needs = self._source.weigh(weights)
            self._make_room(weights.version, needs, in_use)
            self._held[weights.version] = _Held(self._source.load(weights), needs)
        self._held.move_to_end(weights.version)
        return self._held[weights.version].model

    def _make_room(self, version: str, needs: int, in_use: Collection[str]) -> None:
        idle = [other for other in self._held if other not in in_use]
        if self._lacks(needs - sum(self._held[other].bytes for other in idle) // _LOADING):
            self._refuse(version, needs)
        while idle and (len(self._held) >= VERSIONS_IN_MEMORY or self.held_bytes + needs > self._limit_bytes or self._lacks(needs)):
            del self._held[idle.pop(0)]
        if self._lacks(needs):
            self._refuse(version, needs)

    def _lacks(self, needs: int) -> bool:
        return needs > 0 and _LOADING * needs > self._free_bytes()

    def _refuse(self, version: str, needs: int) -> NoReturn:
        raise Unavailable(
            f"version {version} takes {_LOADING * needs} bytes of memory to load, {self._free_bytes()} are free: "
            f"try again when the engine holds less, or give it more memory"
        )


class _Held(NamedTuple):
    model: Model
    bytes: int
