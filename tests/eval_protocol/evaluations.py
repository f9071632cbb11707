"""Evaluations as users of Eval Protocol write them, and some that give no score."""

import math

from eval_protocol.models import EvaluateResult, EvaluationRow, MetricResult
from eval_protocol.pytest import NoOpRolloutProcessor, evaluation_test


def text(row: EvaluationRow) -> str:
    return "".join(str(message.content) for message in row.get_assistant_messages())


def rated(row: EvaluationRow, score: float, **more: object) -> EvaluationRow:
    about = MetricResult(score=float(str(row.ground_truth) in text(row)), reason="the answer")
    row.evaluation_result = EvaluateResult(score=score, reason="short is good", metrics={"right": about}, **more)
    return row


@evaluation_test(input_messages=[[[{"role": "user", "content": "How much?"}]]], rollout_processor=NoOpRolloutProcessor(), mode="pointwise")
def decorated(row: EvaluationRow) -> EvaluationRow:
    assert row.rollout_status.code == 100
    assert row.execution_metadata.extra["answers"] == len(row.get_assistant_messages()) == 2
    assert [message.role for message in row.messages] == ["user", "assistant", "user", "assistant"]
    return rated(row, 1.0 - min(len(text(row)), 64) / 64)


async def asynchronous(row: EvaluationRow) -> EvaluationRow:
    return rated(row, 0.5)


def not_a_number(row: EvaluationRow) -> EvaluationRow:
    return rated(row, math.nan)


def invalid(row: EvaluationRow) -> EvaluationRow:
    return rated(row, 0.0, is_score_valid=False)


def empty(row: EvaluationRow) -> EvaluationRow:
    return row


def raises(row: EvaluationRow) -> EvaluationRow:
    raise ValueError("the judge is away")
