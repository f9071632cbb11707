"""What is graded, and who helps."""

from collections.abc import Callable, Sequence
from typing import Any

from bloomery.grade.grader import sample_of
from bloomery.grade.models import Answer, Question, Vectors
from bloomery.types.errors import BloomeryError
from bloomery.types.grading import GradeInput, GradeUsage

USAGE = GradeUsage(prompt_tokens=10, completion_tokens=3)


def given(output: str = "", tools: Sequence[dict[str, Any]] = (), **item: Any) -> GradeInput:
    """A row whose fields are `item`."""
    return GradeInput(item=item, sample=sample_of(output, tools))


class ScriptedModels:
    """Says one thing after the other, from the last again; what is an error is raised."""

    def __init__(self, *says: str | Answer | BloomeryError, vector: Callable[[str], Sequence[float]] = lambda _: [1.0]) -> None:
        self._says, self._vector = list(says), vector
        self.questions: list[Question] = []

    async def ask(self, question: Question) -> Answer:
        said = self._says[min(len(self.questions), len(self._says) - 1)]
        self.questions.append(question)
        if isinstance(said, BloomeryError):
            raise said
        return said if isinstance(said, Answer) else Answer(said, USAGE)

    async def embed(self, model: str, texts: Sequence[str]) -> Vectors:
        return Vectors([self._vector(text) for text in texts], USAGE)


class Pauses:
    """Of somebody who has no time: how long each would have been."""

    def __init__(self) -> None:
        self.made: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.made.append(seconds)
