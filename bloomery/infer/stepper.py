"""One step: `plan_step` decides, `Runner` computes, and what came of it is written down.

Shapes: R packed rows, B samples, V vocabulary, D hidden.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bloomery.infer.cache import KeyValueCache
from bloomery.infer.drafts import Guess, accepted
from bloomery.infer.drawn import Drawn
from bloomery.infer.grammar import Grammars
from bloomery.infer.plan import Chunk, Limits, Plan, Sample, plan_step
from bloomery.infer.queues import Queues
from bloomery.infer.request import Request
from bloomery.infer.retrace import whole_rows, whole_width
from bloomery.infer.runner import Feed, NextTokens, Runner
from bloomery.infer.scoring import Question
from bloomery.infer.waits import Waits
from bloomery.models.pads import BLOCK_PLACES
from bloomery.types.arrays import Array
from bloomery.types.errors import WorkerError, reason
from bloomery.types.generation import PromptEmbedded, PromptFound, PromptRouted, SampledToken

log = logging.getLogger(__name__)

_FOLLOW_S: Final = 0.005
"""How long a step waits at most for guides: about as long as one of a small model takes."""
_IDLE_S: Final = 0.05
"""The same where there is nothing else to do; whatever else the caller has to do can wait as long."""
_STEPS: Final = 8
"""Of so many the shortest says how long a step takes: others may have been interrupted, or computed prompts."""


class Stepper:
    """Takes all samples in hand on by one step."""

    def __init__(self, queues: Queues, cache: KeyValueCache, runner: Runner, limits: Limits, grammars: Grammars | None, *, context: int) -> None:
        """`context`: tokens that a sequence may have."""
        self._queues, self._cache, self._runner, self._limits = queues, cache, runner, limits
        self._grammars, self._context = grammars, context
        self.tokens_sampled = self.tokens_kept = self.tokens_prefilled = self.preemptions = 0
        self.waits = Waits()
        self._steps_s: deque[float] = deque(maxlen=_STEPS)

    @property
    def step_s(self) -> float:
        """How long steps take of late; for ever where the last one had nobody to take on."""
        return min(self._steps_s, default=math.inf)

    def advance(self) -> None:
        """One token at most of every sample, but of those whose drafts are right, or right again."""
        queues, began_s = self._queues, time.perf_counter()
        plan = plan_step(queues.waiting, queues.running, self._limits, self._cache.kept)
        self.preemptions += len(plan.preempt)
        queues.preempt(plan.preempt)
        queues.admit(plan.admit)
        self._note_waits(plan.admit)
        for sample in plan.passed:
            sample.passed += 1
        self._cache.fork(plan.found)
        ends, guesses = self._prefill(plan.prefill)
        self._cache.fork(plan.forks)
        self._begin(plan)
        self._commit_prompts([*plan.admit, *(chunk.sample for chunk in plan.prefill)])
        late = set(queues.following)
        decode = [sample for sample in plan.decode if sample.request_id in queues.requests and sample not in late]
        self._decode(decode, dict(zip(plan.decode, plan.ahead, strict=True)))
        self._sample_in_prefill([end for end in ends if end.feed.sample.request_id in queues.requests])
        self._verify(guesses)
        self._follow(late, idle=not (plan.prefill or decode))
        if plan.prefill or decode:
            self._steps_s.append(time.perf_counter() - began_s)
        else:
            self._steps_s.clear()

    def _prefill(self, chunks: Sequence[Chunk]) -> "_Prefilled":
        """Compute and score; returns where tokens are to be sampled."""
        if not chunks:
            return _Prefilled([], [])
        inquiries = [self._queues.request(chunk.sample).inquiry for chunk in chunks]
        # One sample of a request at most computes what is asked about its prompt; its siblings take that over.
        questions = [None if inquiry is None else inquiry.question(chunk.stop) for inquiry, chunk in zip(inquiries, chunks, strict=True)]
        feeds = [_wanting(self._feed(*chunk), question) for chunk, question in zip(chunks, questions, strict=True)]
        ends, guesses = [], []
        for feed, inquiry, question, hidden_RD in zip(feeds, inquiries, questions, self._runner.prefill(feeds), strict=True):
            self.tokens_prefilled += len(feed.tokens)
            if inquiry is not None and question is not None:
                inquiry.take(question, self._runner.score(hidden_RD, feed, question))
            if _ends(feed):
                ends.append(_End(feed, hidden_RD))
            if _guesses(feed):
                guesses.append(Guess(feed, hidden_RD))
        return _Prefilled(ends, guesses)

    def _note_waits(self, admitted: Sequence[Sample]) -> None:
        now_s = time.perf_counter()
        for sample in admitted:
            waited_s = self._queues.request(sample).place(sample.index, now_s)
            if waited_s is not None:
                self.waits.note(waited_s)

    def _begin(self, plan: Plan) -> None:
        """Say of every request that has just got its first place how much of its prompt need not be computed."""
        found = {fork.sample: fork.tokens for fork in (*plan.found, *plan.forks)}
        for sample in plan.admit:
            request = self._queues.request(sample)
            if not request.begun and sample in found:
                self._queues.events.append(PromptFound(request_id=sample.request_id, tokens=found[sample]))
            request.begun = True

    def _commit_prompts(self, samples: Sequence[Sample]) -> None:
        for sample in dict.fromkeys(samples):
            request = self._queues.requests.get(sample.request_id)
            if request is None:
                # A sibling's score was not finite, which ended the request.
                continue
            if request.inquiry is not None and request.inquiry.broken:
                self._fail_broken(request)
                continue
            score = request.take_score()
            if score is not None:
                self._queues.events.append(score)
            if request.owes_routing and sample.cached >= sample.shared:
                self._queues.events.append(self._routed(sample, weights=request.generate.routing_weights))
                request.owes_routing = False
            if not sample.decodes and sample.left and not sample.missing:
                self._queues.finish(sample, "length")

    def _routed(self, sample: Sample, *, weights: bool) -> PromptRouted:
        """Where a prompt went that was computed by now, or taken over."""
        experts = Array.of(self._cache.experts(sample, sample.shared))
        expert_weights = Array.of(self._cache.expert_weights(sample, sample.shared)) if weights else None
        return PromptRouted(request_id=sample.request_id, experts=experts, expert_weights=expert_weights)

    def _decode(self, samples: Sequence[Sample], ahead: Mapping[Sample, int]) -> None:
        if samples:
            fed = {sample: self._guess(sample, most) for sample in samples if (most := ahead[sample])}
            # Whatever is guessed has a row of its own, as the sample's last token has.
            feeds = [self._feed(sample, start, start + 1) for sample in samples for start in _positions(sample, fed.get(sample, 0))]
            # The last one again writes what it wrote: that costs less than steps of every number of rows, which are recorded one by one (`recorded`).
            spare = whole_rows(len(feeds)) - len(feeds) if fed else 0
            next_tokens = self._runner.decode([*feeds, *feeds[-1:] * spare])
            self._choose(samples, next_tokens.part(0, len(feeds)) if spare else next_tokens, fed)

    def _guess(self, sample: Sample, most: int) -> int:
        return whole_width(self._queues.request(sample).guess(sample.index, most))

    def _sample_in_prefill(self, ends: Sequence["_End"]) -> None:
        for end in [end for end in ends if self._queues.request(end.feed.sample).generate.embed]:
            self._embed(end)
        ends = [end for end in ends if end.feed.sample.request_id in self._queues.requests]
        if ends:
            feeds = [end.feed for end in ends]
            self._choose([feed.sample for feed in feeds], self._runner.after(feeds, [end.hidden_RD for end in ends]))

    def _embed(self, end: "_End") -> None:
        sample, vector_D = end.feed.sample, end.hidden_RD[end.feed.last_row].float().cpu().numpy()
        if not np.isfinite(vector_D).all():
            self._fail_broken(self._queues.request(sample))
            return
        self._queues.events.append(PromptEmbedded(request_id=sample.request_id, vector=Array.of(vector_D)))
        self._queues.finish(sample, "length")

    def _choose(self, samples: Sequence[Sample], next_tokens: NextTokens, ahead: Mapping[Sample, int] = MappingProxyType({})) -> None:
        requests = [self._queues.request(sample) for sample in samples]
        each_ahead = [ahead.get(sample, 0) for sample in samples]
        rows = zip(requests, samples, each_ahead, strict=True)
        drawn = Drawn.of(next_tokens, [request.draw(sample.index, place) for request, sample, most in rows for place in range(most + 1)])
        asked = [request.generate for request in requests]
        fed_experts = _by_sample(samples, [each.routing for each in asked], self._cache.last_experts)
        fed_weights = _by_sample(samples, [each.routing_weights for each in asked], self._cache.last_expert_weights)
        first_rows = accumulate((most + 1 for most in each_ahead), initial=0)
        for row, sample, request, most in zip(first_rows, samples, requests, each_ahead, strict=False):
            if most:
                self._retrace(sample, request, drawn, row, most)
            elif self._commit(sample, drawn.told(row, sample.request_id, fed_experts.get(sample), fed_weights.get(sample))):
                token = request.continuations[sample.index][-1]
                guide = None if request.stops(token) else request.guide(sample.index)
                if guide is None or self._grammars is None:
                    self._go_on(sample)
                else:
                    self._queues.following[sample] = self._grammars.follow(guide, token)

    def _retrace(self, sample: Sample, request: Request, drawn: Drawn, row: int, fed: int) -> None:
        """Its next token, and those behind it as long as so many that were fed are what is drawn; what is cached of the others goes."""
        first, guesses, right = sample.length - 1, request.guessed(sample.index)[:fed], 0
        while self._commit(sample, drawn.told(row + right, sample.request_id)):
            token = request.continuations[sample.index][-1]
            if right < fed and token == guesses[right] and not request.stops(token):
                right += 1
                continue
            request.note_guesses(sample.index, fed, right)
            if right < fed:
                self._cache.cut(sample, first + right + 1)
            self._go_on(sample)
            return

    def _verify(self, guesses: Sequence[Guess]) -> None:
        """Tokens that were guessed right, and the first that was not as it should be; what is cached of the guess from there on goes."""
        for guess in guesses:
            sample = guess.feed.sample
            request = self._queues.requests.get(sample.request_id)
            if request is None:
                # A sibling ended it.
                continue
            first = sample.length - 1
            try:
                tokens = accepted(guess, request, self._runner, self._cache)
            except WorkerError as error:
                log.error("a guide broke", exc_info=error)
                self._queues.fail(sample.request_id, error)
                continue
            if not self._cache.cut(sample, first + len(tokens)):
                self._queues.preempt([sample])
            self._commit_kept(sample, request, tokens[:-1])
            if self._commit(sample, tokens[-1]):
                self._go_on(sample)

    def _commit_kept(self, sample: Sample, request: Request, tokens: list[SampledToken]) -> None:
        """Tokens that are what the draft of the sample says, all at once; there is one more behind them, with which the request may end."""
        if not tokens:
            return
        request.append_kept(sample.index, [token.token for token in tokens])
        version = request.version_news(sample.index)
        first = tokens[0] if version is None else msgspec.structs.replace(tokens[0], version=version)
        self._queues.events += [first, *tokens[1:]]
        self.tokens_sampled += len(tokens)
        self.tokens_kept += len(tokens)
        sample.length += len(tokens)

    def _commit(self, sample: Sample, token: SampledToken) -> bool:
        """Whether its request goes on, or would if this were not the last token."""
        request = self._queues.requests.get(sample.request_id)
        if request is None:
            # A sibling in the same step had no finite log-probability, or could not go on, which ended the request.
            return False
        if not math.isfinite(token.logprob):
            self._fail_broken(request)
            return False
        version, kept = request.version_news(sample.index), request.append(sample.index, token.token)
        if version is not None or kept is not token.kept:
            token = msgspec.structs.replace(token, version=version, kept=kept)
        self._queues.events.append(token)
        self.tokens_sampled += 1
        self.tokens_kept += kept
        sample.length += 1
        # Nothing more is prefilled for it, also where the prefill gave this token and its guide is late; but what is guessed behind it.
        sample.left, sample.drafted = 1, request.drafted(sample.index)
        return True

    def _follow(self, late: Collection[Sample], *, idle: bool) -> None:
        """Samples whose guides have taken their last tokens go on; the others stay out of decode steps until theirs have.

        A step waits a moment for guides, but for those that were late before it: so a light grammar costs its samples no step, and a heavy one costs
        others no more than that.
        """
        following = self._queues.following
        if idle:
            wait(following.values(), _IDLE_S, "FIRST_COMPLETED")
        else:
            wait([followed for sample, followed in following.items() if sample not in late], _FOLLOW_S)
        for sample in [sample for sample, followed in following.items() if followed.done()]:
            followed = following.pop(sample, None)
            if followed is None:
                # A sibling could not go on, which ended the request.
                continue
            if (error := followed.exception()) is None:
                self._go_on(sample)
            else:
                log.error("a guide broke", exc_info=error)
                self._queues.fail(sample.request_id, WorkerError(f"its grammar could not be followed: {type(error).__name__}: {reason(error)}"))

    def _go_on(self, sample: Sample) -> None:
        """Or end, if that was the last token."""
        request = self._queues.request(sample)
        reason = request.end(sample.index, self._context)
        if reason is not None:
            self._queues.finish(sample, reason)
        elif (refusal := request.refusal(sample.index)) is not None:
            self._queues.fail(sample.request_id, refusal)
        elif self._cache.states is None:
            # To the end of its last block, and of what it may have.
            most = min(-sample.length % BLOCK_PLACES, self._context - sample.length - 1)
            sample.ahead = min(request.worth_guessing(sample.index), most)

    def _feed(self, sample: Sample, start: int, stop: int) -> Feed:
        request = self._queues.request(sample)
        fed = request.fed(sample.index, start, stop)
        return Feed(sample, request.model, fed, start, temperature=request.generate.params.temperature)

    def _fail_broken(self, request: Request) -> None:
        message = f"weights {request.model.version} are broken: they give log-probabilities that are not finite"
        self._queues.fail(request.generate.request_id, WorkerError(message))


class _End(NamedTuple):
    """The end of a prompt that was prefilled to its last token, with the hidden states of its chunk."""

    feed: Feed
    hidden_RD: Tensor


class _Prefilled(NamedTuple):
    ends: list[_End]
    guesses: list[Guess]


def _positions(sample: Sample, ahead: int) -> range:
    """Of its last token, and of those that are guessed behind it."""
    return range(sample.length - 1, sample.length + ahead)


def _by_sample(samples: Sequence[Sample], asked: Sequence[bool], last: Callable[[Sequence[Sample]], NDArray[Any]]) -> dict[Sample, Array]:
    """What is told of the token that each of those who asked was just fed."""
    curious = [sample for sample, asks in zip(samples, asked, strict=True) if asks]
    return dict(zip(curious, map(Array.of, last(curious)), strict=True)) if curious else {}


def _ends(feed: Feed) -> bool:
    """Whether a token is to be sampled behind the last one that is prefilled."""
    return not feed.sample.left and feed.stop == feed.sample.length


def _guesses(feed: Feed) -> bool:
    """Whether tokens are to be sampled behind the last one that is certain, and behind those that are guessed."""
    return feed.sample.drafted > 0 and feed.stop >= feed.sample.length


def _wanting(feed: Feed, question: Question | None) -> Feed:
    """With the first position that something is asked about; a question comes before guesses."""
    if question is not None:
        return feed._replace(wanted=question.start)
    return feed._replace(wanted=feed.sample.length - 1 if _guesses(feed) else feed.stop - 1 if _ends(feed) else None)
