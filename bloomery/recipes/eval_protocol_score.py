"""Evaluation functions of Eval Protocol (the package `eval-protocol`, 0.3) as rewards: a score, with its metrics as the parts.

    @evaluation_test(input_messages=..., mode="pointwise", ...)
    def evaluate(row: EvaluationRow) -> EvaluationRow: ...

    RemoteRollouts("http://127.0.0.1:3000", scored_by(evaluate))

Importing this module takes the package; nothing else of Bloomery does. A score that the function calls invalid is a failure, not a reward.
"""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from eval_protocol.models import EvaluationRow, ExecutionMetadata, InputMetadata, Message, Status  # type: ignore[import-not-found]

from bloomery.recipes.remote_rollouts import Finished, Score
from bloomery.recipes.rewards import Reward


class ScoreInvalid(Exception):
    """The evaluation gave no score that counts."""


def scored_by(evaluate: Callable[[Any], Any]) -> Score:
    """By a function of one row, plain or decorated, synchronous or not."""

    def score(finished: Finished) -> Reward:
        given = evaluate(_row(finished))
        rated = asyncio.run(_awaited(given)) if inspect.isawaitable(given) else given
        result = rated.evaluation_result
        if result is None:
            raise ScoreInvalid("the evaluation left `evaluation_result` empty")
        if not result.is_score_valid:
            raise ScoreInvalid(f"the evaluation says that its score is not valid: {result.error or result.reason}")
        if result.error:
            raise ScoreInvalid(f"the evaluation failed: {result.error}")
        return Reward(finished.rollout_id, result.score, {name: metric.score for name, metric in result.metrics.items() if metric.is_score_valid})

    return score


def _row(finished: Finished) -> Any:
    asked = finished.problem.data
    return EvaluationRow(
        messages=[Message.model_validate(message) for message in finished.messages],
        tools=asked["tools"],
        ground_truth=asked["ground_truth"],
        input_metadata=InputMetadata(row_id=finished.problem.id),
        execution_metadata=ExecutionMetadata(rollout_id=finished.rollout_id, extra=dict(finished.extras)),
        rollout_status=Status.rollout_finished(),
    )


async def _awaited(given: Any) -> Any:
    return await given
