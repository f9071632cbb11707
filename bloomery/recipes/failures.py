"""Why rollouts were lost, in few words: what a step tells of it, and when a loop stops because nothing comes back any more.

A loop has thousands of failures and few causes. Messages are cut to a length, and text whatever foreign code says; those that differ by numbers
alone are one reason, and of many reasons the most frequent of each kind come first.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from bloomery.grade.template import unicode
from bloomery.recipes.rewards import FailureKind
from bloomery.recipes.rollouts import Group
from bloomery.types.errors import Unavailable

MAX_REASONS: Final = 12
"""Of a step: more than there are kinds, so that each has one."""
MAX_MESSAGE: Final = 300
"""Characters."""
_NUMBERS: Final = re.compile(r"\d+")
_GRADER: Final = "mend the grader or the agent, which must give a finite number for each rollout"
_REMEDIES: Final[dict[FailureKind, str]] = {
    "sampling": "look at the server's status and log, or raise `sample_timeout_s`",
    "raised": "mend the grader or the agent, which raised this",
    "timeout": "mend the grader or the agent, or raise its time (`grade_timeout_s`, of agents `Agents(timeout_s=...)`)",
    "no_reward": _GRADER,
    "wrong_type": _GRADER,
    "not_finite": _GRADER,
    "foreign_reward": "have the grader or the agent name the rollout, and the answers, that it was given",
    "foreign_version": "sample from the newest version that this loop published: something between it and the server serves others",
    "no_tokens": "have the agent ask the model at the `base_url` of its episode, and an environment give what was sampled",
}


class Reason(NamedTuple):
    """Why attempts failed, and how many did so; the message is that of the first."""

    kind: FailureKind
    message: str
    attempts: int


def reasons(groups: Sequence[Group]) -> tuple[Reason, ...]:
    """Of all attempts that failed: the most frequent of each kind, then of the others."""
    first: dict[tuple[FailureKind, str], str] = {}
    counts: Counter[tuple[FailureKind, str]] = Counter()
    for failure in (failure for group in groups for failure in group.failures):
        # Of half a character, which JSON may spell and agents cut others down to, no event and no report can be made.
        message = unicode(failure.message if len(failure.message) <= MAX_MESSAGE else f"{failure.message[:MAX_MESSAGE]}...")
        cause = failure.kind, _NUMBERS.sub("0", message)
        first.setdefault(cause, message)
        counts[cause] += 1
    ranks: Counter[FailureKind] = Counter()
    ranked: list[tuple[int, Reason]] = []
    for (kind, pattern), attempts in counts.most_common():
        ranked.append((ranks[kind], Reason(kind, first[kind, pattern], attempts)))
        ranks[kind] += 1
    return tuple(reason for _, reason in sorted(ranked, key=lambda place: place[0])[:MAX_REASONS])


class NothingCameBack(Unavailable):
    """Too many rounds in a row left nothing to train on, or the last of a loop that has learnt nothing; `why`, and what to change about it, whoever
    runs the loop."""

    def __init__(self, why: str, way_out: str) -> None:
        super().__init__(f"{why}; {way_out}")
        self.why = why


class Losses:
    """Counts the rounds in a row that left no group to compare, because too many of its rollouts failed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rounds = 0

    def note(self, compared: int, lost: Sequence[Reason]) -> None:
        """A round with so many groups that had members enough; NothingCameBack where it is one too many without any."""
        self._rounds = 0 if compared else self._rounds + 1
        if self._rounds >= self._most:
            goes_on = "The cursor stands behind these rounds, and the loop goes on from there when it is started again"
            raise NothingCameBack(self._why(lost), f"or raise `max_lost_rounds`. {goes_on}")

    def end(self, compared: int, lost: Sequence[Reason]) -> None:
        """The same of the last round of a loop that has learnt nothing so far, before it is had: there is none behind it in which it could."""
        if not compared:
            self._rounds += 1
            goes_on = "The cursor stands before the last round, which is made again when the loop is started again"
            raise NothingCameBack(self._why(lost), f"none is left, and nothing was learnt. {goes_on}")

    def _why(self, lost: Sequence[Reason]) -> str:
        told = "; ".join(f"{reason.attempts} times `{reason.kind}` ({reason.message})" for reason in lost) or "no rollout came"
        remedies = "; ".join(dict.fromkeys(_REMEDIES[reason.kind] for reason in lost)) or "look at what makes the groups"
        rounds = f"{self._rounds} rounds in a row" if self._rounds > 1 else "a round"
        why = f"{rounds} left nothing to train on, because too many rollouts of every group failed"
        return f"{why}. The last one: {told}. What to change: {remedies}"
