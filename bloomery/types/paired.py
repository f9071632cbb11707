"""Two models beside each other, row by row: what the API answers about where they differ, and how sure that is."""

from typing import Literal, TypedDict

from bloomery.types.evaluations import Measured
from bloomery.types.resources import Resource

PairOrder = Literal["apart", "better", "worse", "row"]
"""`apart`: those first that differ most; `better`, `worse`: where the first model is so; `row`: as the data set has them. What has no score is last,
but in the order of rows. Of one model alone `worse` are its lowest scores, and `apart` the same."""
PairShow = Literal["all", "better", "worse", "alike", "differ", "unscored"]
"""Which rows: `unscored` lack a score of a model."""


class PairsAsked(TypedDict, total=False):
    """Whose rows, and which of them; what is None is the first there is, or as it is without."""

    model: str | None
    other: str | None
    against: str | None
    """The evaluation of `other`."""
    grader: str | None
    show: PairShow
    order: PairOrder


class PairedRow(Resource):
    """One row. A score is the mean over the model's answers to it."""

    row: int
    asked: str
    """What was asked last, or the prompt: its first 200 characters."""
    score: float | None
    other_score: float | None
    difference: float | None
    """How much higher the first scores; None where one has no score."""
    numbers: list[int]
    """Of the first model's answers, as items have them."""
    other_numbers: list[int]


class SideOfPairs(Resource):
    """A model in an evaluation, by their names."""

    evaluation: str
    model: str


class PairedRows(Resource):
    """A page of rows, and what all of them come to. Without an `other` the rows are one model's, with its scores."""

    first: SideOfPairs
    other: SideOfPairs | None
    grader: str
    rows: int
    """That both have a score for."""
    unscored: int
    """That one of them has none for, of those that any was asked."""
    difference: Measured | None
    """The mean over `rows`, with its 95 % interval."""
    interval: Literal["bonett_price", "normal"] | None
    """How that is computed: of right and wrong alone as Bonett and Price do, else by the normal distribution, which wants some dozens of rows."""
    wins: int
    losses: int
    ties: int
    p_value: float | None
    """How likely wins and losses at least so uneven are where neither model is better."""
    test: Literal["mcnemar", "sign"] | None
    """Whose p that is, exact and two-sided: McNemar's where every score is 0 or 1, else the sign test: it heeds only who is better in a row."""
    shown: int
    """Rows that `show` leaves."""
    data: list[PairedRow]
    offset: int
    has_more: bool
