"""Requests and swaps that wait for their weights, in the order in which they came, and requests that wait for their grammar.

Weights are loaded beside the sampler (`versions`), so whoever waits for them delays nobody. Who waits for room in memory is passed by requests of his
class, or of one before, whose weights are there; but by so many and no more, or they could keep all room in use for ever. Nobody else asks for room
before he has got it.
"""

import time
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from enum import IntEnum
from typing import Final, Literal, NamedTuple

from bloomery.infer.grammar import Guide
from bloomery.infer.plan import CLASSES
from bloomery.infer.versions import Model, Versions
from bloomery.types.errors import BloomeryError, Conflict, InvalidInput, NotFound, WorkerError, blame
from bloomery.types.generation import Abort, Generate, Live, Weights
from bloomery.types.serving import MODEL, KvPolicy

_WAIT_S: Final = 0.05
"""How long a step waits for weights that are being loaded, when there is nothing else to do: whatever else the caller has to do can wait as long."""
_MAY_PASS: Final = 64
"""Requests that may pass one who waits for room."""

Guides = Future[list[Guide]]
Kind = Literal["adapter", "model"]


class Swap(NamedTuple):
    """Serve other weights under a name from the next step on; `done` when it is so."""

    name: str | None
    """None: under none yet; they are to be in memory."""
    weights: Weights
    policy: KvPolicy
    done: Future[Model]
    kind: Kind | None = None
    """What alone is taken; None: either."""


class Ready(NamedTuple):
    """A request whose weights are in memory, or why they are not and will not be."""

    generate: Generate
    weights: Model | BloomeryError
    aborted: Collection[int]
    """Samples of it that nobody wants any more."""
    guides: Guides | None
    """Where it has a grammar: done, one for each sample, or why there can be none."""
    since_s: float
    """When it came (`time.perf_counter`)."""


class _Rank(IntEnum):
    """Why somebody has his turn; the first goes first."""

    GIVEN_ROOM = 0
    """His weights have room in memory, which he would keep unused."""
    PASSED = 1
    """As many have passed him as may."""
    OF_CLASS = 2


class _Turn(NamedTuple):
    """When a request is looked at, among others."""

    rank: _Rank
    place: int = 0
    """That of its class."""


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
        self._guides: dict[str, Guides] = {}
        self._since_s: dict[str, float] = {}
        self._passed: Counter[str] = Counter()
        """How many have passed each request while somebody waited for room."""
        self._swaps_passed = 0

    @property
    def num_requests(self) -> int:
        """How many requests wait that came before a pause."""
        return len(self._requests)

    @property
    def request_ids(self) -> list[str]:
        """Of the same."""
        return [each.request_id for each in self._requests]

    @property
    def num_swaps(self) -> int:
        """How many swaps wait, those without a name included."""
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

    def add(self, generate: Generate, guides: Guides | None, *, paused: bool) -> None:
        """A request, and what leads its samples where it has a grammar; while `paused` it is a newcomer."""
        self._weights(generate)
        if guides is not None:
            self._guides[generate.request_id] = guides
        self._since_s[generate.request_id] = time.perf_counter()
        (self._newcomers if paused else self._requests).append(generate)

    def resume(self) -> None:
        """Newcomers are requests like all others."""
        self._requests += self._newcomers
        self._newcomers.clear()

    def swap(self, name: str | None, weights: Weights, policy: KvPolicy, *, kind: Kind | None = None) -> Future[Model]:
        """Weights for a name, be it new or not, or for none; InvalidInput where they are not of that kind."""
        swap = Swap(name, weights, policy, Future(), kind)
        # Nobody can cancel it any more.
        swap.done.set_running_or_notify_cancel()
        self._swaps.append(swap)
        return swap.done

    def call_off_swaps(self, error: BloomeryError) -> None:
        """No name gets the weights that are on their way."""
        for swap in self._swaps:
            swap.done.set_exception(error)
        self._swaps.clear()

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

    def is_named(self, version: str) -> bool:
        """Whether a name stands for a version, or is just being given it."""
        return any(weights.version == version for weights in (*self.names.values(), *(swap.weights for swap in self._swaps)))

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
                    self._guides.pop(abort.request_id, None)
                    del self._aborted[abort.request_id], self._passed[abort.request_id], self._since_s[abort.request_id]
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
        self._guides.clear()
        self._since_s.clear()
        self._passed.clear()

    def wait(self) -> None:
        """A moment, or until something is there; for when there is nothing else to do."""
        if self._requests or self._swaps:
            self._versions.wait(_WAIT_S, [guides for guides in self._guides.values() if not guides.done()])

    def wait_in_pause(self) -> None:
        """The same for swaps alone, which may lack room as long as the pause lasts: those who run stand still, and make none."""
        if self._swaps:
            self._versions.wait_for_more(_WAIT_S)

    def settle(self, step_s: float) -> None:
        """A step begins that takes so long by itself; see `Versions.settle`."""
        served = [self.names.get(each.weights.name) if isinstance(each.weights, Live) else each.weights for each in self._requests]
        wanted = {weights.version for weights in (*served, *(swap.weights for swap in self._swaps)) if weights is not None}
        self._versions.settle(wanted, step_s=step_s)

    def take_swaps(self, in_use: set[str]) -> list[tuple[Swap, Model]]:
        """Swaps whose weights are in memory; those of broken weights say so themselves."""
        taken, before = [], set[str]()
        for swap in list(self._swaps):
            if swap.name is not None:
                if swap.name in before:
                    continue
                before.add(swap.name)
            try:
                model = self._obtain(swap.weights, in_use)
                if model is not None:
                    _refuse_other_kind(swap, model)
            except BloomeryError as error:
                self._swaps.remove(swap)
                swap.done.set_exception(error)
                continue
            if model is not None:
                self._swaps.remove(swap)
                taken.append((swap, model))
        return taken

    def take_requests(self, in_use: set[str]) -> list[Ready]:
        """Requests whose weights are in memory, and those whose weights cannot be had; in the order in which they came."""
        swap_lacks_room = any(swap.weights.version not in in_use for swap in self._swaps)
        closed = swap_lacks_room and self._swaps_passed >= _MAY_PASS
        ready: dict[str, Ready] = {}
        lacking: Generate | None = None
        turns = {generate.request_id: self._turn(generate) for generate in self._requests}
        for generate in sorted(self._requests, key=lambda each: turns[each.request_id]):
            turn = turns[generate.request_id]
            may_pass = lacking is None or (turn.rank == _Rank.OF_CLASS and turn == turns[lacking.request_id])
            if turn.rank != _Rank.GIVEN_ROOM and (closed or not may_pass):
                break
            try:
                weights = self._weights(generate)
                there = turn.rank == _Rank.GIVEN_ROOM or weights.version in in_use or weights.version in self._versions.held
                if not there and (swap_lacks_room or lacking is not None):
                    continue
                found: Model | BloomeryError | None = self._obtain(weights, in_use)
                if found is None and weights.version not in in_use:
                    lacking = generate
            except BloomeryError as error:
                found = error
            guides = self._guides.get(generate.request_id)
            if isinstance(found, BloomeryError) or (found is not None and (guides is None or guides.done())):
                ready[generate.request_id] = Ready(
                    generate, found, self._aborted.pop(generate.request_id, ()), guides, self._since_s[generate.request_id]
                )
        self._swaps_passed = self._swaps_passed + len(ready) if swap_lacks_room else 0
        if lacking is not None:
            self._count_passing(ready)
        return self._leave(ready)

    def _turn(self, generate: Generate) -> _Turn:
        weights = self.names.get(generate.weights.name) if isinstance(generate.weights, Live) else generate.weights
        if weights is not None and weights.version in self._versions.loading:
            return _Turn(_Rank.GIVEN_ROOM)
        if self._passed[generate.request_id] >= _MAY_PASS:
            return _Turn(_Rank.PASSED)
        return _Turn(_Rank.OF_CLASS, CLASSES.index(generate.priority))

    def _count_passing(self, ready: Collection[str]) -> None:
        passing = 0
        for generate in reversed(self._requests):
            if generate.request_id in ready:
                passing += 1
            elif passing:
                self._passed[generate.request_id] += passing

    def _leave(self, ready: Mapping[str, Ready]) -> list[Ready]:
        leaving = [ready[generate.request_id] for generate in self._requests if generate.request_id in ready]
        self._requests = [generate for generate in self._requests if generate.request_id not in ready]
        for request_id in ready:
            self._guides.pop(request_id, None)
            del self._passed[request_id], self._since_s[request_id]
        return leaving

    def _obtain(self, weights: Weights, in_use: set[str]) -> Model | None:
        """The weights if they are there. If they are or will be, they are in use from here on."""
        with blame(WorkerError, f"cannot load weights {weights.version}"):
            if not self._versions.ask(weights, in_use=in_use):
                return None
            in_use.add(weights.version)
            return self._versions.take(weights.version)

    def _weights(self, generate: Generate) -> Weights:
        return self.served(generate.weights.name) if isinstance(generate.weights, Live) else generate.weights


def _refuse_other_kind(swap: Swap, model: Model) -> None:
    if swap.kind == "adapter" and model.adapter is None:
        raise InvalidInput(f"version {model.version} is a whole model, and `{swap.name}` names an adapter: switch `{MODEL}` to it", field="weights")
    if swap.kind == "model" and model.adapter is not None:
        raise InvalidInput(
            f"version {model.version} is an adapter, and `{swap.name}` is a whole model: load it under a name of its own", field="weights"
        )
