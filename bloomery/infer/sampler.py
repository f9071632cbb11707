"""`Sampler`: requests in, events out, one step at a time.

A step reads plan, run, commit: `plan_step` decides, `Runner` computes, and `Sampler` writes down what came of it. A request keeps the weights it
started with (`versions.py`).
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from bloomery.infer.cache import KeyValueCache
from bloomery.infer.plan import Chunk, Fork, Limits, Plan, Sample, key_length, plan_step
from bloomery.infer.request import Request
from bloomery.infer.runner import Feed, NextTokens, Runner
from bloomery.infer.sampling import choose
from bloomery.infer.versions import Model, Source, Versions
from bloomery.models.decoder import Decoder
from bloomery.models.memory import free_bytes
from bloomery.types.arrays import Array
from bloomery.types.checks import check_generate
from bloomery.types.errors import BloomeryError, Conflict, WorkerError, blame
from bloomery.types.generation import (
    Abort,
    FinishReason,
    Generate,
    GenerateFailed,
    PromptFound,
    PromptRouted,
    SampledToken,
    SampleFinished,
    SamplerEvent,
    Weights,
)

CACHE_BYTES: Final = 1 << 30
"""Bound of the key and value cache; a sequence that runs alone may exceed it."""
KEPT_BYTES: Final = 1 << 27
"""Bound of the keys and values of sequences that have left."""


class Sampler:
    """Continuous batching over many versions of one model: adapters on it, and models of its form."""

    def __init__(self, decoder: Decoder, source: Source, limits: Limits | None = None) -> None:
        self._config = decoder.config
        self._versions = Versions(source, lambda: free_bytes(decoder.device))
        self._limits = limits or _limits(decoder)
        self._cache = KeyValueCache(decoder.config, dtype=decoder.dtype, device=decoder.device, kept_tokens=self._limits.kept_tokens)
        self._runner = Runner(self._cache)
        self._requests: dict[str, Request] = {}
        self._waiting: list[Sample] = []
        self._running: list[Sample] = []
        self._events: list[SamplerEvent] = []
        self.tokens_sampled = self.tokens_prefilled = 0

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
                if generate.request_id in self._requests:
                    raise Conflict(f"request `{generate.request_id}` is being served already: choose a fresh id", field="request_id")
                check_generate(generate, self._config)
                request = Request(generate, self._model(generate.weights))
        except BloomeryError as error:
            self._events.append(GenerateFailed(request_id=generate.request_id, message=error.message, category=error.category))
            return
        self._requests[generate.request_id] = request
        self._waiting += request.samples

    def abort(self, abort: Abort) -> None:
        """End a request's samples, or one of them; those that ended already are left alone."""
        for sample in [*self._running, *self._waiting]:
            if sample.request_id == abort.request_id and abort.sample in (None, sample.index):
                self._finish(sample, "abort")

    def step(self) -> list[SamplerEvent]:
        """One step of everything that runs: at most one token per sample."""
        plan = plan_step(self._waiting, self._running, self._limits, self._cache.kept)
        self._preempt(plan.preempt)
        self._admit(plan.admit)
        self._fork(plan.found)
        ends = self._prefill(plan.prefill)
        self._fork(plan.forks)
        self._begin(plan)
        self._commit_prompts([*plan.admit, *(chunk.sample for chunk in plan.prefill)])
        self._decode([sample for sample in plan.decode if sample.request_id in self._requests])
        self._sample_in_prefill([end for end in ends if end.feed.sample.request_id in self._requests])
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
        in_use = {request.model.version for request in self._requests.values()}
        with blame(WorkerError, f"cannot load weights {weights.version}"):
            return self._versions.get(weights, in_use=in_use)

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

    def _prefill(self, chunks: Sequence[Chunk]) -> list["_End"]:
        """Compute and score; returns what ended where a token is to be sampled."""
        if not chunks:
            return []
        feeds = [self._feed(chunk.sample, chunk.start, chunk.stop) for chunk in chunks]
        ends = []
        for feed, hidden_RD in zip(feeds, self._runner.prefill(feeds), strict=True):
            self.tokens_prefilled += len(feed.tokens)
            request = self._requests[feed.sample.request_id]
            if request.inquiry is not None and (question := request.inquiry.question(feed.stop)) is not None:
                request.inquiry.take(question, self._runner.score(hidden_RD, feed, question))
            if not feed.sample.left and not feed.sample.missing:
                ends.append(_End(feed, hidden_RD))
        return ends

    def _fork(self, forks: Sequence[Fork]) -> None:
        for fork in forks:
            self._cache.fork(fork.source, fork.sample, fork.tokens)

    def _begin(self, plan: Plan) -> None:
        """Say of every request that has just got its first place how much of its prompt need not be computed."""
        found = {fork.sample: fork.tokens for fork in (*plan.found, *plan.forks)}
        for sample in plan.admit:
            request = self._requests[sample.request_id]
            if not request.begun and sample in found:
                self._events.append(PromptFound(request_id=sample.request_id, tokens=found[sample]))
            request.begun = True

    def _commit_prompts(self, samples: Sequence[Sample]) -> None:
        for sample in dict.fromkeys(samples):
            request = self._requests.get(sample.request_id)
            if request is None:
                # A sibling's score was not finite, which ended the request.
                continue
            if request.inquiry is not None and request.inquiry.broken:
                self._fail_broken(request)
                continue
            score = request.take_score()
            if score is not None:
                self._events.append(score)
            if request.owes_routing and not sample.missing:
                experts = Array.of(self._cache.experts(sample, sample.shared))
                self._events.append(PromptRouted(request_id=sample.request_id, experts=experts))
                request.owes_routing = False
            if not sample.decodes and sample.left and not sample.missing:
                self._finish(sample, "length")

    def _decode(self, samples: Sequence[Sample]) -> None:
        if samples:
            self._choose(samples, self._runner.decode([self._feed(sample, sample.length - 1, sample.length) for sample in samples]))

    def _sample_in_prefill(self, ends: Sequence["_End"]) -> None:
        if ends:
            feeds = [end.feed for end in ends]
            self._choose([feed.sample for feed in feeds], self._runner.after(feeds, [end.hidden_RD for end in ends]))

    def _choose(self, samples: Sequence[Sample], next_tokens: NextTokens) -> None:
        requests = [self._requests[sample.request_id] for sample in samples]
        draws = [request.draw(sample.index) for request, sample in zip(requests, samples, strict=True)]
        tokens_B = choose(next_tokens.logits_BV.numpy(), draws)
        logprobs = next_tokens.logprobs(torch.from_numpy(tokens_B)).tolist()
        fed_experts = self._fed_experts([sample for sample, request in zip(samples, requests, strict=True) if request.generate.routing])
        for row, (sample, request) in enumerate(zip(samples, requests, strict=True)):
            token = SampledToken(
                request_id=sample.request_id,
                sample=sample.index,
                position=draws[row].position,
                token=int(tokens_B[row]),
                logprob=logprobs[row],
                top=next_tokens.top(row, request.generate.top_logprobs),
                fed_experts=fed_experts.get(sample),
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

    def _fed_experts(self, samples: Sequence[Sample]) -> dict[Sample, Array]:
        """Where the token went that each of them was just fed."""
        return dict(zip(samples, map(Array.of, self._cache.last_experts(samples)), strict=True)) if samples else {}

    def _feed(self, sample: Sample, start: int, stop: int) -> Feed:
        request = self._requests[sample.request_id]
        return Feed(sample, request.model, request.tokens(sample.index, start, stop), start)

    def _finish(self, sample: Sample, reason: FinishReason) -> None:
        self._events.append(SampleFinished(request_id=sample.request_id, sample=sample.index, reason=reason))
        request = self._requests[sample.request_id]
        # The next turn of a conversation, or the same prompt again, begins like this sample; siblings that still run hold most of it.
        if sample in self._running and sum(other.request_id == sample.request_id for other in self._running) == 1:
            self._cache.keep(sample, request.cached_stem(sample))
        self._leave(sample)
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


class _End(NamedTuple):
    """The end of a prompt that was prefilled to its last token, with the hidden states of its chunk."""

    feed: Feed
    hidden_RD: Tensor


def _limits(decoder: Decoder) -> Limits:
    place = KeyValueCache.bytes_per_token(decoder.config, decoder.dtype)
    return Limits(cache_tokens=CACHE_BYTES // place, kept_tokens=KEPT_BYTES // place)
