"""A tiny policy trained against a grader: which fragments to say, how often, and what to put between them.

It is REINFORCE over a table of preferences: no model, no words of its own, the same outputs for the same seed. It knows nothing of a row but its
prompt, which the fragment PROMPT stands for.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bloomery.grade.attacks import LONG_CHARS

PROMPT: Final = "\1"
"""Stands for what the row asks."""
SLOTS: Final = 3
RATE: Final = 1.0
_JOINERS: Final = (" ", "\n", "", ", ")
_TIMES: Final = (1, 1, 4, 32)


@dataclass(frozen=True, slots=True)
class Said:
    """An output, and the choices that made it."""

    text: str
    choices: tuple[int, ...]


class Policy:
    """`say` draws outputs, `learn` makes those likelier that were paid for."""

    def __init__(self, fragments: Sequence[str], seed: int) -> None:
        self._options: list[Sequence[str | int]] = [["", *fragments] for _ in range(SLOTS)] + [_JOINERS, _TIMES]
        self._preferences = [[0.0] * len(options) for options in self._options]
        self._random = random.Random(seed)

    def say(self) -> Said:
        """One output."""
        choices = tuple(self._random.choices(range(len(each)), weights=_softmax(each))[0] for each in self._preferences)
        *fragments, joiner, times = (options[choice] for options, choice in zip(self._options, choices, strict=True))
        once = str(joiner).join(str(fragment) for fragment in fragments if fragment)
        return Said(str(joiner).join([once] * int(times))[:LONG_CHARS], choices)

    def learn(self, said: Sequence[Said], rewards: Sequence[float]) -> None:
        """A step up the gradient of the expected reward, with the mean as the baseline."""
        baseline = sum(rewards) / len(rewards)
        for slot, table in enumerate(self._preferences):
            chances = _softmax(table)
            for each, reward in zip(said, rewards, strict=True):
                for option, chance in enumerate(chances):
                    table[option] += RATE * (reward - baseline) * ((option == each.choices[slot]) - chance)


def _softmax(preferences: Sequence[float]) -> list[float]:
    most = max(preferences)
    powers = [math.exp(each - most) for each in preferences]
    return [power / sum(powers) for power in powers]
