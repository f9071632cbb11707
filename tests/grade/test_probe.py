import pytest

from bloomery.grade.probe import constant, require_varied
from bloomery.types.errors import InvalidInput
from bloomery.types.grading import GradeResult

NONE = GradeResult.failed("timeout", "too slow")


def scores(*values: float) -> list[GradeResult]:
    return [GradeResult(score=value) for value in values]


def test_scores_that_differ_teach_something() -> None:
    assert constant([*scores(0.0, 0.0, 1e-9), NONE]) is None
    require_varied(scores(0, 1))


@pytest.mark.parametrize(
    ("results", "says"),
    [
        (scores(1, 1, 1), "all 3 scores are 1"),
        ([*scores(0.5, 0.5), NONE], "all 2 scores are 0.5"),
        ([*scores(1), NONE, NONE], "1 of 3 outputs have a score (the others: timeout)"),
        ([NONE], "0 of 1"),
        ([], "no outputs"),
    ],
)
def test_scores_without_a_difference_are_refused(results: list[GradeResult], says: str) -> None:
    assert says in (constant(results) or "")
    with pytest.raises(InvalidInput, match="nothing to learn from") as refused:
        require_varied(results)
    assert refused.value.field == "grader"
