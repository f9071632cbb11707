"""A few held-out rows beside what is said to them before and after training: what a result keeps of its answers."""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from bloomery.jobs.comparison import Answers
from bloomery.jobs.rows import Question, Words
from bloomery.types.jobs import MAX_SAMPLE_CHARS, MAX_SAMPLES, JobSample, SampleField

LOOKED_AT: Final = 16
"""Rows that are answered to be shown, where no measure needs their answers."""


class Reply(NamedTuple):
    """What was said to a row, and what that is worth where a grader says it."""

    text: str
    reward: float | None = None


class Answered(NamedTuple):
    """A row and both replies to it."""

    words: Words
    before: Reply
    after: Reply


def answered(asked: Sequence[Question], answers: Answers) -> list[Answered]:
    """Each question with its answers."""
    return [Answered(question.words, Reply(before), Reply(after)) for question, before, after in zip(asked, *answers, strict=True)]


def telling(found: Iterable[Answered]) -> list[JobSample]:
    """Those that tell the most: first whose reward changed, then whose answer did, then others, each in the order of rows."""
    ranked = sorted(found, key=lambda each: (each.before.reward == each.after.reward, each.before.text == each.after.text, each.words.row))
    return [_sample(each) for each in ranked[:MAX_SAMPLES]]


def _sample(given: Answered) -> JobSample:
    words = given.words
    texts: dict[SampleField, str | None] = {
        "asked": words.asked,
        "reference": words.reference,
        "rejected": words.rejected,
        "before": given.before.text,
        "after": given.after.text,
    }
    return JobSample.model_validate(
        {name: text if text is None else text[:MAX_SAMPLE_CHARS] for name, text in texts.items()}
        | {"row": words.row, "before_reward": given.before.reward, "after_reward": given.after.reward}
        | {"cut": [name for name, text in texts.items() if text is not None and len(text) > MAX_SAMPLE_CHARS]}
    )
