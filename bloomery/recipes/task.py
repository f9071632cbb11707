"""What the demo's model is asked: a labelled text answered in JSON, or the user's own chats answered word for word.

A `Question` is one row that can be asked, graded and trained on, whoever made it.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from bloomery.types.datasets import ChatRow

Message = dict[str, Any]


class Question(NamedTuple):
    """A prompt, the right answer as the model should write it, and what the classifiers beside it see: `text` and `label`."""

    prompt: tuple[Message, ...]
    answer: str
    text: str
    label: str

    @property
    def messages(self) -> list[Message]:
        """The row to train on."""
        return [*self.prompt, {"role": "assistant", "content": self.answer}]


class Task(NamedTuple):
    """How answers are read. `key` None: free chat, right only word for word; otherwise a JSON object with `key` and one of `labels`."""

    key: str | None
    system: str
    labels: frozenset[str]

    def ask(self, text: str, label: str) -> Question:
        """A labelled text as a question."""
        prompt = ({"role": "system", "content": self.system}, {"role": "user", "content": text})
        return Question(prompt, json.dumps({self.key: label}), text, label)

    def read(self, content: str) -> str | None:
        """The label that an answer names, or None where the output is invalid."""
        if self.key is None:
            return content.strip() or None
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            return None
        label = answer.get(self.key) if isinstance(answer, dict) and len(answer) == 1 else None
        return label if isinstance(label, str) and label in self.labels else None

    def question_of(self, messages: Sequence[Message]) -> Question:
        """A stored row as a question again."""
        *prompt, answer = messages
        content = str(answer["content"])
        text = "\n".join(message["content"] for message in prompt if message["role"] == "user")
        return Question(tuple(prompt), content, text, self.read(content) or content)


def routing_task(labels: Sequence[str]) -> Task:
    """Route a piece of documentation to its package."""
    return Task("package", "Name the package, as JSON.", frozenset(labels))


def task_of_rows(rows: Sequence[ChatRow], *, chat: bool) -> Task:
    """The task that a user's own file describes."""
    if chat:
        return Task(None, "", frozenset())
    return Task("label", 'Classify the text. Reply with {"label": ...} and nothing else.', frozenset(row.messages[-1]["content"] for row in rows))


def share_of(text: str) -> float:
    """A number in [0, 1) that depends on the text alone: rows split the same way every time."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
