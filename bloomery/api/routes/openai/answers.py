"""The shapes of both contracts. `Answers` is what they share, `ChatAnswers` and `CompletionAnswers` are where they differ."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from bloomery.api.routes.openai.choices import Piece, ShownToken, Spelled
from bloomery.api.routes.openai.jobs import Job


class Usage(NamedTuple):
    """Tokens that went in and came out."""

    prompt: int
    completion: int

    def shape(self) -> dict[str, int]:
        """As both contracts write it."""
        return {"prompt_tokens": self.prompt, "completion_tokens": self.completion, "total_tokens": self.prompt + self.completion}


class Answers(ABC):
    """Bodies and chunks of one job."""

    whole: ClassVar[str]
    part: ClassVar[str]

    def __init__(self, job: Job) -> None:
        self.job = job

    @property
    def counts(self) -> bool:
        """Whether a stream ends with the token counts."""
        options = self.job.asked.stream_options
        return options is not None and bool(options.include_usage)

    def body(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""
        return self._frame(self.whole) | {"choices": choices, "usage": usage.shape()}

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        """One piece of a streamed answer."""
        counts: dict[str, Any] = {"usage": usage.shape() if usage else None} if self.counts else {}
        return self._frame(self.part) | {"choices": choices} | counts

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
        job = self.job
        names = {"id": job.id, "object": kind, "created": job.created_us // 1_000_000, "model": job.target.display}
        return names | {"system_fingerprint": job.target.weights.version}


class ChatAnswers(Answers):
    """`/v1/chat/completions`."""

    whole = "chat.completion"
    part = "chat.completion.chunk"

    def choice(self, index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
        """A message."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(piece.tokens), "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any]:
        """Who speaks."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
        """More of a message."""
        delta = {"content": piece.text} if piece.text else {}
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        if self.job.top_logprobs is None:
            return None
        return {"content": [_named(shown.token) | {"top_logprobs": list(map(_named, shown.top))} for shown in tokens], "refusal": None}


class CompletionAnswers(Answers):
    """`/v1/completions`, whose chunks look like its bodies."""

    whole = part = "text_completion"

    def choice(self, index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
        """A text."""
        return {"index": index, "text": piece.text, "logprobs": self._logprobs(piece.tokens), "finish_reason": reason}

    def opening(self, index: int) -> None:
        """Nothing."""

    def delta(self, index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
        """More of a text."""
        return self.choice(index, piece, reason)

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        if self.job.top_logprobs is None:
            return None
        return {
            "tokens": [shown.token.text for shown in tokens],
            "token_logprobs": [shown.token.logprob for shown in tokens],
            "top_logprobs": [_by_text(shown) for shown in tokens],
            "text_offset": [shown.start for shown in tokens],
        }


def _named(token: Spelled) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


def _by_text(shown: ShownToken) -> dict[str, float | None] | None:
    """The alternatives and the token itself; nothing is known about the first token of a prompt."""
    if shown.token.logprob is None:
        return None
    return {shown.token.text: shown.token.logprob} | {other.text: other.logprob for other in shown.top}
