"""`Sampler`: requests in, events out, one step at a time.

A step reads plan, run, commit: `plan_step` decides, `Runner` computes, and `Sampler` writes down what came of it. A request that names a version
keeps it to its end; one that names what is served (`Live`) goes on with other weights when these are swapped, which happens between two steps.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bloomery.infer.arrivals import Arrivals, Guides, Swap
from bloomery.infer.cache import KeyValueCache
from bloomery.infer.grammar import Grammars
from bloomery.infer.packing import Packing
from bloomery.infer.plan import Chunk, Fork, Limits, Plan, Sample, key_length, plan_step
from bloomery.infer.request import Request
from bloomery.infer.runner import Feed, NextTokens, Runner
from bloomery.infer.sampling import choose
from bloomery.infer.scoring import Question
from bloomery.infer.versions import VERSIONS_IN_MEMORY, Model, Source, Versions
from bloomery.models.decoder import Decoder
from bloomery.models.memory import free_bytes
from bloomery.models.numerics import Form
from bloomery.types.arrays import Array
from bloomery.types.checks import check_generate
from bloomery.types.errors import BloomeryError, Category, Conflict, NotSupported, WorkerError, blame
from bloomery.types.generation import (
    Abort,
    FinishReason,
    Generate,
    GenerateFailed,
    PromptEmbedded,
    PromptFound,
    PromptRouted,
    SampledToken,
    SampleFinished,
    SamplerEvent,
    Weights,
)
from bloomery.types.serving import KvPolicy, PauseMode

CACHE_BYTES: Final = 1 << 30
"""Bound of the key and value cache; a sequence that runs alone may exceed it."""
KEPT_BYTES: Final = 1 << 27
"""Bound of the keys and values of sequences that have left."""

_FOLLOW_S: Final = 0.005
"""How long a step waits at most for guides: about as long as one of a small model takes."""
_IDLE_S: Final = 0.05
"""The same where there is nothing else to do; whatever else the caller has to do can wait as long."""


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
    ) -> None:
        """`alone`: nothing else reads the decoder or what the source loads, so that plain weights need not stay beside packed ones."""
        form = Form() if form is None else form
        self._config, self._grammars = decoder.config, grammars
        packing = self._packing = Packing(source, decoder, in_place=alone) if form.packed else None
        self._versions = Versions(packing or source, lambda: free_bytes(decoder.device), limit_versions=versions_in_memory)
        self._limits = _with_states(limits or _limits(decoder), decoder)
        self._cache = KeyValueCache(decoder.config, dtype=decoder.dtype, device=decoder.device, kept_tokens=self._limits.kept_tokens)
        self._runner = Runner(self._cache, form, packing.twin if packing is not None else _unpacked)
        self._arrivals = Arrivals(self._versions)
        self._requests: dict[str, Request] = {}
        self._waiting: list[Sample] = []
        self._running: list[Sample] = []
        self._following: dict[Sample, Future[None]] = {}
        """Samples whose guides are just taking their last tokens."""
        self._events: list[SamplerEvent] = []
        self.tokens_sampled = self.tokens_prefilled = self.swaps = self.preemptions = 0
        self.paused: PauseMode | None = None

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._events or self._arrivals.swaps) or (self.in_hand and self.paused != "keep")

    @property
    def in_hand(self) -> bool:
        """Whether requests are not finished, but for those that wait for the end of a pause."""
        return bool(self._requests or self._arrivals.requests)

    @property
    def versions(self) -> Versions:
        """The weights in memory."""
        return self._versions

    @property
    def names(self) -> dict[str, Weights]:
        """What is served under each name."""
        return dict(self._arrivals.names)

    def served(self, name: str) -> Weights:
        """What is served under one name."""
        return self._arrivals.served(name)

    @property
    def running_sequences(self) -> int:
        """Samples with a place in the cache."""
        return len(self._running)

    @property
    def waiting_sequences(self) -> int:
        """Samples in the queue, those that wait for weights included."""
        return len(self._waiting) + self._arrivals.samples

    @property
    def waiting_by_priority(self) -> dict[str, int]:
        """Samples in the queue by class, without those that wait for weights."""
        return dict(Counter(sample.priority for sample in self._waiting))

    @property
    def cache_usage(self) -> float:
        """Share of the cache that those who run take, 0 to 1; one that runs alone may take more than there is."""
        tokens = key_length(self._running) + self._limits.state_tokens if self._running else 0
        return min(1.0, len(self._running) * tokens / self._limits.cache_tokens)

    def submit(self, generate: Generate) -> None:
        """Queue a request; when it cannot be served, the next step says so."""
        try:
            with blame(WorkerError, f"request `{generate.request_id}`"):
                if generate.request_id in self._requests or self._arrivals.knows(generate.request_id):
                    raise Conflict(f"request `{generate.request_id}` is being served already: choose a fresh id", field="request_id")
                check_generate(generate, self._config)
                self._arrivals.add(generate, self._guides(generate), paused=self.paused is not None)
        except BloomeryError as error:
            self._refuse(generate, error)

    def abort(self, abort: Abort) -> None:
        """End a request's samples, or one of them; those that ended already are left alone."""
        for sample in [*self._running, *self._waiting]:
            if sample.request_id == abort.request_id and abort.sample in (None, sample.index):
                self._finish(sample, "abort")
        if (generate := self._arrivals.abort(abort)) is not None:
            self._end_unbegun(generate)

    def prepare(self, model: Model) -> None:
        """What a model that was made elsewhere needs before its first step; from any thread, and in vain nowhere."""
        if self._packing is not None:
            self._packing.twin(model.decoder)

    def serve(self, name: str, weights: Weights) -> Future[Model]:
        """Serve these weights under a new name as soon as they are in memory; done when that is so."""
        if name in self._arrivals.names or self._arrivals.is_swapped(name):
            raise Conflict(f"`{name}` is served already: swap its weights, or unload it first", field="name")
        return self._arrivals.swap(name, weights, "keep")

    def withdraw(self, name: str) -> None:
        """Serve nothing under a name any more; requests that run keep its weights."""
        self._versions.let_go(self._arrivals.withdraw(name).version)
        for request in self._requests.values():
            if request.name == name:
                request.name = None

    def swap(self, name: str, weights: Weights, policy: KvPolicy) -> Future[Model]:
        """Serve other weights under a name as soon as they are in memory, between two steps, while everything runs on; done when that is so."""
        self._arrivals.served(name)
        return self._arrivals.swap(name, weights, policy)

    def pause(self, mode: PauseMode) -> None:
        """Sample nothing new until `resume`; what becomes of requests in hand, `mode` says. Those that come now wait."""
        self.paused = mode
        if mode == "abort":
            for sample in [*self._running, *self._waiting]:
                self._finish(sample, "abort")
            for generate in self._arrivals.abort_requests():
                self._end_unbegun(generate)

    def resume(self) -> None:
        """Go on."""
        self.paused = None
        self._arrivals.resume()

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of requests that have left."""
        self._cache.forget_kept()

    def rest(self) -> None:
        """Give back all memory that can be had again: keys and values, and weights that a disk holds."""
        if self.in_hand:
            raise Conflict("requests are in hand: pause with `drain` or `abort` first", field="mode")
        self._cache.clear()
        self._runner.forget()
        self._versions.forget_idle(())

    def step(self) -> list[SamplerEvent]:
        """One step of everything that runs: at most one token per sample."""
        self._receive()
        if self.paused != "keep":
            self._advance()
        events, self._events = self._events, []
        return events

    def _advance(self) -> None:
        plan = plan_step(self._waiting, self._running, self._limits, self._cache.kept)
        self.preemptions += len(plan.preempt)
        self._preempt(plan.preempt)
        self._admit(plan.admit)
        for sample in plan.passed:
            sample.passed += 1
        self._fork(plan.found)
        ends = self._prefill(plan.prefill)
        self._fork(plan.forks)
        self._begin(plan)
        self._commit_prompts([*plan.admit, *(chunk.sample for chunk in plan.prefill)])
        late = set(self._following)
        decode = [sample for sample in plan.decode if sample.request_id in self._requests and sample not in late]
        self._decode(decode)
        self._sample_in_prefill([end for end in ends if end.feed.sample.request_id in self._requests])
        self._follow(late, idle=not (plan.prefill or decode))

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
        self._following.clear()
        self._events.clear()
        self._arrivals.forget_requests()
        self.resume()
        self._cache.clear()
        self._runner.forget()

    def _receive(self) -> None:
        """Flip what was swapped, and begin the requests whose weights are there."""
        if not self._events and (self.paused == "keep" or not self._requests):
            self._arrivals.wait()
        self._arrivals.settle()
        in_use = {request.model.version for request in self._requests.values()}
        for swap, model in self._arrivals.take_swaps(in_use):
            self._flip(swap, model)
        if self.paused == "keep":
            return
        for generate, weights, aborted, guides in self._arrivals.take_requests(in_use):
            try:
                with blame(WorkerError, f"request `{generate.request_id}`"):
                    if isinstance(weights, BloomeryError):
                        raise weights
                    request = Request(generate, weights, () if guides is None else guides.result())
            except BloomeryError as error:
                self._refuse(generate, error)
                continue
            self._requests[generate.request_id] = request
            self._waiting += request.samples
            for index in aborted:
                self.abort(Abort(request_id=generate.request_id, sample=index))

    def _flip(self, swap: Swap, model: Model) -> None:
        """From here on the name is these weights, for requests that run too."""
        before = self._arrivals.names.get(swap.name)
        self._arrivals.names[swap.name] = swap.weights
        anew: set[int] = set()
        for request in self._requests.values():
            if request.name == swap.name:
                stem = request.turn_to(model)
                for sample in request.samples:
                    # Who has sampled nothing yet loses a part of a prefill at most, and is wholly of the new weights.
                    keeps = swap.policy == "keep" and bool(request.continuations.get(sample.index))
                    sample.stem = stem if keeps and sample in self._running else request.stem
                    if not keeps:
                        anew.add(id(sample))
        self._preempt([sample for sample in self._running if id(sample) in anew])
        if swap.policy == "flush":
            self._cache.forget_kept()
        if before is not None:
            self.swaps += 1
            if before.version != swap.weights.version:
                self._versions.let_go(before.version)
        swap.done.set_result(model)

    def _refuse(self, generate: Generate, error: BloomeryError) -> None:
        self._events.append(GenerateFailed(request_id=generate.request_id, message=error.message, category=error.category, field=error.field))

    def _end_unbegun(self, generate: Generate) -> None:
        for index in range(generate.num_samples):
            self._events.append(SampleFinished(request_id=generate.request_id, sample=index, reason="abort"))

    def _preempt(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._leave(sample)
            # All of it is computed again, by the weights of then.
            sample.stem = self._requests[sample.request_id].stem
        self._waiting[:0] = samples

    def _admit(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._waiting.remove(sample)
            self._running.append(sample)
            sample.passed = 0
            self._cache.place(sample)
        if self._running:
            self._cache.reserve(key_length(self._running))

    def _prefill(self, chunks: Sequence[Chunk]) -> list["_End"]:
        """Compute and score; returns what ended where a token is to be sampled."""
        if not chunks:
            return []
        inquiries = [self._requests[chunk.sample.request_id].inquiry for chunk in chunks]
        # One sample of a request at most computes what is asked about its prompt; its siblings take that over.
        questions = [None if inquiry is None else inquiry.question(chunk.stop) for inquiry, chunk in zip(inquiries, chunks, strict=True)]
        feeds = [_wanting(self._feed(*chunk), question) for chunk, question in zip(chunks, questions, strict=True)]
        ends = []
        for feed, inquiry, question, hidden_RD in zip(feeds, inquiries, questions, self._runner.prefill(feeds), strict=True):
            self.tokens_prefilled += len(feed.tokens)
            if inquiry is not None and question is not None:
                inquiry.take(question, self._runner.score(hidden_RD, feed, question))
            if _ends(feed):
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
        for end in [end for end in ends if self._requests[end.feed.sample.request_id].generate.embed]:
            self._embed(end)
        ends = [end for end in ends if end.feed.sample.request_id in self._requests]
        if ends:
            feeds = [end.feed for end in ends]
            self._choose([feed.sample for feed in feeds], self._runner.after(feeds, [end.hidden_RD for end in ends]))

    def _embed(self, end: "_End") -> None:
        vector_D = end.hidden_RD[end.feed.last_row].float().cpu().numpy()
        if not np.isfinite(vector_D).all():
            self._fail_broken(self._requests[end.feed.sample.request_id])
            return
        self._events.append(PromptEmbedded(request_id=end.feed.sample.request_id, vector=Array.of(vector_D)))
        self._finish(end.feed.sample, "length")

    def _choose(self, samples: Sequence[Sample], next_tokens: NextTokens) -> None:
        requests = [self._requests[sample.request_id] for sample in samples]
        draws = [request.draw(sample.index) for request, sample in zip(requests, samples, strict=True)]
        tokens_B, processed = choose(next_tokens.logits_BV.numpy(), draws)
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
                processed_logprob=processed[row].logprob if row in processed else None,
                processed_top=processed[row].top if row in processed else None,
                version=request.version_news(sample.index),
            )
            self._commit(sample, token)

    def _commit(self, sample: Sample, token: SampledToken) -> None:
        request = self._requests.get(sample.request_id)
        if request is None:
            # A sibling in the same step had no finite log-probability, or could not go on, which ended the request.
            return
        if not math.isfinite(token.logprob):
            self._fail_broken(request)
            return
        self._events.append(token)
        self.tokens_sampled += 1
        sample.length += 1
        # Nothing more is prefilled for it, also where the prefill gave this token and its guide is late.
        sample.left = 1
        guide = request.append(sample.index, token.token)
        if guide is None or self._grammars is None:
            self._go_on(sample)
        else:
            self._following[sample] = self._grammars.follow(guide, token.token)

    def _follow(self, late: Collection[Sample], *, idle: bool) -> None:
        """Samples whose guides have taken their last tokens go on; the others stay out of decode steps until theirs have.

        A step waits a moment for guides, but for those that were late before it: so a light grammar costs its samples no step, and a heavy one costs
        others no more than that.
        """
        if idle:
            wait(self._following.values(), _IDLE_S, "FIRST_COMPLETED")
        else:
            wait([followed for sample, followed in self._following.items() if sample not in late], _FOLLOW_S)
        for sample in [sample for sample, followed in self._following.items() if followed.done()]:
            if (followed := self._following.pop(sample, None)) is not None:
                followed.result()
                self._go_on(sample)

    def _go_on(self, sample: Sample) -> None:
        """Or end, if that was the last token."""
        request = self._requests[sample.request_id]
        reason = request.end(sample.index, self._config.context)
        if reason is not None:
            self._finish(sample, reason)
        elif (problem := request.problem(sample.index)) is not None:
            self._fail(sample.request_id, problem, "user")

    def _guides(self, generate: Generate) -> Guides | None:
        """What the first tokens of its samples may be, which takes a while to find out."""
        if generate.grammar is None:
            return None
        if self._grammars is None:
            raise NotSupported("`grammar`: this sampler knows no tokenizer, leave it out", field="grammar")
        return self._grammars.guides(generate, generate.grammar)

    def _fed_experts(self, samples: Sequence[Sample]) -> dict[Sample, Array]:
        """Where the token went that each of them was just fed."""
        return dict(zip(samples, map(Array.of, self._cache.last_experts(samples)), strict=True)) if samples else {}

    def _feed(self, sample: Sample, start: int, stop: int) -> Feed:
        request = self._requests[sample.request_id]
        return Feed(sample, request.model, request.tokens(sample.index, start, stop), start)

    def _finish(self, sample: Sample, reason: FinishReason) -> None:
        self._events.append(SampleFinished(request_id=sample.request_id, sample=sample.index, reason=reason))
        self._following.pop(sample, None)
        request = self._requests[sample.request_id]
        # The next turn of a conversation, or the same prompt again, begins like this sample; siblings that still run hold most of it.
        alone = sum(other.request_id == sample.request_id for other in self._running) == 1
        if sample in self._running and alone and sample.stem is request.stem:
            self._cache.keep(sample, request.cached_stem(sample))
        self._leave(sample)
        del request.continuations[sample.index]
        if not request.continuations:
            del self._requests[sample.request_id]

    def _fail(self, request_id: str, message: str, category: Category = "server") -> None:
        for sample in [sample for sample in (*self._running, *self._waiting) if sample.request_id == request_id]:
            self._following.pop(sample, None)
            self._leave(sample)
        del self._requests[request_id]
        self._events.append(GenerateFailed(request_id=request_id, message=message, category=category))

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


def _ends(feed: Feed) -> bool:
    """Whether a token is to be sampled behind the last one that is prefilled."""
    return not feed.sample.left and feed.stop == feed.sample.length


def _wanting(feed: Feed, question: Question | None) -> Feed:
    """With the first position that something is asked about."""
    return feed._replace(wanted=question.start if question is not None else feed.stop - 1 if _ends(feed) else None)


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
