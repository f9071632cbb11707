"""Evaluations as graders: this file is the source that is graded with."""

from eval_protocol import EvaluateResult, reward_function
from eval_protocol.models import EvaluationRow, MetricResult
from eval_protocol.pytest import NoOpRolloutProcessor, evaluation_test


@evaluation_test(input_messages=[[[{"role": "user", "content": "How much?"}]]], rollout_processor=NoOpRolloutProcessor(), mode="pointwise")
def of_a_row(row: EvaluationRow) -> EvaluationRow:
    right = row.messages[-1].content == row.ground_truth
    about = MetricResult(score=0.5, is_score_valid=True, reason="half")
    row.evaluation_result = EvaluateResult(
        score=float(right), reason="compared", metrics={"half": about}, is_score_valid=bool(row.messages[-1].content)
    )
    return row


@evaluation_test(input_messages=[[[{"role": "user", "content": "How much?"}]]], rollout_processor=NoOpRolloutProcessor(), mode="all")
def of_all_rows(rows: list[EvaluationRow]) -> list[EvaluationRow]:
    return rows


@reward_function
def of_messages(messages, ground_truth=None, **kwargs):  # type: ignore[no-untyped-def]
    return EvaluateResult(score=float(messages[-1].content == ground_truth), reason=kwargs["level"], metrics={})
