"""Earlier rollouts as guesses at later ones: what was sampled last at a place, for as long as a loop runs.

A place has the same seed in every epoch, so its answers differ by what was learnt since. The server verifies a guess and trusts nothing of it
(`docs/reuse.md`), so what is forgotten here, in a restart say, costs time and changes no bit.
"""

import threading
from collections.abc import Sequence
from typing import Final

Tokens = tuple[int, ...]
ANSWERS: Final = 64
"""So many places of a problem, or of a member of its group, are remembered: an agent's later prompts tell what it was answered, and come once."""


class Earlier:
    """Threads may share it: whoever keeps last is remembered.

    A place begins with the problem, and of agents with the member; what follows is one answer's among those.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], dict[tuple[int, ...], tuple[Tokens, ...]]] = {}
        self._lock = threading.Lock()

    def of(self, place: tuple[int, ...], members: int) -> list[Tokens]:
        """What each member of a group said there before; nothing where that is not known."""
        with self._lock:
            kept = self._kept.get(place[:2], {}).get(place[2:], ())
        return [*kept[:members], *[()] * (members - len(kept))]

    def keep(self, place: tuple[int, ...], said: Sequence[Tokens]) -> None:
        """What was said there now; one who failed leaves a place that others fill, which makes their guesses wrong and nothing else."""
        with self._lock:
            answers = self._kept.setdefault(place[:2], {})
            answers.pop(place[2:], None)
            answers[place[2:]] = tuple(said)
            if len(answers) > ANSWERS:
                # The one that was kept longest ago.
                del answers[next(iter(answers))]
