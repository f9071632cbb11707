"""`Sampler`: requests in, events out, one step at a time.

A step reads plan, run, commit: `plan_step` decides, `Runner` computes, and `Sampler` writes down what came of it. A request keeps the weights it
started with; adapters are loaded when a request first names them, and the latest few stay in memory.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from bloomery.infer.cache import KeyValueCache
from bloomery.infer.plan import Chunk, Fork, Limits, Sample, key_length, plan_step
from bloomery.infer.request import Request, check
from bloomery.infer.runner import Feed, Model, Runner
from bloomery.infer.sampling import choose
from bloomery.models.adapters import FusedAdapter
from bloomery.models.decoder import Decoder
from bloomery.types.errors import BloomeryError, WorkerError, blame
from bloomery.types.generation import Abort, FinishReason, Generate, GenerateFailed, SampledToken, SampleFinished, SamplerEvent, Weights

ADAPTERS_IN_MEMORY: Final = 16
CACHE_BYTES: Final = 1 << 30
"""Bound of the key and value cache; a sequence that runs alone may exceed it."""


class Sampler:
    """Continuous batching over one base model and many adapters."""

    def __init__(self, decoder: Decoder, load_adapter: Callable[[Weights], FusedAdapter | None], limits: Limits | None = None) -> None:
        self._config = decoder.config
        self._load_adapter = load_adapter
        self._limits = limits or Limits(cache_tokens=CACHE_BYTES // KeyValueCache.bytes_per_token(decoder.config, decoder.dtype))
        self._cache = KeyValueCache(decoder.config, dtype=decoder.dtype, device=decoder.device)
        self._runner = Runner(decoder, self._cache)
        self._adapters: OrderedDict[str, FusedAdapter | None] = OrderedDict()
        self._requests: dict[str, Request] = {}
        self._waiting: list[Sample] = []
        self._running: list[Sample] = []
        self._events: list[SamplerEvent] = []
        self.tokens_sampled = 0

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._events)

    @property
    def running_sequences(self) -> int:
        """Samples with a place in the cache."""
        return len(self._running)

    @property
    def waiting_sequences(self) -> int:
        """Samples in the queue."""
        return len(self._waiting)

    def submit(self, generate: Generate) -> None:
        """Queue a request; when it cannot be served, the next step says so."""
        try:
            with blame(WorkerError, f"request `{generate.request_id}`"):
                check(generate, self._config, taken=generate.request_id in self._requests)
                request = Request(generate, self._model(generate.weights))
        except BloomeryError as error:
            self._events.append(GenerateFailed(request_id=generate.request_id, message=error.message, category=error.category))
            return
        self._requests[generate.request_id] = request
        self._waiting += request.samples()

    def abort(self, abort: Abort) -> None:
        """End a request's samples, or one of them; those that ended already are left alone."""
        for sample in [*self._running, *self._waiting]:
            if sample.request_id == abort.request_id and abort.sample in (None, sample.index):
                self._finish(sample, "abort")

    def step(self) -> list[SamplerEvent]:
        """One step of everything that runs: at most one token per sample."""
        plan = plan_step(self._waiting, self._running, self._limits)
        self._preempt(plan.preempt)
        self._admit(plan.admit)
        self._prefill(plan.prefill)
        self._fork(plan.forks)
        self._commit_prompts([*plan.admit, *(chunk.sample for chunk in plan.prefill)])
        self._decode([sample for sample in plan.decode if sample.request_id in self._requests])
        events, self._events = self._events, []
        return events

    def fail_running(self, message: str) -> None:
        """A step broke: every request that took part in it ends, which the next step says."""
        for request_id in dict.fromkeys(sample.request_id for sample in self._running or self._waiting):
            self._fail(request_id, message)
        self._cache.clear()

    def forget_all(self) -> None:
        """Nobody listens any more: drop every request without a word."""
        self._requests.clear()
        self._waiting.clear()
        self._running.clear()
        self._events.clear()
        self._cache.clear()

    def _model(self, weights: Weights) -> Model:
        if weights.version not in self._adapters:
            with blame(WorkerError, f"cannot load weights {weights.version}"):
                self._adapters[weights.version] = self._load_adapter(weights)
        self._adapters.move_to_end(weights.version)
        if len(self._adapters) > ADAPTERS_IN_MEMORY:
            self._adapters.popitem(last=False)
        return Model(weights.version, self._adapters[weights.version])

    def _preempt(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._leave(sample)
        self._waiting[:0] = samples

    def _admit(self, samples: Sequence[Sample]) -> None:
        del self._waiting[: len(samples)]
        for sample in samples:
            self._running.append(sample)
            self._cache.place(sample)
        if self._running:
            self._cache.reserve(key_length(self._running))

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            return
        feeds = [self._feed(chunk.sample, chunk.start, chunk.stop) for chunk in chunks]
        for feed, hidden_RD in zip(feeds, self._runner.prefill(feeds), strict=True):
            request = self._requests[feed.sample.request_id]
            if following := request.unscored(feed.start, feed.stop):
                request.add_scores(feed.start, self._runner.score(hidden_RD, feed.model.adapter, following, request.generate.prompt_top_k))

    def _fork(self, forks: Sequence[Fork]) -> None:
        for fork in forks:
            self._cache.fork(fork.source, fork.sample)

    def _commit_prompts(self, samples: Sequence[Sample]) -> None:
        for sample in dict.fromkeys(samples):
            request = self._requests.get(sample.request_id)
            if request is None:
                # A sibling's score was not finite, which ended the request.
                continue
            score = request.take_score()
            if score is not None and not np.isfinite(score.logprobs.numpy()[1:]).all():
                self._fail_broken(request)
                continue
            if score is not None:
                self._events.append(score)
            if not sample.decodes and not sample.missing:
                self._finish(sample, "length")

    def _decode(self, samples: Sequence[Sample]) -> None:
        if not samples:
            return
        requests = [self._requests[sample.request_id] for sample in samples]
        next_tokens = self._runner.decode([self._feed(sample, sample.length - 1, sample.length) for sample in samples])
        draws = [request.draw(sample.index) for request, sample in zip(requests, samples, strict=True)]
        tokens_B = choose(next_tokens.logits_BV.numpy(), draws)
        logprobs = next_tokens.logprobs(torch.from_numpy(tokens_B)).tolist()
        for row, (sample, request) in enumerate(zip(samples, requests, strict=True)):
            token = SampledToken(
                request_id=sample.request_id,
                sample=sample.index,
                position=draws[row].position,
                token=int(tokens_B[row]),
                logprob=logprobs[row],
                top=next_tokens.top(row, request.generate.top_logprobs),
            )
            self._commit(sample, token)

    def _commit(self, sample: Sample, token: SampledToken) -> None:
        request = self._requests.get(sample.request_id)
        if request is None:
            # A sibling in the same step had no finite log-probability, which ended the request.
            return
        if not math.isfinite(token.logprob):
            self._fail_broken(request)
            return
        self._events.append(token)
        self.tokens_sampled += 1
        sample.length += 1
        reason = request.append(sample.index, token.token, self._config.context)
        if reason is not None:
            self._finish(sample, reason)

    def _feed(self, sample: Sample, start: int, stop: int) -> Feed:
        request = self._requests[sample.request_id]
        return Feed(sample, request.model, request.tokens(sample.index, start, stop), start)

    def _finish(self, sample: Sample, reason: FinishReason) -> None:
        self._events.append(SampleFinished(request_id=sample.request_id, sample=sample.index, reason=reason))
        self._leave(sample)
        request = self._requests[sample.request_id]
        del request.continuations[sample.index]
        if not request.continuations:
            del self._requests[sample.request_id]

    def _fail(self, request_id: str, message: str) -> None:
        for sample in [sample for sample in (*self._running, *self._waiting) if sample.request_id == request_id]:
            self._leave(sample)
        del self._requests[request_id]
        self._events.append(GenerateFailed(request_id=request_id, message=message, category="server"))

    def _fail_broken(self, request: Request) -> None:
        self._fail(request.generate.request_id, f"weights {request.model.version} are broken: they give log-probabilities that are not finite")

    def _leave(self, sample: Sample) -> None:
        if sample in self._running:
            self._running.remove(sample)
            self._cache.release(sample)
            sample.cached = 0
        else:
            self._waiting.remove(sample)
