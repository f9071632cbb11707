"""The weights that requests are served with: an adapter over the engine's base model, or a whole model of its own.

What was used last stays in memory, within a number of versions and a number of bytes; the rest is loaded again when somebody names it, on a thread
beside the sampler, so that nobody else waits for a disk. While everything in memory is in use, whoever names something else waits.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, NamedTuple, Protocol

import torch

from bloomery.models.decoder import Decoder
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.sync.proof import Proof
from bloomery.types.errors import Conflict, Corrupt, Unavailable
from bloomery.types.generation import Weights
from bloomery.types.probe import ProbeAnswer, Probed, ProvedVersion

VERSIONS_IN_MEMORY: Final = 64
"""As many as samples run together: each may have weights of its own."""
UPDATES_IN_MEMORY: Final = 16
"""Versions that no disk holds, which nothing may let go of but who brought them."""
_SHARE_OF_FREE: Final = 4
"""Versions may fill one part in so many of the memory that is free when the sampler begins."""
_AT_ONCE_S: Final = 0.02
"""How long steps wait in all for what begins to load: as long as a small adapter takes, whose requests would wait for a whole step more."""
_LOADING: Final = 2
"""While weights are loaded they are in memory twice: as they are stored, and as they are used."""


class Model(NamedTuple):
    """The weights of some rows; equal versions are equal weights."""

    version: str
    decoder: Decoder
    adapter: FusedAdapter | None
    proof: Proof | None = None
    """That what is computed with is what the version says; None where nobody published it, or it is the bare base."""
    told: ProbeAnswer | None = None
    """What its trainer says of the probe, where that was published."""
    probed: Probed | None = None
    """How the sampler answered the probe with it; None where it was not asked."""


class Source(Protocol):
    """Where weights come from. Both are asked from any thread."""

    def weigh(self, weights: Weights) -> int:
        """Bytes of memory that they take, beside the base model; 0 where loading them takes no time."""
        ...

    def load(self, weights: Weights) -> Model:
        """The weights, proved to be what their version says."""
        ...


class Versions:
    """Loads weights when a request first names them, and lets go of what was used least recently."""

    def __init__(
        self,
        source: Source,
        free_bytes: Callable[[], int],
        give_back: Callable[[], None] = lambda: None,
        *,
        limit_bytes: int | None = None,
        limit_versions: int = VERSIONS_IN_MEMORY,
        at_once_s: float = _AT_ONCE_S,
    ) -> None:
        """`give_back` is called where memory is lacking, and leaves more of it if anybody has some that stands empty."""
        self._give_back = give_back
        self._source, self._free_bytes, self._limit_versions = source, free_bytes, limit_versions
        self._limit_bytes = free_bytes() // _SHARE_OF_FREE if limit_bytes is None else limit_bytes
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._loading: dict[str, _Loading] = {}
        self._examine: Callable[[Model], Model] | None = None
        self._at_once_s = self._patience_s = self._step_patience_s = at_once_s
        # Its one thread ends with this object.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="weights")
        # A thread computes with as many as torch has when it first asks, and others have one now and then (`threads.one_thread`).
        self._loader.submit(torch.get_num_threads).result()
        self._freer = ThreadPoolExecutor(1, thread_name_prefix="freed-weights")

    @property
    def held_bytes(self) -> int:
        """Memory of all versions that are held."""
        return sum(held.bytes for held in self._held.values())

    @property
    def held(self) -> Collection[str]:
        """The versions in memory."""
        return self._held.keys()

    @property
    def loading(self) -> Collection[str]:
        """Those that have room and are on their way."""
        return self._loading.keys()

    def examine_with(self, examine: Callable[[Model], Model]) -> None:
        """From here on every version is asked a probe before anybody gets it (`probe.Probation`), on the thread that loads it."""
        self._examine = examine

    def ask(self, weights: Weights, *, in_use: Collection[str]) -> bool:
        """Have a version in memory, now or soon; False while there is no room for it.

        `in_use` are the versions of running requests and of those who asked before: letting go of them would free nothing, or be in vain.
        """
        if weights.version in self._held or weights.version in self._loading:
            return True
        needs = self._source.weigh(weights)
        if not self._make_room(weights.version, needs, in_use):
            return False
        if needs:
            others = bool(self._loading)
            load = self._loader.submit(self._load, weights)
            self._loading[weights.version] = _Loading(load, needs)
            if not others:
                self._patience_s = self._at_once_s
                self._wait_at_once()
        else:
            self._held[weights.version] = _Held(self._load(weights), 0, pinned=False)
        return True

    def settle(self, wanted: Collection[str], *, step_s: float = math.inf) -> None:
        """A step begins, which takes those who run `step_s` by itself: it waits for a load no longer than that, so that no gap grows by more.

        Loads that ended and that nobody waits for any more: what came of them is as good as what was used before.
        """
        self._step_patience_s = step_s
        self._wait_at_once()
        for version in [version for version, loading in self._loading.items() if loading.future.done() and version not in wanted]:
            future, needs = self._loading.pop(version)
            if future.exception() is None:
                self._held[version] = _Held(future.result(), needs, pinned=False)

    def take(self, version: str) -> Model | None:
        """The model of a version that was asked for; None while it is on its way. Why it could not be loaded is said once."""
        if version in self._loading and self._loading[version].future.done():
            future, needs = self._loading.pop(version)
            self._held[version] = _Held(future.result(), needs, pinned=False)
        if version not in self._held:
            return None
        self._held.move_to_end(version)
        return self._held[version].model

    def model(self, version: str) -> Model | None:
        """That of a version in memory; from any thread, and no use of it that counts."""
        held = self._held.get(version)
        return None if held is None else held.model

    def hold(self, model: Model, size_bytes: int, *, pinned: bool) -> None:
        """Take over weights that were made elsewhere; `pinned`: no disk holds them, and only `let_go` ends that."""
        if pinned and sum(held.pinned for held in self._held.values()) >= UPDATES_IN_MEMORY:
            raise Conflict(f"{UPDATES_IN_MEMORY} versions that were given as tensors are in memory, as many as may be: unload one that is not needed")
        self._held[model.version] = _Held(model, size_bytes, pinned)

    def let_go(self, version: str) -> None:
        """A version that was held as `pinned` is not needed by its name any more; requests that run with it keep it."""
        if version in self._held and self._held[version].pinned:
            # Giving a large model's memory back takes longer than a step: the last reference goes on a thread of its own.
            self._freer.submit(_forget, [self._held.pop(version)])

    @property
    def proofs(self) -> dict[str, Proof]:
        """Of the versions in memory that were proved."""
        return {version: held.model.proof for version, held in self._held.items() if held.model.proof is not None}

    @property
    def proved(self) -> dict[str, ProvedVersion]:
        """The same, for whoever asks from outside."""
        models = {version: held.model for version, held in self._held.items()}
        return {version: ProvedVersion(root=model.proof.root, probe=model.probed) for version, model in models.items() if model.proof is not None}

    def condemn(self, version: str) -> None:
        """Weights in memory that changed by themselves: nobody gets them any more, and who asks next has them read anew."""
        self._held.pop(version, None)

    def forget_idle(self, in_use: Collection[str]) -> None:
        """Give back the memory of what nobody uses and a disk holds."""
        for version in [version for version, held in self._held.items() if version not in in_use and not held.pinned]:
            del self._held[version]

    def wait(self, timeout_s: float, others: Iterable[Future[Any]] = ()) -> None:
        """Until something that was asked for is there, or one of `others`, but no longer than that."""
        wait([*(loading.future for loading in self._loading.values()), *others], timeout_s, return_when="FIRST_COMPLETED")

    def wait_for_more(self, timeout_s: float) -> None:
        """Until something is there that is not yet, but no longer than that; so long too where nothing was asked for."""
        loading = [loading.future for loading in self._loading.values() if not loading.future.done()]
        wait(loading or [Future()], timeout_s, return_when="FIRST_COMPLETED")

    def _load(self, weights: Weights) -> Model:
        """What the source gives, if it is that of the version by its own account and by that of its proof."""
        model = self._source.load(weights)
        names = {model.version} if model.proof is None else {model.version, model.proof.expected.version}
        if others := names - {weights.version}:
            raise Corrupt(f"version {weights.version} was asked for, and weights of version {min(others)} came")
        return model if self._examine is None else self._examine(model)

    def _make_room(self, version: str, needs: int, in_use: Collection[str]) -> bool:
        free = [other for other, held in self._held.items() if other not in in_use and not held.pinned]
        busy = bool(self._loading) or any(other in in_use and not held.pinned for other, held in self._held.items())
        kept = len(self._held) - len(free) + len(self._loading)
        kept_bytes = self.held_bytes - self._bytes(free) + self._loading_bytes
        if busy and (kept >= self._limit_versions or kept_bytes + needs > self._limit_bytes):
            return False
        free_bytes = self._free_bytes()
        if self._lacks(needs, free_bytes):
            self._give_back()
            free_bytes = self._free_bytes()
        if not self._lacks(needs - self._bytes(free) // _LOADING, free_bytes):
            while free and (
                kept + len(free) >= self._limit_versions
                or kept_bytes + self._bytes(free) + needs > self._limit_bytes
                or self._lacks(needs, free_bytes)
            ):
                del self._held[free.pop(0)]
                free_bytes = self._free_bytes()
        if not self._lacks(needs, free_bytes):
            return True
        if busy:
            return False
        raise Unavailable(
            f"version {version} takes {_LOADING * needs} bytes of memory to load, {free_bytes} are free: "
            f"try again when the engine holds less, or give it more memory"
        )

    def _wait_at_once(self) -> None:
        """For the load that comes first, which has the interpreter to itself meanwhile: beside steps it takes twice as long."""
        if not self._loading:
            return
        began_s = time.monotonic()
        wait([next(iter(self._loading.values())).future], max(0.0, min(self._patience_s, self._step_patience_s)))
        waited_s = time.monotonic() - began_s
        self._patience_s -= waited_s
        self._step_patience_s -= waited_s

    @property
    def _loading_bytes(self) -> int:
        return sum(loading.bytes for loading in self._loading.values())

    def _bytes(self, versions: Collection[str]) -> int:
        return sum(self._held[version].bytes for version in versions)

    def _lacks(self, needs: int, free_bytes: int) -> bool:
        return needs > 0 and _LOADING * needs + self._loading_bytes > free_bytes


def _forget(weights: list["_Held"]) -> None:
    weights.clear()


class _Held(NamedTuple):
    model: Model
    bytes: int
    pinned: bool


class _Loading(NamedTuple):
    future: Future[Model]
    bytes: int
