"""Factors of adapters that are computed together, stacked once for many passes."""

from collections.abc import Sequence
from typing import Final
from weakref import ref

from bloomery.models.factors import Factors, stack

_KEPT_PASSES: Final = 16
"""A few steps, in which prompts of others are computed too, and whole models one after the other."""


class Bank:
    """Stacked factors of the adapters that were together in the last passes: those of a batch stay together for many steps of decoding.

    For adapters that nobody fills any more, and it keeps none of them alive. What `_KEPT_PASSES` did not use goes, and what was made of an adapter
    goes with it; so it holds as much again as those adapters take that were in these passes.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], _Stacked] = {}
        self._passes = 0

    def begin_pass(self) -> None:
        """Whatever is asked for from here on is of a new pass."""
        self._passes += 1
        for place in [place for place, held in self._held.items() if held.used_in < self._passes - _KEPT_PASSES]:
            del self._held[place]

    def clear(self) -> None:
        """Forget them all."""
        self._held.clear()

    def stacked(self, parameter: str, place: int, members: Sequence[Factors]) -> Factors:
        """The factors of the team at `place` among those of a parameter, `a` [M, r, I] and `b` [M, O, r]."""
        held = self._held.get((parameter, place))
        factors = None if held is None else held.of(members)
        if held is None or factors is None:
            factors = stack(members)
            held = self._held[parameter, place] = _Stacked(members, factors)
        held.used_in = self._passes
        return factors


class _Stacked:
    """Factors of a team in one piece, until one of its members is gone."""

    def __init__(self, members: Sequence[Factors], factors: Factors) -> None:
        mine = ref(self)

        def free(_: object) -> None:
            # On any thread, and perhaps while the bank is looked through: its place stays.
            if (stacked := mine()) is not None:
                stacked._factors = None

        self.used_in = 0
        """The last pass that asked for it."""
        self._members = [ref(each.a, free) for each in members]
        self._factors: Factors | None = factors

    def of(self, members: Sequence[Factors]) -> Factors | None:
        """The factors, if they are those of these members: compared by what they are made of, not by value."""
        alike = len(self._members) == len(members) and all(old() is new.a for old, new in zip(self._members, members, strict=True))
        return self._factors if alike else None
