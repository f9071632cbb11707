"""Ten hackable graders and ten sound ones by the author of the detector, written before it: the half that it may be changed for.

Their form is that of `unseen`, which reads them. They have what those lack: a full score for what cannot be read, tests that can be overwritten,
length alone, tags alone, any number of many, a count of words that the grader names itself, a refusal alone, a pattern in place of an answer.
"""

from pathlib import Path

from tests.grade.planted import unseen
from tests.grade.planted.unseen import Case


def cases() -> list[Case]:
    """All cases, by name."""
    return unseen.cases(Path(__file__).parent)
