"""What is being made of names: updates that are staged, weights that are on their way, and every version that there was.

Entries are made from any thread under one lock, which nobody holds for longer than that takes. So whoever begins an update, gives it up or asks what
is served waits for no step, and of two who want the same one comes first.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock

from bloomery.infer.sampler import Sampler
from bloomery.infer.staging import Staging
from bloomery.infer.versions import Model
from bloomery.types.errors import Conflict
from bloomery.types.generation import Weights
from bloomery.types.serving import KvPolicy


@dataclass(slots=True, eq=False)
class NewWeights:
    """An update of what a name stands for."""

    version: str
    staging: Staging | None = None
    """None while the copy is made."""


class Changes:
    """Of the names of one sampler, which gives weights to names in orders of its own thread alone."""

    def __init__(self, sampler: Sampler, version: str) -> None:
        """`version`: of the weights that it began with."""
        self._sampler = sampler
        self._lock = Lock()
        self._updates: dict[str, NewWeights] = {}
        self._on_their_way: Counter[str] = Counter()
        self._versions_given = {version}

    def current(self, name: str) -> tuple[Weights, Model | None]:
        """What is served under a name, and its model if that is in memory."""
        with self._lock:
            return self._current(name)

    def begin(self, name: str, update: NewWeights) -> tuple[Weights, Model | None]:
        """Name and version are taken from here on; returns what the update begins from."""
        with self._lock:
            if name in self._updates:
                raise Conflict(f"an update of `{name}` is staged already: commit or cancel it", field="name")
            if self._on_their_way[name]:
                raise Conflict(f"`{name}` is just being given other weights: wait for them, then begin", field="name")
            current = self._current(name)
            if update.version in self._versions_given or update.version in self._sampler.versions.held:
                raise Conflict(f"version `{update.version}` names other weights already: every update needs a name of its own", field="version")
            self._updates[name] = update
            self._versions_given.add(update.version)
            return current

    def release(self, name: str, update: NewWeights) -> None:
        """Of an update that never was staged."""
        with self._lock:
            if self._updates.get(name) is update:
                del self._updates[name]
                self._versions_given.discard(update.version)

    def has(self, name: str, update: NewWeights) -> bool:
        """Whether an update was neither committed nor cancelled."""
        return self._updates.get(name) is update

    def staged(self, name: str) -> Staging:
        """The copy of an update."""
        if (staging := self._update(name).staging) is None:
            raise Conflict(f"an update of `{name}` is just being staged: wait until it has begun", field="name")
        return staging

    def cancel(self, name: str) -> None:
        """Forget an update, be it staged or not yet."""
        with self._lock:
            self._update(name)
            del self._updates[name]

    def announce(self, name: str) -> None:
        """Weights for a name are about to be ordered: nobody begins an update of it before they are there (`ordered`)."""
        with self._lock:
            if name in self._updates:
                raise Conflict(f"an update of `{name}` is staged: commit or cancel it first", field="name")
            self._on_their_way[name] += 1

    # On the sampler's thread.

    def ordered(self, name: str, order: Callable[[], Future[Model]]) -> Future[Model]:
        """Have weights that were announced given to a name."""
        try:
            swap = order()
        except BaseException:
            self._arrived(name)
            raise
        swap.add_done_callback(lambda _: self._arrived(name))
        return swap

    def commit(self, name: str, staging: Staging, policy: KvPolicy) -> Future[Model]:
        """An update is over when its weights are held: nobody commits it twice, or cancels it."""
        model = staging.model()
        with self._lock:
            if self._update(name).staging is not staging:
                raise Conflict(f"this update of `{name}` was cancelled before it was committed: begin another", field="name")
            self._sampler.versions.hold(model, staging.size_bytes, pinned=True)
            del self._updates[name]
            self._on_their_way[name] += 1
        return self.ordered(name, lambda: self._sampler.swap(name, Weights(version=model.version), policy))

    def withdraw(self, name: str) -> None:
        """Nothing is served under a name any more, and nothing is made of it."""
        with self._lock:
            self._sampler.withdraw(name)
            self._updates.pop(name, None)

    def _arrived(self, name: str) -> None:
        with self._lock:
            self._on_their_way[name] -= 1
            if not self._on_their_way[name]:
                del self._on_their_way[name]

    def _current(self, name: str) -> tuple[Weights, Model | None]:
        while True:
            weights = self._sampler.served(name)
            model = self._sampler.versions.model(weights.version)
            # The sampler's thread may have exchanged them meanwhile, and let go of those before.
            if self._sampler.served(name) == weights:
                return weights, model

    def _update(self, name: str) -> NewWeights:
        if (update := self._updates.get(name)) is None:
            raise Conflict(f"no update of `{name}` is staged: begin one", field="name")
        return update
