"""The formulas behind the demo's table, against textbook values and closed forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.types.statistics import difference_of, mcnemar, mean_of, mismatch, normal_interval, score_of, sign_test, wilson


def test_wilson_gives_the_textbook_interval() -> None:
    # 81 of 263: a standard example of the method (Newcombe 1998, table I).
    low, high = wilson(81, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_and_stays_in_bounds(case: tuple[int, int]) -> None:
    low, high = wilson(*case)
    assert 0 <= low <= case[0] / case[1] <= high <= 1


def pairs(gained: int, lost: int, alike: int) -> tuple[list[float], list[float]]:
    return [0.0] * gained + [1.0] * (lost + alike), [1.0] * gained + [0.0] * lost + [1.0] * alike


@pytest.mark.parametrize(("rows", "up", "down"), [(10, 0.3, 0.05), (20, 0.1, 0.1), (40, 0.2, 0.0), (40, 0.05, 0.02)])
def test_the_interval_of_a_paired_difference_covers_it_as_often_as_it_says(rows: int, up: float, down: float) -> None:
    covered = 0.0
    for gained in range(rows + 1):
        for lost in range(rows + 1 - gained):
            alike = rows - gained - lost
            chance = math.comb(rows, gained) * math.comb(rows - gained, lost) * up**gained * down**lost * (1 - up - down) ** alike
            interval = difference_of(*pairs(gained, lost, alike)).interval
            assert interval is not None
            covered += chance * (interval.low <= up - down <= interval.high)
    assert covered > 0.94


def test_rows_that_all_went_one_way_leave_doubt_and_other_scores_have_the_normal_interval() -> None:
    gained = difference_of(*pairs(2, 0, 0))
    assert gained.interval is not None
    # (2 + 1) / 4 gained and 1 / 4 lost: 0.5 and 1.96 standard errors of 0.433.
    assert (gained.value, gained.interval.low, gained.interval.high) == (1.0, pytest.approx(0.5 - 0.8487, abs=1e-4), 1.0)
    alike, lost = difference_of(*pairs(0, 0, 9)).interval, difference_of(*pairs(0, 2, 0)).interval
    assert alike is not None
    assert lost is not None
    assert alike.low < 0 < alike.high
    assert lost == (-1.0, -gained.interval.low)
    assert difference_of([0.5, 0.0], [1.0, 0.0]) == mean_of([0.5, 0.0])
    assert score_of([1.0, 1.0]).interval == wilson(2, 2)
    assert score_of([0.5, 1.0]) == mean_of([0.5, 1.0])


def test_mcnemar_counts_discordant_rows_only() -> None:
    old = [True] * 50 + [False] * 10 + [True] * 2 + [False] * 5
    new = [True] * 50 + [True] * 10 + [False] * 2 + [False] * 5
    result = mcnemar(old, new)
    assert (result.gained, result.lost) == (10, 2)
    assert result.p_value == pytest.approx(2 * sum(math.comb(12, k) for k in range(3)) / 2**12)
    assert result.better


def test_mcnemar_of_thousands_of_rows_is_that_of_a_fair_coin() -> None:
    # Thrown 20,000 times: as many heads as tails, and 142 more than that, which are two standard deviations with the continuity correction.
    assert mcnemar([True, False] * 10_000, [False, True] * 10_000).p_value == 1.0
    assert mcnemar([True] * 9_858 + [False] * 10_142, [False] * 9_858 + [True] * 10_142).p_value == pytest.approx(0.0455, abs=0.001)


@pytest.mark.parametrize(("wins", "losses"), [(2_000, 2_001), (1_900, 2_200), (2_600, 1_800), (4_001, 0)])
def test_the_sign_test_of_many_rows_is_the_exact_one(wins: int, losses: int) -> None:
    decided = wins + losses
    exact = 2 * sum(math.comb(decided, k) for k in range(min(wins, losses) + 1)) / 2**decided
    # What logarithms of numbers of 10,000 digits leave.
    assert sign_test(wins, losses) == pytest.approx(min(1.0, exact), rel=1e-9)


def test_a_million_rows_have_a_sign_test() -> None:
    # Of wins less losses the standard deviation is 1,000, and the continuity correction one.
    assert sign_test(501_000, 499_000) == pytest.approx(math.erfc(1999 / 1000 / math.sqrt(2)), rel=1e-3)
    assert sign_test(500_000, 500_000) == 1.0
    assert sign_test(1_000_000, 0) == 0.0


def test_equal_versions_are_not_better() -> None:
    assert not mcnemar([True, False], [True, False]).better
    assert mcnemar([True, False], [True, False]).p_value == 1.0


def test_losing_significantly_is_not_better() -> None:
    assert not mcnemar([True] * 20, [False] * 20).better


def test_mismatch_is_zero_for_equal_bits_and_positive_otherwise() -> None:
    assert mismatch([-1.0, -2.0], [-1.0, -2.0])[:2] == (0.0, 0.0)
    result = mismatch([-1.0, -2.0], [-1.1, -2.0])
    assert result.k3 == pytest.approx((math.exp(-0.1) - 1 + 0.1) / 2)
    assert result.max_difference == pytest.approx(0.1)


def test_the_interval_of_a_mean_narrows_with_the_square_root_of_its_values() -> None:
    few, many = normal_interval([0.0, 1.0] * 20), normal_interval([0.0, 1.0] * 2000)
    assert (few.low + few.high, many.low + many.high) == pytest.approx((1, 1))
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx(10, rel=0.02)
    assert normal_interval([0.5]) == (-math.inf, math.inf)
