"""Requests and swaps that wait for their weights, in the order in which they came.

Weights are loaded beside the sampler (`versions`), so whoever waits for them delays nobody. Who waits for room in memory, though, is not overtaken:
the requests behind could keep all room in use for ever.
"""

from collections.abc import Collection
from concurrent.futures import Future
from typing import Final, NamedTuple

from bloomery.infer.versions import Model, Versions
from bloomery.types.errors import BloomeryError, Conflict, NotFound, WorkerError, blame
from bloomery.types.generation import Abort, Generate, Live, Weights
from bloomery.types.serving import KvPolicy

_WAIT_S: Final = 0.05
"""How long a step waits for weights that are being loaded, when there is nothing else to do: whatever else the caller has to do can wait as long."""


class Swap(NamedTuple):
    """Serve other weights under a name from the next step on; `done` when it is so."""

    name: str
    weights: Weights
    policy: KvPolicy
    done: Future[Model]


class Ready(NamedTuple):
    """A request whose weights are in memory, or why they are not and will not be."""

    generate: Generate
    weights: Model | BloomeryError
    aborted: Collection[int]
    """Samples of it that nobody wants any more."""


class Arrivals:
    """Who waits for weights. While the sampler is paused newcomers stand apart, until it resumes."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self.names: dict[str, Weights] = {}
        """What is served under each name."""
        self._requests: list[Generate] = []
        self._swaps: list[Swap] = []
        self._newcomers: list[Generate] = []
        self._aborted: dict[str, set[int]] = {}

    @property
    def requests(self) -> int:
        """How many requests wait that came before a pause."""
        return len(self._requests)

    @property
    def swaps(self) -> int:
        """How many swaps wait."""
        return len(self._swaps)

    @property
    def samples(self) -> int:
        """Samples of all requests that wait."""
        return sum(each.num_samples for each in (*self._requests, *self._newcomers))

    def served(self, name: str) -> Weights:
        """What is served under a name."""
        if name not in self.names:
            raise NotFound(f"nothing is served as `{name}`: there are {', '.join(sorted(self.names)) or 'none'}", field="name")
        return self.names[name]

    def knows(self, request_id: str) -> bool:
        """Whether a request waits here."""
        return any(each.request_id == request_id for each in (*self._requests, *self._newcomers))

    def add(self, generate: Generate, *, paused: bool) -> None:
        """A request; while `paused` it is a newcomer."""
        self._weights(generate)
        (self._newcomers if paused else self._requests).append(generate)

    def resume(self) -> None:
        """Newcomers are requests like all others."""
        self._requests += self._newcomers
        self._newcomers.clear()

    def swap(self, name: str, weights: Weights, policy: KvPolicy) -> Future[Model]:
        """Weights for a name, be it new or not."""
        swap = Swap(name, weights, policy, Future())
        # Nobody can cancel it any more.
        swap.done.set_running_or_notify_cancel()
        self._swaps.append(swap)
        return swap.done

    def withdraw(self, name: str) -> Weights:
        """Nothing is served under a name any more; returns what was."""
        weights = self.served(name)
        if self.is_swapped(name):
            raise Conflict(f"`{name}` is just being given other weights: wait for them, then unload it", field="name")
        del self.names[name]
        return weights

    def is_swapped(self, name: str) -> bool:
        """Whether weights for a name are on their way."""
        return any(swap.name == name for swap in self._swaps)

    def abort(self, abort: Abort) -> Generate | None:
        """Nobody wants a request any more, or one of its samples; returns it when it ends so."""
        for queue in (self._requests, self._newcomers):
            for generate in queue:
                if generate.request_id == abort.request_id:
                    gone = self._aborted.setdefault(abort.request_id, set())
                    gone |= {index for index in range(generate.num_samples) if abort.sample in (None, index)}
                    if len(gone) < generate.num_samples:
                        return None
                    queue.remove(generate)
                    del self._aborted[abort.request_id]
                    return generate
        return None

    def abort_requests(self) -> list[Generate]:
        """End all that came before a pause."""
        return [each for each in list(self._requests) if self.abort(Abort(request_id=each.request_id)) is not None]

    def forget_requests(self) -> None:
        """Nobody listens any more."""
        self._requests.clear()
        self._newcomers.clear()
        self._aborted.clear()

    def wait(self) -> None:
        """A moment, or until something is there; for when there is nothing else to do."""
        if self._requests or self._swaps:
            self._versions.wait(_WAIT_S)

    def settle(self) -> None:
        """What was loaded for who is gone."""
        served = [self.names.get(each.weights.name) if isinstance(each.weights, Live) else each.weights for each in self._requests]
        self._versions.settle({weights.version for weights in (*served, *(swap.weights for swap in self._swaps)) if weights is not None})

    def take_swaps(self, in_use: set[str]) -> list[tuple[Swap, Model]]:
        """Swaps whose weights are in memory; those of broken weights say so themselves."""
        taken, before = [], set[str]()
        for swap in list(self._swaps):
            if swap.name in before:
                continue
            before.add(swap.name)
            try:
                model = self._obtain(swap.weights, in_use)
            except BloomeryError as error:
                self._swaps.remove(swap)
                swap.done.set_exception(error)
                continue
            if model is not None:
                self._swaps.remove(swap)
                taken.append((swap, model))
        return taken

    def take_requests(self, in_use: set[str]) -> list[Ready]:
        """Requests whose weights are in memory, and those whose weights cannot be had."""
        taken: list[Ready] = []
        if any(swap.weights.version not in in_use for swap in self._swaps):
            return taken
        for generate in list(self._requests):
            try:
                found: Model | BloomeryError | None = self._obtain(weights := self._weights(generate), in_use)
                if found is None and weights.version not in in_use:
                    break
            except BloomeryError as error:
                found = error
            if found is not None:
                self._requests.remove(generate)
                taken.append(Ready(generate, found, self._aborted.pop(generate.request_id, ())))
        return taken

    def _obtain(self, weights: Weights, in_use: set[str]) -> Model | None:
        """The weights if they are there. If they are or will be, they are in use from here on."""
        with blame(WorkerError, f"cannot load weights {weights.version}"):
            if not self._versions.ask(weights, in_use=in_use):
                return None
            in_use.add(weights.version)
            return self._versions.take(weights.version)

    def _weights(self, generate: Generate) -> Weights:
        return self.served(generate.weights.name) if isinstance(generate.weights, Live) else generate.weights
