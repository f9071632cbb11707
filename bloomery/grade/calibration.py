"""How far a judge can be trusted, from what people said of the same outputs. Pure functions over labels; `positive` is passing.

Intervals are of 95%, and two-sided. What there is too little of is None, never a number that looks like one.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from bloomery.types.errors import InvalidInput
from bloomery.types.statistics import Z95, Interval, wilson


class Kappa(NamedTuple):
    """Agreement beyond chance, -1 to 1; None where chance alone agrees always, so that there is nothing beyond it."""

    value: float | None
    interval: Interval | None


class Rate(NamedTuple):
    """`hits` of `total`, and Wilson's interval; None of nothing."""

    hits: int
    total: int

    @property
    def value(self) -> float | None:
        """The share."""
        return self.hits / self.total if self.total else None

    @property
    def interval(self) -> Interval | None:
        """Wilson's."""
        return wilson(self.hits, self.total) if self.total else None


class Corrected(NamedTuple):
    """A share of passing outputs as it would be if the judge made no mistakes, and its interval."""

    value: float
    interval: Interval


def cohens_kappa(people: Sequence[Hashable], judge: Sequence[Hashable]) -> Kappa:
    """Of two who labelled the same outputs, with the interval of Fleiss, Cohen and Everitt's large-sample standard error.

    Where they agree always or never that error is 0, however few outputs there are: then the interval is Wilson's of the agreement, as kappa.
    """
    count = _same_length(people, judge)
    pairs = {pair: number / count for pair, number in Counter(zip(people, judge, strict=True)).items()}
    mine = {label: number / count for label, number in Counter(people).items()}
    others = {label: number / count for label, number in Counter(judge).items()}
    observed = math.fsum(share for (one, other), share in pairs.items() if one == other)
    expected = math.fsum(share * others.get(label, 0.0) for label, share in mine.items())
    if math.isclose(expected, 1.0):
        return Kappa(None, None)
    kappa = (observed - expected) / (1 - expected)
    if (alike := agreement(people, judge).hits) in (0, count):
        return Kappa(kappa, Interval(*(max(-1.0, (share - expected) / (1 - expected)) for share in wilson(alike, count))))
    agreed = math.fsum(
        share * (1 - (mine.get(one, 0.0) + others.get(one, 0.0)) * (1 - kappa)) ** 2 for (one, other), share in pairs.items() if one == other
    )
    apart = math.fsum(share * (mine.get(other, 0.0) + others.get(one, 0.0)) ** 2 for (one, other), share in pairs.items() if one != other)
    variance = (agreed + (1 - kappa) ** 2 * apart - (kappa - expected * (1 - kappa)) ** 2) / (count * (1 - expected) ** 2)
    half = Z95 * math.sqrt(max(0.0, variance))
    return Kappa(kappa, Interval(max(-1.0, kappa - half), min(1.0, kappa + half)))


def true_positive_rate(people: Sequence[bool], judge: Sequence[bool]) -> Rate:
    """Of what people pass, how much the judge passes."""
    _same_length(people, judge)
    return Rate(sum(theirs and its for theirs, its in zip(people, judge, strict=True)), sum(people))


def true_negative_rate(people: Sequence[bool], judge: Sequence[bool]) -> Rate:
    """Of what people fail, how much the judge fails."""
    _same_length(people, judge)
    return Rate(sum(not theirs and not its for theirs, its in zip(people, judge, strict=True)), sum(not theirs for theirs in people))


def agreement(people: Sequence[Hashable], judge: Sequence[Hashable]) -> Rate:
    """How often both say the same."""
    count = _same_length(people, judge)
    return Rate(sum(theirs == its for theirs, its in zip(people, judge, strict=True)), count)


def majority_baseline(people: Sequence[Hashable]) -> Rate:
    """How often one agrees with people who always says what they say most: a judge is to do better."""
    _some(people)
    return Rate(Counter(people).most_common(1)[0][1], len(people))


def position_flips(first_shown: Sequence[Hashable], second_shown: Sequence[Hashable]) -> Rate:
    """Of pairs that a judge saw in both orders, how often it prefers another output when they change places.

    Both are which output it preferred, by its name and not by its place.
    """
    count = _same_length(first_shown, second_shown)
    return Rate(sum(one != other for one, other in zip(first_shown, second_shown, strict=True)), count)


def repeat_agreement(verdicts: Sequence[Sequence[Hashable]]) -> float | None:
    """Of outputs that were judged several times, how likely two verdicts on one of them are the same; each output counts alike."""
    shares = []
    for repeated in verdicts:
        if (count := len(repeated)) >= 2:
            alike = sum(number * (number - 1) for number in Counter(repeated).values())
            shares.append(alike / (count * (count - 1)))
    return math.fsum(shares) / len(shares) if shares else None


def rogan_gladen(passed: Rate, sensitivity: Rate, specificity: Rate) -> Corrected | None:
    """The share of passing outputs behind what the judge passed, given its true positive and true negative rates; None where it does no better
    than chance, and what it says is no evidence. The interval takes all three to be uncertain (the delta method)."""
    if passed.value is None or sensitivity.value is None or specificity.value is None:
        return None
    skill = sensitivity.value + specificity.value - 1
    if skill <= 0:
        return None
    share = (passed.value + specificity.value - 1) / skill
    variance = (_variance(passed) + share**2 * _variance(sensitivity) + (1 - share) ** 2 * _variance(specificity)) / skill**2
    half = Z95 * math.sqrt(variance)
    return Corrected(_share(share), Interval(_share(share - half), _share(share + half)))


def _variance(rate: Rate) -> float:
    """With two hits and two misses beside those that there were (Agresti and Coull): a few outputs that are all alike are no certainty."""
    share = (rate.hits + 2) / (rate.total + 4)
    return share * (1 - share) / (rate.total + 4)


def _share(number: float) -> float:
    return min(1.0, max(0.0, number))


def _same_length(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    if len(one) != len(other):
        raise InvalidInput(f"there are {len(one)} labels of people and {len(other)} of the judge: give both of every output")
    return _some(one)


def _some(labels: Sequence[Hashable]) -> int:
    if not labels:
        raise InvalidInput("there are no labels: a judge is measured on some")
    return len(labels)
