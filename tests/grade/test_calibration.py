import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import cohen_kappa_score, confusion_matrix

from bloomery.grade.calibration import (
    Rate,
    agreement,
    cohens_kappa,
    majority_baseline,
    position_flips,
    repeat_agreement,
    rogan_gladen,
    true_negative_rate,
    true_positive_rate,
)
from bloomery.types.errors import InvalidInput
from bloomery.types.statistics import wilson

PAIRS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


def pairs(both: int, people: int, judge: int, neither: int) -> tuple[list[bool], list[bool]]:
    """So many outputs that both pass, only people do, only the judge does, and neither does."""
    rows = [(True, True)] * both + [(True, False)] * people + [(False, True)] * judge + [(False, False)] * neither
    return [row[0] for row in rows], [row[1] for row in rows]


def test_kappa_of_a_textbook_table() -> None:
    # Observed 35/50; by chance 25/50 * 30/50 + 25/50 * 20/50 = 1/2.
    kappa = cohens_kappa(*pairs(20, 5, 10, 15))
    assert kappa.value == pytest.approx(0.4)
    assert kappa.interval is not None
    # Fleiss, Cohen and Everitt (1969), by hand.
    agreed = 0.4 * (1 - 1.1 * 0.6) ** 2 + 0.3 * (1 - 0.9 * 0.6) ** 2
    apart = 0.6**2 * (0.1 * 1.1**2 + 0.2 * 0.9**2)
    half = 1.959963984540054 * math.sqrt((agreed + apart - 0.1**2) / (0.5**2 * 50))
    assert kappa.interval == pytest.approx((0.4 - half, 0.4 + half))


@pytest.mark.parametrize(("table", "value"), [((10, 0, 0, 10), 1.0), ((0, 10, 10, 0), -1.0), ((5, 5, 5, 5), 0.0)])
def test_kappa_at_its_ends_and_in_the_middle(table: tuple[int, int, int, int], value: float) -> None:
    assert cohens_kappa(*pairs(*table)).value == pytest.approx(value)


@pytest.mark.parametrize("each", [1, 4, 20])
def test_kappa_of_two_who_always_agree_is_as_uncertain_as_their_agreement(each: int) -> None:
    # By chance they agree in half of them.
    always, never = cohens_kappa(*pairs(each, 0, 0, each)).interval, cohens_kappa(*pairs(0, each, each, 0)).interval
    assert always is not None
    assert never is not None
    assert always == pytest.approx((2 * wilson(2 * each, 2 * each).low - 1, 1.0))
    assert never == pytest.approx((-1.0, 2 * wilson(0, 2 * each).high - 1))


def test_kappa_of_two_who_say_one_thing_only_is_unknown() -> None:
    assert cohens_kappa([True] * 5, [True] * 5) == (None, None)


@given(PAIRS)
def test_kappa_and_rates_agree_with_scikit_learn(rows: list[tuple[bool, bool]]) -> None:
    people, judge = [row[0] for row in rows], [row[1] for row in rows]
    kappa = cohens_kappa(people, judge)
    if kappa.value is not None:
        assert kappa.value == pytest.approx(cohen_kappa_score(people, judge), abs=1e-12)
        assert kappa.interval is not None
        assert kappa.interval.low <= kappa.value + 1e-12
        assert kappa.interval.high >= kappa.value - 1e-12
    negative, false_positive, false_negative, positive = confusion_matrix(people, judge, labels=[False, True]).ravel().tolist()
    assert true_positive_rate(people, judge) == (positive, positive + false_negative)
    assert true_negative_rate(people, judge) == (negative, negative + false_positive)
    assert agreement(people, judge) == (positive + negative, len(rows))


def test_kappa_of_several_labels_agrees_with_scikit_learn() -> None:
    draw = random.Random(3)
    people = draw.choices("abcd", k=300)
    judge = [label if draw.random() < 0.7 else draw.choice("abcd") for label in people]
    assert cohens_kappa(people, judge).value == pytest.approx(cohen_kappa_score(people, judge))


def test_the_interval_of_kappa_covers_as_often_as_it_says() -> None:
    # Of a judge that is right nine times in ten, with 60% passing: kappa is 0.9 agreement beyond 0.516 by chance.
    draw = random.Random(11)
    truth = (0.9 - (0.6 * 0.58 + 0.4 * 0.42)) / (1 - (0.6 * 0.58 + 0.4 * 0.42))
    covered = 0
    for _ in range(400):
        people = [draw.random() < 0.6 for _ in range(200)]
        judge = [label if draw.random() < 0.9 else not label for label in people]
        interval = cohens_kappa(people, judge).interval
        assert interval is not None
        covered += interval.low <= truth <= interval.high
    # Binomial with 95% of 400: below 368 once in a thousand.
    assert covered >= 366


def test_rates_have_wilsons_interval() -> None:
    rate = Rate(8, 10)
    assert rate.value == 0.8
    assert rate.interval == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert Rate(0, 10).interval == pytest.approx((0.0, 0.2775328), abs=1e-6)
    assert Rate(10, 10).interval == pytest.approx((0.7224672, 1.0), abs=1e-6)
    assert (Rate(0, 0).value, Rate(0, 0).interval) == (None, None)


def test_the_majority_baseline_is_what_one_label_gets() -> None:
    assert majority_baseline(["a", "a", "b", "c"]) == (2, 4)


def test_position_flips_count_preferences_that_change_with_the_order() -> None:
    assert position_flips(["x", "y", "x", "tie"], ["x", "x", "y", "tie"]) == (2, 4)


def test_repeat_agreement_is_the_chance_that_two_verdicts_are_alike() -> None:
    # All alike; one of three pairs alike; a single verdict says nothing.
    assert repeat_agreement([[1, 1, 1], [1, 1, 0], [1]]) == pytest.approx((1 + 1 / 3) / 2)
    assert repeat_agreement([[1], []]) is None


def test_rogan_gladen_undoes_a_known_judge() -> None:
    # 40% pass in truth, and the judge passes 0.4 * 0.9 + 0.6 * 0.2 = 48%.
    corrected = rogan_gladen(Rate(480, 1000), Rate(90, 100), Rate(80, 100))
    assert corrected is not None
    assert corrected.value == pytest.approx(0.4)
    # Of 482 in 1004, 92 in 104 and 82 in 104.
    passed, sensitivity, specificity = 482 * 522 / 1004**3, 92 * 12 / 104**3, 82 * 22 / 104**3
    variance = (passed + 0.4**2 * sensitivity + 0.6**2 * specificity) / 0.7**2
    half = 1.959963984540054 * math.sqrt(variance)
    assert corrected.interval == pytest.approx((0.4 - half, 0.4 + half))


def test_rogan_gladen_of_a_perfect_judge_changes_nothing_and_of_a_blind_one_says_nothing() -> None:
    perfect = rogan_gladen(Rate(30, 100), Rate(50, 50), Rate(50, 50))
    assert perfect is not None
    assert perfect.value == pytest.approx(0.3)
    hardly_known = rogan_gladen(Rate(300, 1000), Rate(3, 3), Rate(3, 3))
    assert hardly_known is not None
    assert hardly_known.interval.low < 0.1 < 0.5 < hardly_known.interval.high
    assert rogan_gladen(Rate(30, 100), Rate(25, 50), Rate(25, 50)) is None
    assert rogan_gladen(Rate(30, 100), Rate(0, 0), Rate(25, 50)) is None


def test_rogan_gladen_stays_a_share() -> None:
    low = rogan_gladen(Rate(1, 100), Rate(45, 50), Rate(40, 50))
    assert low is not None
    assert low.value == low.interval.low == 0.0


@pytest.mark.parametrize("measure", [cohens_kappa, agreement, true_positive_rate, true_negative_rate, position_flips])
def test_labels_of_different_outputs_are_refused(measure: object) -> None:
    assert callable(measure)
    with pytest.raises(InvalidInput, match="give both of every output"):
        measure([True], [True, False])
    with pytest.raises(InvalidInput, match="no labels"):
        measure([], [])
