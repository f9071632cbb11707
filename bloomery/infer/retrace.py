"""Where an answer goes on like the draft from which it has parted.

One other token often moves the rest of an answer by a few places, or soon the same is said again. So what a draft says behind the place that reads
most like the last tokens, the nearest to where the answer was in step with it, is a guess at the next ones. A decode step feeds some of them in rows
of their own.
"""

from collections.abc import Sequence
from typing import Final

from bloomery.models.pads import pad_to

_ALIKE: Final = 4
"""Tokens that are compared; the more are alike the better."""
_REACH: Final = 256
"""Places before and behind that are looked at."""
_EVERY: Final = 4
"""Where nothing is fed, one token in so many is guessed at all the same, to see whether it would have been right."""
WIDTHS: Final = (0, 1, 3, 7, 15)
"""Guesses that are fed at a time."""
_ROWS: Final = 4
"""A step that may guess has a multiple of so many: four take hardly longer than one, and steps of each number are recorded apart (`recorded`)."""


def whole_width(guesses: int) -> int:
    """As many of so many guesses as are fed at a time."""
    return max(width for width in WIDTHS if width <= guesses)


def whole_rows(rows: int) -> int:
    """As many as a step has that would have so many, if some of them may be guessed."""
    return pad_to(rows, _ROWS)


class Retrace:
    """One answer beside its draft. Guesses become more while all are right, and fewer, down to none, where not even the first is."""

    def __init__(self, draft: Sequence[int]) -> None:
        self._draft = draft
        self._shift = 0
        """From a place of the answer to that of the draft which it is in step with."""
        self._width = WIDTHS.index(_ROWS - 1)

    @property
    def width(self) -> int:
        """Guesses that are worth their rows."""
        return WIDTHS[self._width]

    def guesses(self, sampled: Sequence[int], most: int) -> tuple[int, ...]:
        """At so many tokens behind those of the answer, of which there is at least one."""
        draft, near = self._draft, len(sampled) + self._shift
        first, last = max(1, near - _REACH), min(len(draft) - 1, near + _REACH)
        alike = [place for place in range(first, last + 1) if draft[place - 1] == sampled[-1]]
        if not alike:
            return ()
        place = max(alike, key=lambda place: (_in_common(draft, place, sampled), -abs(place - near)))
        self._shift = place - len(sampled)
        return tuple(draft[place : place + most])

    def note(self, fed: int, right: int) -> None:
        """So many were fed, and the first of them were right."""
        if right == fed:
            self._width = min(self._width + 1, len(WIDTHS) - 1)
        elif not right:
            self._width = max(self._width - 1, 0)

    def see(self, sampled: Sequence[int], token: int) -> None:
        """What came behind the tokens so far."""
        if not self._width and not len(sampled) % _EVERY and self.guesses(sampled, 1) == (token,):
            self._width = 1


def _in_common(draft: Sequence[int], place: int, sampled: Sequence[int]) -> int:
    """Tokens before a place of the draft that are the last ones of the answer."""
    most = min(_ALIKE, place, len(sampled))
    return next((count for count in range(most) if draft[place - 1 - count] != sampled[-1 - count]), most)
