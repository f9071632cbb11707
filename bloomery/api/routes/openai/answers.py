"""The shapes of both contracts. `Answers` is what they share, `ChatAnswers` and `CompletionAnswers` are where they differ."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from bloomery.api.routes.openai.choices import Piece, ShownToken, Spelled
from bloomery.api.routes.openai.prepared import PreparedRequest
from bloomery.api.routes.openai.times import unix_s
from bloomery.services.serving.tool_use import AnswerCalls, whole_message

PromptTable = list[dict[str, Any] | None]
"""Of each token of a prompt, by id: its log-probability and those of the likeliest ones."""


class Usage(NamedTuple):
    """Tokens that went in and came out."""

    prompt: int
    completion: int
    cached: int
    """Of the prompts, tokens that nobody had to compute."""

    def shape(self) -> dict[str, Any]:
        """As both contracts write it."""
        counts = {"prompt_tokens": self.prompt, "completion_tokens": self.completion, "total_tokens": self.prompt + self.completion}
        return counts | {"prompt_tokens_details": {"cached_tokens": self.cached}}


class Answers(ABC):
    """Bodies and chunks of one request."""

    whole: ClassVar[str]
    part: ClassVar[str]

    def __init__(self, prepared: PreparedRequest) -> None:
        self.prepared = prepared

    @property
    def counts(self) -> bool:
        """Whether a stream ends with the token counts."""
        options = self.prepared.asked.stream_options
        return options is not None and bool(options.include_usage)

    def body(self, choices: list[dict[str, Any]], usage: Usage, tables: Sequence[PromptTable] = ()) -> dict[str, Any]:
        """The answer in one piece; with a table of log-probabilities for each prompt where they are asked for."""
        return self._frame(self.whole) | {"choices": choices, "usage": usage.shape()} | self.prompts(choices, tables)

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        """One piece of a streamed answer."""
        counts: dict[str, Any] = {"usage": usage.shape() if usage else None} if self.counts else {}
        return self._frame(self.part) | {"choices": choices} | counts

    @abstractmethod
    def prompts(self, choices: list[dict[str, Any]], tables: Sequence[PromptTable]) -> dict[str, Any]:
        """What a body says of its prompts, beside what it writes into their choices."""

    @abstractmethod
    def choice(self, index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
        """A whole continuation."""

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says before the first piece of a continuation."""

    @abstractmethod
    def delta(self, index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
        """A piece of a continuation."""

    def _frame(self, kind: str) -> dict[str, Any]:
        prepared = self.prepared
        names = {"id": prepared.id, "object": kind, "created": unix_s(prepared.created_us), "model": prepared.target.display}
        return names | {"system_fingerprint": prepared.target.weights.version}


class ChatAnswers(Answers):
    """`/v1/chat/completions`."""

    whole = "chat.completion"
    part = "chat.completion.chunk"

    def __init__(self, prepared: PreparedRequest) -> None:
        super().__init__(prepared)
        self._calls: dict[int, AnswerCalls] = {}

    def prompts(self, choices: list[dict[str, Any]], tables: Sequence[PromptTable]) -> dict[str, Any]:
        """A conversation is one prompt."""
        return {"prompt_logprobs": tables[0]} if tables else {}

    def choice(self, index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
        """A message."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        if self.prepared.tools is not None:
            message, reason = whole_message(self.prepared.tools, self._key(index), piece.text, reason)
        return {"index": index, "message": message, "logprobs": self._logprobs(piece.tokens), "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any]:
        """Who speaks."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
        """More of a message."""
        delta = {"content": piece.text} if piece.text else {}
        if self.prepared.tools is not None:
            calls = self._calls.setdefault(index, AnswerCalls(self.prepared.tools, self._key(index)))
            delta, reason = calls.delta(piece.text, reason), calls.reason(reason)
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _key(self, index: int) -> str:
        """Of a choice among all that ever were."""
        return f"{self.prepared.id}:{index}"

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        if self.prepared.top_logprobs is None:
            return None
        content = [_named(shown.token) | {"top_logprobs": list(map(_named, shown.top))} for shown in tokens]
        return {"content": content, "refusal": None, "logprobs_mode": self.prepared.logprobs_mode}


class CompletionAnswers(Answers):
    """`/v1/completions`, whose chunks look like its bodies."""

    whole = part = "text_completion"

    def prompts(self, choices: list[dict[str, Any]], tables: Sequence[PromptTable]) -> dict[str, Any]:
        """Each choice says it of its prompt."""
        for choice in choices if tables else ():
            choice["prompt_logprobs"] = tables[choice["index"] * len(tables) // len(choices)]
        return {}

    def choice(self, index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
        """A text."""
        return {"index": index, "text": piece.text, "logprobs": self._logprobs(piece.tokens), "finish_reason": reason}

    def opening(self, index: int) -> None:
        """Nothing."""

    def delta(self, index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
        """More of a text."""
        return self.choice(index, piece, reason)

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        if self.prepared.top_logprobs is None:
            return None
        return {
            "tokens": [shown.token.text for shown in tokens],
            "token_logprobs": [shown.token.logprob for shown in tokens],
            "top_logprobs": [_by_text(shown) for shown in tokens],
            "text_offset": [shown.start for shown in tokens],
            "logprobs_mode": self.prepared.logprobs_mode,
        }


def _named(token: Spelled) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


def _by_text(shown: ShownToken) -> dict[str, float | None] | None:
    """The alternatives and the token itself; nothing is known about the first token of a prompt."""
    if shown.token.logprob is None:
        return None
    return {shown.token.text: shown.token.logprob} | {other.text: other.logprob for other in shown.top}
