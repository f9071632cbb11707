"""What a grader prefers of two answers, and how that is compared with people."""

from typing import Any

import pytest

from bloomery.grade.calibration import Rate
from bloomery.grade.grader import Grader
from bloomery.services.grading.preferences import Preference, Preferring, decided_alike, first_in_both_orders, first_of, flips
from bloomery.types.errors import InvalidInput
from bloomery.types.graders import CalibrateGrader, ComparedPair, OutputRow
from bloomery.types.grading import GradeResult

ONE, OTHER = OutputRow(output="one", item={"id": 7}), OutputRow(output="other", item={"id": 7})
PAIR = ComparedPair(first=ONE, second=OTHER, choice="tie")
LABELS = {"type": "label_model", "name": "which", "model": "m", "labels": ["A", "B", "same"], "passing_labels": ["A"]}
BOTH = LABELS | {"input": [{"role": "user", "content": "{{ item.first }} or {{ item.second }}"}]}
CHECK = {"type": "string_check", "input": "{{ sample.output_text }}", "reference": "yes", "operation": "eq"}


def preferring(spec: dict[str, Any], **options: Any) -> Preferring:
    return Preferring.of(Grader.parse(spec).spec, CalibrateGrader(pairs=[PAIR, PAIR], **options))


def scored(score: float | None, label: str | None = None) -> GradeResult:
    if score is None:
        return GradeResult.failed("no_score", "none")
    return GradeResult(score=score, labels={} if label is None else {"which": label})


def test_scores_prefer_the_higher_and_neither_where_they_are_close() -> None:
    exact, loose = preferring(CHECK), preferring(CHECK, tie_within=0.25)
    assert exact.sides([PAIR]) == ([ONE], [OTHER])
    assert [exact.read(scored(0.5), scored(other)) for other in (0.25, 0.75, 0.5)] == [("first", None), ("second", None), ("tie", None)]
    assert [loose.read(scored(0.5), scored(other)) for other in (0.25, 0.1)] == [("tie", None), ("first", None)]
    assert exact.read(scored(None), scored(1.0)) is exact.read(scored(1.0), scored(None)) is None


def test_a_judge_that_sees_both_is_asked_in_both_orders_and_heard_by_places() -> None:
    judge = preferring(BOTH, verdicts={"A": "first", "B": "second", "same": "tie"})
    (there,), (back,) = judge.sides([PAIR])
    assert there.item == {"id": 7, "first": "one", "second": "other"}
    assert back.item == {"id": 7, "first": "other", "second": "one"}
    assert judge.read(scored(1.0, "A"), scored(0.0, "B")) == Preference("first", "first")
    assert judge.read(scored(1.0, "A"), scored(1.0, "A")) == Preference("first", "second")
    assert judge.read(scored(0.0, "same"), scored(0.0, "same")) == Preference("tie", "tie")


def test_both_answers_are_of_one_row_that_has_place_for_them() -> None:
    judge = preferring(BOTH, verdicts={"A": "first", "B": "second", "same": "tie"})
    apart = ComparedPair(first=ONE, second=OutputRow(output="other", item={"id": 8}), choice="tie")
    taken = OutputRow(output="one", item={"id": 7, "second": "mine"})
    for pair, problem in (
        (apart, "answers of pair 2 have different"),
        (ComparedPair(first=taken, second=taken, choice="tie"), "`second` of its own"),
    ):
        with pytest.raises(InvalidInput, match=problem) as refused:
            judge.sides([PAIR, pair])
        assert refused.value.field == "pairs"
        assert preferring(CHECK).sides([pair]) == ([pair.first], [pair.second])


def test_places_that_are_heeded_are_seen_to() -> None:
    seen = [Preference("first", "first"), Preference("first", "second"), Preference("tie", "second"), Preference("second", None)]
    assert flips(seen) == Rate(2, 3)
    # By the places in which it saw them: first and second, first and first, neither and first.
    assert first_in_both_orders(seen) == Rate(4, 5)
    assert first_of(["first", "tie", "second", "first"]) == Rate(2, 3)
    assert decided_alike(["first", "tie", "second", "first"], ["first", "first", "tie", "second"]) == Rate(1, 2)


@pytest.mark.parametrize(
    ("spec", "options", "problem"),
    [
        (CHECK, {"verdicts": {"A": "first"}}, "gives no labels"),
        (BOTH, {"verdicts": {"A": "first", "B": "second"}}, "`same` is not in both"),
        (BOTH, {"verdicts": {"A": "first", "B": "second", "same": "tie"}, "tie_within": 0.5}, "`tie_within` is of scores"),
    ],
)
def test_what_a_grader_cannot_compare_by_is_refused(spec: dict[str, Any], options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        preferring(spec, **options)
