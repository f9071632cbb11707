"""Earlier rollouts as guesses at later ones: what was sampled last at a place, for as long as a loop runs.

A place has the same seed in every epoch, so its answers differ by what was learnt since. The server verifies a guess and trusts nothing of it
(`docs/reuse.md`), so what is forgotten here, in a restart say, costs time and changes no bit.
"""

from collections.abc import Sequence

Tokens = tuple[int, ...]


class Earlier:
    """Threads may share it: whoever keeps last is remembered."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], tuple[Tokens, ...]] = {}

    def of(self, place: tuple[int, ...], members: int) -> list[Tokens]:
        """What each member of a group said there before; nothing where that is not known."""
        kept = self._kept.get(place, ())
        return [*kept[:members], *[()] * (members - len(kept))]

    def keep(self, place: tuple[int, ...], said: Sequence[Tokens]) -> None:
        """What was said there now; one who failed leaves a place that others fill, which makes their guesses wrong and nothing else."""
        self._kept[place] = tuple(said)
