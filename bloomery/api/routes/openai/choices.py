"""From sampled tokens back to text, one continuation at a time.

A `Choice` is fed the tokens of its sample and gives out pieces: text that is final (no half characters, nothing that may become a stop string) and
the tokens that it consists of. The token that ends a turn is no text, and shown where that is asked for. A stop string is none either, and tokens
behind its beginning are not shown.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from bloomery.services.serving.stopping import StopStrings, TextStream
from bloomery.types.generation import FinishReason, LogprobsMode, PromptScored, SampledToken

LOWEST_LOGPROB: Final = -9999.0
"""What the contract shows for impossible tokens; JSON has no infinity."""


class Tokens(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, tokens: Sequence[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


class Spelled(NamedTuple):
    """A token as it is shown."""

    data: bytes
    logprob: float | None

    @property
    def text(self) -> str:
        """Its characters; bytes that are none are written as escapes."""
        return self.data.decode("utf-8", "backslashreplace")


class ShownToken(NamedTuple):
    """A token with its alternatives, best first, and where it begins in the text of its choice."""

    token: Spelled
    top: list[Spelled]
    start: int


class Piece(NamedTuple):
    """What became final: text and, where they are asked for, its tokens."""

    text: str
    tokens: list[ShownToken]

    def moved(self, characters: int) -> "Piece":
        """The same so many characters further on."""
        return Piece(self.text, [token._replace(start=token.start + characters) for token in self.tokens])


class Choice:
    """One continuation. `logprobs` are the model's own; what its pieces show is those of `mode`."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokens,
        *,
        stops: Sequence[str],
        ends: Sequence[int],
        shows_tokens: bool,
        shows_end: bool = False,
        min_tokens: int = 0,
        mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._mode = mode
        self._watch = StopStrings(tokenizer, stops, min_tokens=min_tokens)
        self._measure = TextStream(tokenizer) if shows_tokens else None
        self._shows_end = shows_end
        self._length = self._given = 0
        self._waiting: list[ShownToken] = []

    @property
    def likelihood(self) -> float:
        """Log-probability per token, by the model's own; of no token the lowest there is."""
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else -math.inf

    def feed(self, event: SampledToken) -> Piece:
        """Take a token; afterwards `reason` may be set, and then nothing is fed any more."""
        self.tokens.append(event.token)
        self.logprobs.append(event.logprob)
        if event.token in self._ends:
            if self._measure is not None and self._shows_end:
                self._length += len(self._measure.finish())
                self._waiting.append(self._shown(event))
            return Piece("", [])
        if self._measure is not None:
            self._waiting.append(self._shown(event))
            self._length += len(self._measure.feed(event.token))
        if self._watch.feed(event.token):
            return self.finish("stop")
        return self._piece(self._watch.take())

    def finish(self, reason: FinishReason) -> Piece:
        """The sample ended: what was held back comes out."""
        self.reason = reason
        piece = self._piece(self._watch.take(final=True))
        if self._watch.matched is not None:
            return piece
        rest, self._waiting = self._waiting, []
        return Piece(piece.text, piece.tokens + rest)

    def _shown(self, event: SampledToken) -> ShownToken:
        known = event.logprob_as(self._mode), event.top_as(self._mode)
        return ShownToken(*spelled(self._tokenizer, event.token, *known), self._length)

    def _piece(self, text: str) -> Piece:
        self._given += len(text)
        ready = sum(shown.start < self._given for shown in self._waiting)
        tokens, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return Piece(text, tokens)


def prompt_piece(tokenizer: Tokens, prompt: Sequence[int], scored: PromptScored | None, top: int = 0) -> Piece:
    """The prompt as the beginning of the text that it is echoed in, with `top` alternatives to a token; the first has no log-probability."""
    stream = TextStream(tokenizer)
    text, starts = "", []
    for token in prompt:
        starts.append(len(text))
        text += stream.feed(token)
    text += stream.finish()
    if scored is None:
        return Piece(text, [])
    rows = zip(prompt, _logprobs_of(scored), _tops_of(scored, top), starts, strict=True)
    return Piece(text, [ShownToken(*spelled(tokenizer, token, logprob, likeliest), start) for token, logprob, likeliest, start in rows])


def prompt_table(tokenizer: Tokens, prompt: Sequence[int], scored: PromptScored, top: int) -> list[dict[str, Any] | None]:
    """For each token of the prompt by id its log-probability, rank and text, and those of the `top` likeliest; nothing for the first."""
    assert scored.ranks is not None, "asked with the log-probabilities that are shown here"
    rows = zip(prompt, _logprobs_of(scored), scored.ranks.numpy().tolist(), _tops_of(scored, top), strict=True)
    return [None if logprob is None else _table_row(tokenizer, token, (logprob, rank), likeliest) for token, logprob, rank, likeliest in rows]


def _table_row(tokenizer: Tokens, token: int, told: tuple[float, int], top: Sequence[tuple[int, float]]) -> dict[str, Any]:
    ranked = {other: (value, rank) for rank, (other, value) in enumerate(top, 1)}
    entries = {token: ranked.get(token, told)} | ranked
    return {
        str(other): {"logprob": max(value, LOWEST_LOGPROB), "rank": rank, "decoded_token": _spelled(tokenizer, other, value).text}
        for other, (value, rank) in entries.items()
    }


def spelled(tokenizer: Tokens, token: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> tuple[Spelled, list[Spelled]]:
    """A token and its alternatives with their bytes."""
    return _spelled(tokenizer, token, logprob), [_spelled(tokenizer, other, value) for other, value in top]


def _spelled(tokenizer: Tokens, token: int, logprob: float | None) -> Spelled:
    return Spelled(tokenizer.token_bytes(token), None if logprob is None else max(logprob, LOWEST_LOGPROB))


def _logprobs_of(scored: PromptScored) -> list[float | None]:
    return [None, *scored.logprobs.numpy()[1:].tolist()]


def _tops_of(scored: PromptScored, top: int) -> list[list[tuple[int, float]]]:
    """The `top` likeliest tokens at each place of the prompt, none at the first."""
    count = scored.logprobs.shape[0]
    if scored.top_ids is None or scored.top_logprobs is None:
        return [[]] * count
    ids, values = scored.top_ids.numpy()[:, :top].tolist(), scored.top_logprobs.numpy()[:, :top].tolist()
    return [[], *(list(zip(*row, strict=True)) for row in zip(ids[1:], values[1:], strict=True))]
