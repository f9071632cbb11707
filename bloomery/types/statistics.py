"""The formulas behind tables: an interval for a share and for a mean, a paired test for two versions, a distance between two log-probabilities."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

Z95: Final = 1.959963984540054
"""Of the normal distribution, for two-sided intervals of 95 %."""

_IN_WHOLE_NUMBERS: Final = 4_000
"""Of so many outcomes whole numbers are added up; they grow with their number, and of more it would be felt."""
_LAST_DIGIT: Final = 1e-17


class Interval(NamedTuple):
    """A 95 % interval."""

    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """Wilson score interval of a share (E. B. Wilson, 1927): honest at 0 and 1, where the normal approximation is not."""
    if trials == 0:
        return Interval(0.0, 1.0)
    share, spread = successes / trials, Z95**2 / trials
    centre = (share + spread / 2) / (1 + spread)
    half = Z95 * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    # Exactly what the formula gives at the ends, where rounding would leave something.
    return Interval(0.0 if successes == 0 else centre - half, 1.0 if successes == trials else centre + half)


def normal_interval(values: Sequence[float]) -> Interval:
    """Of a mean, by the normal approximation: for some dozens of values or more, wherever they lie."""
    if len(values) < 2:
        return Interval(-math.inf, math.inf)
    mean = math.fsum(values) / len(values)
    half = Z95 * math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    return Interval(mean - half, mean + half)


class Mean(NamedTuple):
    """A mean and its interval, which there is of two values or more."""

    value: float
    interval: Interval | None


def mean_of(values: Sequence[float]) -> Mean:
    """Of one value at least."""
    return Mean(math.fsum(values) / len(values), normal_interval(values) if len(values) > 1 else None)


def score_of(values: Sequence[float]) -> Mean:
    """The mean of one score at least. Of right and wrong alone the interval is Wilson's, which does not take a few right ones for certainty."""
    if set(values) <= {0.0, 1.0}:
        return Mean(sum(values) / len(values), wilson(int(sum(values)), len(values)))
    return mean_of(values)


def difference_of(before: Sequence[float], after: Sequence[float]) -> Mean:
    """How much higher `after` is than `before`, of one pair at least. Of right and wrong alone the interval is that of D. G. Bonett and R. M. Price
    (2012): one pair gained and one lost are added, so that pairs that all went the same way do not leave no doubt."""
    differences = [later - earlier for earlier, later in zip(before, after, strict=True)]
    if not {*before, *after} <= {0.0, 1.0}:
        return mean_of(differences)
    gained, lost = ((differences.count(sign) + 1) / (len(differences) + 2) for sign in (1.0, -1.0))
    half = Z95 * math.sqrt((gained + lost - (gained - lost) ** 2) / (len(differences) + 2))
    return Mean(sum(differences) / len(differences), Interval(max(-1.0, gained - lost - half), min(1.0, gained - lost + half)))


class Paired(NamedTuple):
    """Old and new on the same rows: how many only the new one gets right, only the old one, and the two-sided exact p of McNemar's test."""

    gained: int
    lost: int
    p_value: float

    @property
    def better(self) -> bool:
        """More rows gained than lost, and chance explains it in fewer than one case in twenty."""
        return self.gained > self.lost and self.p_value < 0.05


def mcnemar(old: Sequence[bool], new: Sequence[bool]) -> Paired:
    """McNemar's test in its exact form: under no difference each discordant row is a fair coin."""
    gained = sum(right and not before for before, right in zip(old, new, strict=True))
    lost = sum(before and not right for before, right in zip(old, new, strict=True))
    return Paired(gained, lost, sign_test(gained, lost))


def sign_test(wins: int, losses: int) -> float:
    """The two-sided exact p of the sign test: how likely a split at least so uneven is where each is a fair coin. Ties count nowhere. To nine digits
    where many are decided."""
    decided = wins + losses
    if decided > _IN_WHOLE_NUMBERS:
        return _sign_test_by_logarithms(min(wins, losses), decided)
    ways = outcomes = 1
    for k in range(min(wins, losses)):
        # Of k + 1 from those of k: each by itself would take seconds for some thousand rows.
        ways = ways * (decided - k) // (k + 1)
        outcomes += ways
    return min(1.0, float(2 * outcomes / 2**decided))


def _sign_test_by_logarithms(fewer: int, decided: int) -> float:
    """Sums from the likeliest outcome on, until what is left is below the last digit."""
    ways = math.lgamma(decided + 1) - math.lgamma(fewer + 1) - math.lgamma(decided - fewer + 1)
    share = outcomes = 1.0
    for k in range(fewer, 0, -1):
        share *= k / (decided - k + 1)
        outcomes += share
        if share < outcomes * _LAST_DIGIT:
            break
    return min(1.0, math.exp(ways - decided * math.log(2) + math.log(2 * outcomes)))


class Mismatch(NamedTuple):
    """How far sampled log-probabilities are from the trainer's: mean k3 (an unbiased, non-negative KL estimate) and the largest difference."""

    k3: float
    max_difference: float
    tokens: int


def mismatch(sampled: Sequence[float], trained: Sequence[float]) -> Mismatch:
    """k3 = mean(exp(d) - 1 - d) with d = trainer - sampler, over tokens that the sampler drew."""
    differences = [after - before for before, after in zip(sampled, trained, strict=True)]
    if not differences:
        return Mismatch(0.0, 0.0, 0)
    k3 = sum(math.expm1(d) - d for d in differences) / len(differences)
    return Mismatch(k3, max(abs(d) for d in differences), len(differences))
