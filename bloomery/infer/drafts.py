"""Which tokens of a draft are drawn: read off the rows that prefill has computed of it.

The row of a token says what comes behind it, and the noise of that depends on seed, sample and position alone. So while the draft is right, each row
gives the token that a decode step would give, and the first one that differs is a token of the answer too. Rows behind it are of no use.
"""

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec
import numpy as np
from torch import Tensor

from bloomery.infer.cache import KeyValueCache
from bloomery.infer.drawn import Drawn
from bloomery.infer.request import Request
from bloomery.infer.runner import Feed, Runner
from bloomery.infer.sampling import choose_along, draws_along
from bloomery.infer.scoring import chunk_rows
from bloomery.types.arrays import Array
from bloomery.types.errors import WorkerError, blame
from bloomery.types.generation import SampledToken

_ROWS: Final = 64
"""Whose logits exist at once, at first: a draft may be wrong from its beginning. One that is right has more and more, as each call reads the head."""
_GROWTH: Final = 4


class Guess(NamedTuple):
    """The end of what is certain of a sample, with guessed tokens behind it, as prefill has computed them."""

    feed: Feed
    hidden_RD: Tensor


def accepted(guess: Guess, request: Request, runner: Runner, cache: KeyValueCache) -> list[SampledToken]:
    """The sample's next tokens, at least one: those that were guessed right, and the one behind them. Its guide has taken them, or WorkerError."""
    sample = guess.feed.sample
    guide = request.guide(sample.index)
    found = []
    for token in _drawn(guess, request, runner):
        found.append(token)
        if not math.isfinite(token.logprob) or request.stops(token.token):
            break
        if guide is not None:
            with blame(WorkerError, "its grammar could not be followed"):
                guide.take(token.token)
            if guide.problem is not None or (guide.over and not request.generate.params.stop_tokens):
                break
        if not token.kept:
            break
    return _with_experts(found, guess, request, cache)


def _drawn(guess: Guess, request: Request, runner: Runner) -> Iterator[SampledToken]:
    """What the rows give, one after the other. A guided one is drawn when those before it are taken."""
    feed, sample = guess.feed, guess.feed.sample
    guessed = request.guessed(sample.index)
    first = start = sample.length - 1
    on_host, guided = feed.model.decoder.device.type == "cpu", request.guide(sample.index) is not None
    check = _plainly if on_host and not guided and draws_along(request.draw(sample.index)) else _with_all
    count, most = _ROWS, max(_ROWS, chunk_rows(feed.model.decoder.config.vocab_size))
    while start < feed.stop:
        count = min(count, feed.stop - start)
        # As long as whoever asks goes on, every token before is what was guessed.
        yield from check(guess, request, runner, range(start, start + count), guessed[start - first :])
        start, count = start + count, min(_GROWTH * count, most)


def _plainly(guess: Guess, request: Request, runner: Runner, positions: range, guessed: tuple[int, ...]) -> Iterator[SampledToken]:
    """Where all are drawn from the model's own distribution: in one pass, and nothing is made of what comes behind the first that differs."""
    sample = guess.feed.sample
    logits_BV = runner.logits_after_each(guess.hidden_RD, guess.feed, positions.start, len(positions)).numpy()
    draw = request.draw(sample.index, positions.start - sample.length + 1)
    tokens_B, logsumexp_B = choose_along(logits_BV, draw)
    tokens = tokens_B.tolist()
    right = next((row for row, token in enumerate(tokens) if token != guessed[row]), len(tokens))
    logprobs = (np.take_along_axis(logits_BV, tokens_B[:, None], 1)[:, 0] - logsumexp_B).tolist()
    for row, (token, logprob) in enumerate(zip(tokens[: right + 1], logprobs, strict=False)):
        position = draw.position + row
        yield SampledToken(request_id=sample.request_id, sample=sample.index, position=position, token=token, logprob=logprob, kept=row < right)


def _with_all(guess: Guess, request: Request, runner: Runner, positions: range, guessed: tuple[int, ...]) -> Iterator[SampledToken]:
    """With all that shapes a distribution, and all that is told of it."""
    sample, count = guess.feed.sample, len(positions)
    next_tokens, ahead = runner.after_each(guess.hidden_RD, guess.feed, positions.start, count), positions.start - sample.length + 1
    at_once = count if request.guide(sample.index) is None else 1
    for row in range(0, count, at_once):
        rows = range(row, min(row + at_once, count))
        drawn = Drawn.of(next_tokens.part(rows.start, rows.stop), [request.draw(sample.index, ahead + each) for each in rows])
        right = [guessed[each : each + 1] == (token,) for each, token in zip(rows, drawn.tokens, strict=True)]
        yield from (drawn.told(each, sample.request_id, kept=right[each]) for each in range(len(rows)))


def _with_experts(tokens: list[SampledToken], guess: Guess, request: Request, cache: KeyValueCache) -> list[SampledToken]:
    """Where the token before each went, where that is asked."""
    if not request.generate.routing:
        return tokens
    sample = guess.feed.sample
    first, stop = sample.length - 1, sample.length - 1 + len(tokens)
    experts = cache.experts(sample, stop)[first:]
    weights = cache.expert_weights(sample, stop)[first:] if request.generate.routing_weights else None
    return [
        msgspec.structs.replace(token, fed_experts=Array.of(experts[row]), fed_expert_weights=None if weights is None else Array.of(weights[row]))
        for row, token in enumerate(tokens)
    ]
