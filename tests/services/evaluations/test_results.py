"""The figures of an evaluation, in closed form."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.services.evaluations.evaluation_rows import Place, place_of
from bloomery.services.evaluations.results import FREE, AnswerFigures, GraderName, Named, ScoreFigures, percentile, summarise
from bloomery.types.evaluations import EvaluationResult
from bloomery.types.grading import MOST_SCORE
from bloomery.types.resources import Price
from bloomery.types.statistics import normal_interval, wilson

GRADER = GraderName("right@1", "h")
TWO = [Named("a", "va", FREE), Named("b", None, None)]


def answers(*given: tuple[int, int, bool], samples: int = 1) -> list[AnswerFigures]:
    """Of (row, model, whether it was given); each took as many seconds as its number, 10 tokens in and 5 out."""
    return [AnswerFigures(row, model, number, there, float(number), 10, 5) for number, (row, model, there) in enumerate(given)]


def scored(*scores: float | None) -> list[ScoreFigures]:
    """Of answer 0, 1, ...; 1 passes."""
    return [ScoreFigures(number, 0, score, None if score is None else score >= 1, None if score else "raised") for number, score in enumerate(scores)]


def summary(rows: int, scores: list[float | None]) -> EvaluationResult:
    given = [(row, model, True) for row in range(rows) for model in range(2)]
    return summarise(TWO, [GRADER], answers(*given), scored(*scores))


def test_a_difference_is_of_the_rows_that_both_have_a_score_for() -> None:
    found = summary(4, [1.0, 0.0, 1.0, None, 0.0, 0.0, 0.0, 1.0])
    (pair,) = found.differences
    assert (pair.rows, pair.wins, pair.losses, pair.ties) == (3, 1, 1, 1)
    assert pair.difference is not None
    assert pair.difference.value == 0.0
    # One up, one down, one alike of right and wrong: with one more of each, 0.4 and 0.4 of five.
    assert pair.difference.interval == pytest.approx((-0.7840, 0.7840), abs=1e-4)
    a, b = found.models
    assert (a.graders[0].rows, b.graders[0].rows) == (4, 3)
    assert (b.graders[0].invalid, b.graders[0].invalid_rate, b.graders[0].failures) == (1, 0.25, {"raised": 1})


def test_scores_as_large_as_any_may_be_have_figures_that_can_be_kept() -> None:
    found = summary(2, [MOST_SCORE, -MOST_SCORE, -MOST_SCORE, MOST_SCORE])
    assert found.differences[0].difference is not None
    assert found.differences[0].difference.value == 0.0
    assert EvaluationResult.model_validate_json(found.model_dump_json()) == found


def test_several_answers_to_a_row_count_as_one_mean() -> None:
    given = [(row, 0, True) for row in range(2) for _ in range(2)]
    found = summarise(TWO[:1], [GRADER], answers(*given), scored(1.0, 0.0, 1.0, 1.0))
    (graded,) = found.models[0].graders
    assert graded.mean is not None
    assert graded.passed is not None
    assert (graded.rows, graded.mean.value, graded.mean.interval) == (2, 0.75, normal_interval([0.5, 1.0]))
    assert graded.passed == graded.mean


def test_right_and_wrong_have_wilsons_interval() -> None:
    graded = summary(3, [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]).models[0].graders[0]
    assert graded.passed is not None
    assert (graded.passed.value, graded.passed.interval) == (2 / 3, wilson(2, 3))
    assert graded.mean == graded.passed


def test_rows_of_which_every_answer_passes_have_the_interval_of_so_many_rows() -> None:
    given = [(row, 0, True) for row in range(3) for _ in range(4)]
    (graded,) = summarise(TWO[:1], [GRADER], answers(*given), scored(*[1.0] * 12)).models[0].graders
    assert graded.passed is not None
    assert (graded.passed.value, graded.passed.interval) == (1.0, wilson(3, 3))


def test_an_unknown_price_makes_no_cost_and_a_known_one_is_of_the_answers_that_were_given() -> None:
    named = [Named("free", "v", FREE), Named("unknown", None, None), Named("dear", None, Price(prompt_usd_per_mtok=2.0, completion_usd_per_mtok=4.0))]
    given = [(row, model, model != 2 or row == 0) for row in range(2) for model in range(3)]
    found = summarise(named, [GRADER], answers(*given), [])
    assert [model.usd_per_1000 for model in found.models[:2]] == [0.0, None]
    dear = found.models[2]
    assert dear.usd_per_1000 == pytest.approx(1000 * (10 * 2.0 + 5 * 4.0) / 1e6)
    assert (dear.answers, dear.failed, dear.graders[0].failures, dear.graders[0].mean) == (1, 1, {"no_answer": 1}, None)


def test_of_nothing_there_is_no_figure() -> None:
    (model,) = summarise(TWO[:1], [GRADER], answers((0, 0, False)), []).models
    assert (model.latency_p50_s, model.latency_p95_s, model.usd_per_1000) == (None, None, None)
    assert (model.graders[0].mean, model.graders[0].passed, model.graders[0].invalid_rate) == (None, None, 1.0)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.95), percentile([3.0], 0.95), percentile([], 0.5)) == (50.0, 95.0, 3.0, None)


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4))
def test_every_answer_has_a_number_of_its_own_and_those_to_a_row_are_side_by_side(rows: int, models: int, samples: int) -> None:
    places = [place_of(number, models, samples) for number in range(rows * models * samples)]
    assert places == [Place(row, model, sample) for row in range(rows) for model in range(models) for sample in range(samples)]


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=30))
def test_a_model_beside_itself_differs_by_nothing(scores: list[float]) -> None:
    twice: list[float | None] = [score for score in scores for _ in range(2)]
    (pair,) = summary(len(scores), twice).differences
    assert pair.difference is not None
    assert (pair.difference.value, pair.ties) == (0.0, len(scores))
    assert pair.difference.interval is not None
    # Of right and wrong, as many as there are might have been won as lost.
    low, high = pair.difference.interval
    assert low == -high
    assert high == 0 or set(scores) <= {0.0, 1.0}
    assert math.isfinite(pair.difference.value)
