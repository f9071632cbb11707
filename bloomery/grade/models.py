"""How graders ask models: a question with a form for the answer, or texts to be made vectors of.

`Models` is the seam: `endpoints` asks any server that speaks OpenAI's contract, and the routes of this one ask its own models without leaving it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from bloomery.grade.declared import SamplingParams
from bloomery.types.grading import GradeUsage


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A conversation, and what the answer must look like."""

    model: str
    messages: Sequence[Mapping[str, Any]]
    """As chat completions take them."""
    schema: Mapping[str, Any] | None
    """The JSON schema that the answer fits; None: any text."""
    params: SamplingParams


class Answer(NamedTuple):
    """What a model said. `whole` is false where it was cut off, `refusal` what it said instead of answering."""

    text: str
    usage: GradeUsage
    whole: bool = True
    refusal: str | None = None
    seconds: float | None = None
    """From asking to the end of the answer, without any wait for a turn to ask; None: it was not measured."""


class Vectors(NamedTuple):
    """Of texts, in their order."""

    vectors: Sequence[Sequence[float]]
    usage: GradeUsage


class Models(Protocol):
    """Who answers. Unavailable and RateLimited say that asking again may help; other errors of the user say that it does not."""

    async def ask(self, question: Question) -> Answer:
        """One answer."""
        ...

    async def embed(self, model: str, texts: Sequence[str]) -> Vectors:
        """A vector for each text."""
        ...


@dataclass
class Counted:
    """Asks others, and counts the tokens that each model took."""

    models: Models
    tokens: Counter[str] = field(default_factory=Counter)

    async def ask(self, question: Question) -> Answer:
        """One answer."""
        answer = await self.models.ask(question)
        self._count(question.model, answer.usage)
        return answer

    async def embed(self, model: str, texts: Sequence[str]) -> Vectors:
        """A vector for each text."""
        found = await self.models.embed(model, texts)
        self._count(model, found.usage)
        return found

    def _count(self, model: str, usage: GradeUsage) -> None:
        self.tokens[model] += usage.prompt_tokens + usage.completion_tokens


def added(first: GradeUsage, second: GradeUsage) -> GradeUsage:
    """What both took."""
    return GradeUsage(prompt_tokens=first.prompt_tokens + second.prompt_tokens, completion_tokens=first.completion_tokens + second.completion_tokens)
