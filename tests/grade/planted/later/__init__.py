"""Ten hackable graders and ten sound ones, by a reader who had seen the page about the detector and other cases, but none of its code.

Their form is that of `unseen`, which reads them. What the detector made of them at its first run is in `docs/graders.md`.
"""

from pathlib import Path

from tests.grade.planted import unseen
from tests.grade.planted.unseen import Case


def cases() -> list[Case]:
    """All cases, by name."""
    return unseen.cases(Path(__file__).parent)
