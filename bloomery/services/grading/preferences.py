"""Which of two answers a grader prefers, and how that is like what people say of the same pairs. Pure functions.

A grader sees one answer at a time, and prefers the one with the higher score; or it is a judge that sees both, in both orders, whose labels say which
it prefers. Then its preference is that of the order in which people saw them, and the other order shows whether it heeds places.
"""

from collections.abc import Sequence
from typing import NamedTuple

from bloomery.grade.calibration import Rate
from bloomery.grade.declared import LabelModel, Spec
from bloomery.types.errors import InvalidInput, shown
from bloomery.types.graders import CalibrateGrader, Choice, ComparedPair, OutputRow
from bloomery.types.grading import GradeResult

_OTHER: dict[Choice, Choice] = {"first": "second", "second": "first", "tie": "tie"}


class Preference(NamedTuple):
    """What a grader makes of one pair, by the places in which people saw both."""

    choice: Choice
    swapped: Choice | None
    """When both have changed places; None of a grader that sees one at a time."""


class Preferring(NamedTuple):
    """How a grader compares."""

    tie_within: float
    verdicts: dict[str, Choice] | None
    label: str
    """Of the results' label that has the verdict."""

    @classmethod
    def of(cls, spec: Spec, given: CalibrateGrader) -> "Preferring":
        """As the request says; what the grader cannot do is refused."""
        if given.verdicts is not None:
            if not isinstance(spec, LabelModel):
                raise InvalidInput("this grader gives no labels: leave `verdicts` out, and its scores say which it prefers", field="verdicts")
            if missing := sorted(set(spec.labels) ^ set(given.verdicts)):
                raise InvalidInput(f"`verdicts` says of each label what it prefers, and `{shown(missing[0])}` is not in both", field="verdicts")
            if given.tie_within:
                raise InvalidInput("`tie_within` is of scores, and `verdicts` of labels: give one of them", field="tie_within")
        return cls(given.tie_within, given.verdicts, spec.name or spec.type)

    def sides(self, pairs: Sequence[ComparedPair]) -> tuple[list[OutputRow], list[OutputRow]]:
        """What is graded of each pair: both answers, or the pair in both orders, where it is of one row that has place for both answers."""
        if self.verdicts is None:
            return [pair.first for pair in pairs], [pair.second for pair in pairs]
        for place, pair in enumerate(pairs):
            _check_item(pair, place)
        return [_both(pair.first, pair.second) for pair in pairs], [_both(pair.second, pair.first) for pair in pairs]

    def read(self, one: GradeResult, other: GradeResult) -> Preference | None:
        """Of the results of both sides; None where one of them has no score."""
        if one.score is None or other.score is None:
            return None
        if self.verdicts is not None:
            return Preference(self.verdicts[one.labels[self.label]], _OTHER[self.verdicts[other.labels[self.label]]])
        if abs(one.score - other.score) <= self.tie_within:
            return Preference("tie", None)
        return Preference("first" if one.score > other.score else "second", None)


def first_of(choices: Sequence[Choice]) -> Rate:
    """Of those that prefer any: how often the first."""
    decided = [choice for choice in choices if choice != "tie"]
    return Rate(decided.count("first"), len(decided))


def first_in_both_orders(preferences: Sequence[Preference]) -> Rate:
    """The same of what a judge said of each pair in both orders, by the places in which it saw them."""
    return first_of([choice for each in preferences if each.swapped is not None for choice in (each.choice, _OTHER[each.swapped])])


def flips(preferences: Sequence[Preference]) -> Rate:
    """Of pairs that were seen in both orders, how often another answer is preferred when both change places."""
    seen = [each for each in preferences if each.swapped is not None]
    return Rate(sum(each.choice != each.swapped for each in seen), len(seen))


def decided_alike(people: Sequence[Choice], grader: Sequence[Choice]) -> Rate:
    """Of pairs where neither says `tie`: how often both prefer the same."""
    decided = [(one, other) for one, other in zip(people, grader, strict=True) if "tie" not in (one, other)]
    return Rate(sum(one == other for one, other in decided), len(decided))


def _check_item(pair: ComparedPair, place: int) -> None:
    if pair.first.item != pair.second.item:
        problem = f"the answers of pair {place + 1} have different `item`s, and a judge that sees both sees one row"
        raise InvalidInput(f"{problem}: give both the same", field="pairs")
    if taken := sorted({"first", "second"} & set(pair.first.item)):
        problem = f"the `item` of pair {place + 1} has a `{taken[0]}` of its own, where a judge that sees both finds an answer"
        raise InvalidInput(f"{problem}: give it another name", field="pairs")


def _both(one: OutputRow, other: OutputRow) -> OutputRow:
    """A row that a judge sees both answers in."""
    item = {**one.item, "first": one.output, "second": other.output}
    return OutputRow(item=item, output=one.output, tools=one.tools, messages=one.messages, trace=one.trace)
