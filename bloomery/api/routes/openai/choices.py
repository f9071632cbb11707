"""From sampled tokens back to text, one continuation at a time.

A `Choice` is fed the tokens of its sample and gives out pieces: text that is final (no half characters, nothing that may become a stop string) and
the tokens that it consists of. The token that ends a turn is no text. A stop string is none either, and tokens behind its beginning are not shown.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from bloomery.services.stopping import StopStrings, TextStream
from bloomery.types.generation import FinishReason, PromptScored, SampledToken

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


class Choice:
    """One continuation."""

    def __init__(self, index: int, tokenizer: Tokens, *, stops: Sequence[str], ends: Sequence[int], shows_tokens: bool) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._watch = StopStrings(tokenizer, stops)
        self._measure = TextStream(tokenizer) if shows_tokens else None
        self._length = self._given = 0
        self._waiting: list[ShownToken] = []

    def feed(self, event: SampledToken) -> Piece:
        """Take a token; afterwards `reason` may be set, and then nothing is fed any more."""
        self.tokens.append(event.token)
        self.logprobs.append(event.logprob)
        if event.token in self._ends:
            return Piece("", [])
        if self._measure is not None:
            self._waiting.append(ShownToken(*spelled(self._tokenizer, event.token, event.logprob, event.top), self._length))
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

    def _piece(self, text: str) -> Piece:
        self._given += len(text)
        ready = sum(shown.start < self._given for shown in self._waiting)
        tokens, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return Piece(text, tokens)


def prompt_piece(tokenizer: Tokens, prompt: Sequence[int], scored: PromptScored | None) -> Piece:
    """The prompt as the beginning of the text that it is echoed in; its first token has no log-probability."""
    stream = TextStream(tokenizer)
    text, starts = "", []
    for token in prompt:
        starts.append(len(text))
        text += stream.feed(token)
    text += stream.finish()
    if scored is None:
        return Piece(text, [])
    logprobs = [None, *scored.logprobs.numpy()[1:].tolist()]
    tops = [_top_of(scored, place) for place in range(len(prompt))]
    shown = [ShownToken(*spelled(tokenizer, *known), start) for *known, start in zip(prompt, logprobs, tops, starts, strict=True)]
    return Piece(text, shown)


def spelled(tokenizer: Tokens, token: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> tuple[Spelled, list[Spelled]]:
    """A token and its alternatives with their bytes."""
    return _spelled(tokenizer, token, logprob), [_spelled(tokenizer, other, value) for other, value in top]


def _spelled(tokenizer: Tokens, token: int, logprob: float | None) -> Spelled:
    return Spelled(tokenizer.token_bytes(token), None if logprob is None else max(logprob, LOWEST_LOGPROB))


def _top_of(scored: PromptScored, place: int) -> list[tuple[int, float]]:
    if scored.top_ids is None or scored.top_logprobs is None or place == 0:
        return []
    return list(zip(scored.top_ids.numpy()[place].tolist(), scored.top_logprobs.numpy()[place].tolist(), strict=True))
