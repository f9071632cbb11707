"""`Sampler`: requests in, events out, one step at a time.

Between two steps requests come and go, names are given other weights, and all may stand still. `Arrivals` has the requests that wait for their
weights, `Queues` those that have them, and `Stepper` takes these on by a step. A request that names a version keeps it to its end; one that names
what is served (`Live`) goes on with other weights when these are swapped.
"""

import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from typing import Final

from bloomery.infer.arrivals import Arrivals, Guides, Kind, Swap
from bloomery.infer.cache import KeyValueCache
from bloomery.infer.grammar import Grammars
from bloomery.infer.packing import Packing
from bloomery.infer.plan import Limits, blocks_of
from bloomery.infer.queues import Queues
from bloomery.infer.request import Request
from bloomery.infer.runner import Runner
from bloomery.infer.stepper import Stepper
from bloomery.infer.versions import VERSIONS_IN_MEMORY, Model, Source, Versions
from bloomery.infer.waits import Waits
from bloomery.models.decoder import Decoder
from bloomery.models.form import Form
from bloomery.models.memory import free_bytes
from bloomery.types.checks import check_generate
from bloomery.types.errors import BloomeryError, Conflict, Corrupt, NotSupported, WorkerError, blame
from bloomery.types.generation import Abort, Generate, SamplerEvent, Weights
from bloomery.types.serving import KvPolicy, PauseMode, QueueTimes

CACHE_BYTES: Final = 1 << 30
"""Bound of the key and value cache; a sequence that runs alone may exceed it."""
KEPT_BYTES: Final = 1 << 27
"""Bound of the keys and values of sequences that have left."""
IDLE_S: Final = 10.0
"""Without a step for so long, memory that stands empty is given back. Not at once: bursts follow each other, as rollouts do, and each would take
again what the one before gave back, and the system clears it first."""


class Sampler:
    """Continuous batching over many versions of one model: adapters on it, and models of its form."""

    def __init__(
        self,
        decoder: Decoder,
        source: Source,
        limits: Limits | None = None,
        grammars: Grammars | None = None,
        form: Form | None = None,
        *,
        versions_in_memory: int = VERSIONS_IN_MEMORY,
        alone: bool = False,
        idle_s: float = IDLE_S,
    ) -> None:
        """`alone`: nothing else reads the decoder or what the source loads, so that plain weights need not stay beside packed ones. `idle_s`: after
        so long without a step `tidy` gives memory back."""
        form = Form() if form is None else form
        self._config, self._grammars = decoder.config, grammars
        packing = self._packing = Packing(source, decoder, in_place=alone) if form.packed else None
        self._limits = _with_states(limits or _limits(decoder), decoder)
        self._cache = KeyValueCache(
            decoder.config,
            dtype=decoder.dtype,
            device=decoder.device,
            cache_tokens=self._limits.cache_tokens,
            kept_tokens=self._limits.kept_tokens,
        )
        self._versions = Versions(packing or source, lambda: free_bytes(decoder.device), self._cache.shrink, limit_versions=versions_in_memory)
        self._runner = Runner(self._cache, form, packing.twin if packing is not None else _unpacked)
        self._arrivals, self._queues = Arrivals(self._versions), Queues(self._cache)
        self._stepper = Stepper(self._queues, self._cache, self._runner, self._limits, grammars, context=self._config.context)
        self.swaps = 0
        """How often a name was given other weights."""
        self.paused: PauseMode | None = None
        self._idle_s = idle_s
        self._tidy_at_s = time.monotonic() + idle_s
        """When memory is given back, unless there is a step before."""

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._queues.events or self._arrivals.num_swaps) or (self.in_hand and self.paused != "keep")

    @property
    def in_hand(self) -> bool:
        """Whether requests are not finished, but for those that wait for the end of a pause."""
        return bool(self._queues.requests or self._arrivals.num_requests)

    @property
    def request_ids(self) -> list[str]:
        """Of those that are in hand."""
        return [*self._queues.requests, *self._arrivals.request_ids]

    @property
    def versions(self) -> Versions:
        """The weights in memory."""
        return self._versions

    @property
    def names(self) -> dict[str, Weights]:
        """What is served under each name; from any thread."""
        return dict(self._arrivals.names)

    def served(self, name: str) -> Weights:
        """What is served under one name; from any thread."""
        return self._arrivals.served(name)

    @property
    def running_sequences(self) -> int:
        """Samples with a place in the cache."""
        return len(self._queues.running)

    @property
    def prefills(self) -> bool:
        """Whether the next step may compute prompts: of those who run, or of those who wait and may find a place."""
        running = self._queues.running
        return bool(self._queues.waiting and len(running) < self._limits.slots) or any(sample.missing for sample in running)

    @property
    def waiting_sequences(self) -> int:
        """Samples in the queue, those that wait for weights included."""
        return len(self._queues.waiting) + self._arrivals.samples

    @property
    def waiting_by_priority(self) -> dict[str, int]:
        """Samples in the queue by class, without those that wait for weights."""
        return dict(Counter(sample.priority for sample in self._queues.waiting))

    @property
    def cache_usage(self) -> float:
        """Share of the cache that those who run take, 0 to 1; one that runs alone may take more than there is."""
        return min(1.0, blocks_of(self._queues.running, self._limits) / max(1, self._limits.blocks))

    @property
    def tokens_sampled(self) -> int:
        """Since it began."""
        return self._stepper.tokens_sampled

    @property
    def tokens_kept(self) -> int:
        """Of these, those that were taken over from drafts."""
        return self._stepper.tokens_kept

    @property
    def tokens_prefilled(self) -> int:
        """Since it began; what was taken over from others does not count."""
        return self._stepper.tokens_prefilled

    @property
    def preemptions(self) -> int:
        """How often a sample lost its place, since it began."""
        return self._stepper.preemptions

    @property
    def queue_times(self) -> QueueTimes:
        """How long samples stood in the queue, since it began or forgot them."""
        return self._stepper.waits.so_far

    def forget_queue_times(self) -> None:
        """What was asked so far was asked by nobody outside."""
        self._stepper.waits = Waits()

    def submit(self, generate: Generate) -> None:
        """Queue a request; when it cannot be served, the next step says so."""
        try:
            with blame(WorkerError, f"request `{generate.request_id}`"):
                if generate.request_id in self._queues.requests or self._arrivals.knows(generate.request_id):
                    raise Conflict(f"request `{generate.request_id}` is being served already: choose a fresh id", field="request_id")
                check_generate(generate, self._config)
                self._arrivals.add(generate, self._guides(generate), paused=self.paused is not None)
        except BloomeryError as error:
            self._queues.refuse(generate, error)

    def abort(self, abort: Abort) -> None:
        """End a request's samples, or one of them; those that ended already are left alone."""
        self._queues.abort(abort)
        if (generate := self._arrivals.abort(abort)) is not None:
            self._queues.end_unbegun(generate)

    def prepare(self, model: Model) -> None:
        """What a model that was made elsewhere needs before its first step; from any thread, and in vain nowhere."""
        if self._packing is not None:
            self._packing.twin(model.decoder)

    def computed_with(self, decoder: Decoder) -> Decoder:
        """The form in which a decoder's matrices are multiplied with: itself, or its packed twin."""
        return decoder if self._packing is None else self._packing.twin(decoder)

    def condemn(self, version: str, error: Corrupt) -> None:
        """Weights in memory are not what they were: whoever runs with them hears so, and nobody gets them again."""
        for request_id in [request_id for request_id, request in self._queues.requests.items() if request.model.version == version]:
            self._queues.fail(request_id, error)
        self._versions.condemn(version)
        self._cache.forget_kept()

    def serve(self, name: str, weights: Weights, *, kind: Kind | None = None) -> Future[Model]:
        """Serve these weights under a new name as soon as they are in memory; done when that is so. Those of another `kind` are InvalidInput."""
        if name in self._arrivals.names or self._arrivals.is_swapped(name):
            raise Conflict(f"`{name}` is served already: swap its weights, or unload it first", field="name")
        return self._arrivals.swap(name, weights, "keep", kind=kind)

    def withdraw(self, name: str) -> None:
        """Serve nothing under a name any more; requests that run keep its weights."""
        self._let_go(self._arrivals.withdraw(name))
        for request in self._queues.requests.values():
            if request.name == name:
                request.name = None

    def swap(self, name: str, weights: Weights, policy: KvPolicy, *, kind: Kind | None = None) -> Future[Model]:
        """Serve other weights under a name as soon as they are in memory, between two steps, while everything runs on; done when that is so."""
        self._arrivals.served(name)
        return self._arrivals.swap(name, weights, policy, kind=kind)

    def stage(self, weights: Weights) -> Future[Model]:
        """Have weights in memory, proved, before anybody asks for them; done when that is so. It takes no place from anybody who samples."""
        return self._arrivals.swap(None, weights, "keep")

    def call_off_swaps(self, error: BloomeryError) -> None:
        """Whoever waits for weights under a name hears why they do not come."""
        self._arrivals.call_off_swaps(error)

    def pause(self, mode: PauseMode) -> None:
        """Sample nothing new until `resume`; what becomes of requests in hand, `mode` says. Those that come now wait."""
        self.paused = mode
        if mode == "abort":
            self._queues.abort_all()
            for generate in self._arrivals.abort_requests():
                self._queues.end_unbegun(generate)

    def resume(self) -> None:
        """Go on."""
        self.paused = None
        self._arrivals.resume()

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of requests that have left."""
        self._cache.forget_kept()
        self._cache.shrink()

    @property
    def tidy_in_s(self) -> float:
        """How long until `tidy` looks whether there is something to give back."""
        return max(0.0, self._tidy_at_s - time.monotonic())

    def tidy(self) -> None:
        """Give back what stands empty, if there was no step for a while."""
        if self.tidy_in_s == 0:
            self.shrink_cache()
            self._tidy_at_s = time.monotonic() + self._idle_s

    def shrink_cache(self) -> None:
        """Give back memory of the cache that stands empty, where nobody runs, however lately somebody did."""
        self._cache.shrink()

    def rest(self) -> None:
        """Give back all memory that can be had again: keys and values, and weights that a disk holds."""
        if self.in_hand:
            raise Conflict("requests are in hand: pause with `drain` or `abort` first", field="mode")
        self._cache.clear()
        self._runner.forget()
        self._versions.forget_idle(())

    def step(self) -> list[SamplerEvent]:
        """One step of everything that runs: one token at most of every sample, but of those whose drafts are right, or right again."""
        self._receive()
        if self.paused != "keep":
            self._stepper.advance()
        self._tidy_at_s = time.monotonic() + self._idle_s
        return self._queues.take_events()

    def fail_running(self, message: str) -> None:
        """A step broke: every request that took part in it ends, which the next step says."""
        self._queues.break_off(message)

    def forget_all(self) -> None:
        """Nobody listens any more: drop every request without a word."""
        self._queues.forget_all()
        self._arrivals.forget_requests()
        self.resume()
        self._runner.forget()

    def _receive(self) -> None:
        """Flip what was swapped, and begin the requests whose weights are there."""
        if not (self._queues.events or self._queues.requests or self.paused == "keep"):
            self._arrivals.wait()
        self._arrivals.settle(self._stepper.step_s)
        in_use = {request.model.version for request in self._queues.requests.values()}
        swaps = self._arrivals.take_swaps(in_use)
        for swap, model in swaps:
            self._flip(swap, model)
        if self.paused == "keep":
            if not (swaps or self._queues.events):
                self._arrivals.wait_in_pause()
            return
        for generate, weights, aborted, guides, since_s in self._arrivals.take_requests(in_use):
            try:
                with blame(WorkerError, f"request `{generate.request_id}`"):
                    if isinstance(weights, BloomeryError):
                        raise weights
                    request = Request(generate, weights, () if guides is None else guides.result(), since_s=since_s)
            except BloomeryError as error:
                self._queues.refuse(generate, error)
                continue
            self._queues.add(request)
            for index in aborted:
                self.abort(Abort(request_id=generate.request_id, sample=index))

    def _flip(self, swap: Swap, model: Model) -> None:
        """From here on the name is these weights, for requests that run too."""
        if swap.name is None:
            swap.done.set_result(model)
            return
        before = self._arrivals.names.get(swap.name)
        self._arrivals.names[swap.name] = swap.weights
        anew: set[int] = set()
        for request in self._queues.requests.values():
            if request.name == swap.name:
                stem = request.turn_to(model)
                for sample in request.samples:
                    # Who has sampled nothing yet loses a part of a prefill at most, and is wholly of the new weights.
                    keeps = swap.policy == "keep" and bool(request.continuations.get(sample.index))
                    sample.stem = stem if keeps and sample in self._queues.running else request.stem
                    if not keeps:
                        anew.add(id(sample))
        self._queues.preempt([sample for sample in self._queues.running if id(sample) in anew])
        if swap.policy == "flush":
            self._cache.forget_kept()
        if before is not None:
            self.swaps += 1
            self._let_go(before)
        swap.done.set_result(model)

    def _let_go(self, weights: Weights) -> None:
        """Of what a name stood for, unless one still does."""
        if not self._arrivals.is_named(weights.version):
            self._versions.let_go(weights.version)

    def _guides(self, generate: Generate) -> Guides | None:
        """What the first tokens of its samples may be, which takes a while to find out."""
        if generate.grammar is None:
            return None
        if self._grammars is None:
            raise NotSupported("`grammar`: this sampler knows no tokenizer, leave it out", field="grammar")
        return self._grammars.guides(generate, generate.grammar)


def _limits(decoder: Decoder) -> Limits:
    place = KeyValueCache.bytes_per_token(decoder.config, decoder.dtype)
    return Limits(cache_tokens=CACHE_BYTES // place, kept_tokens=KEPT_BYTES // place)


def _with_states(limits: Limits, decoder: Decoder) -> Limits:
    recurrent = decoder.config.recurrent
    if recurrent is None:
        return limits
    return replace(limits, chunk_rows=recurrent.chunk_rows, state_tokens=KeyValueCache.state_tokens(decoder.config, decoder.dtype))


def _unpacked(decoder: Decoder) -> Decoder:
    return decoder
