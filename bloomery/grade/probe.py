"""Whether a grader can teach anything: looked at before RL spends anything on it."""

from collections.abc import Sequence

from bloomery.types.errors import InvalidInput
from bloomery.types.grading import GradeResult


def constant(results: Sequence[GradeResult]) -> str | None:
    """Why scores of a probe batch show no difference to learn from; None where they do. Failures count for nothing."""
    scores = [result.score for result in results if result.score is not None]
    if not results:
        return "no outputs were graded"
    if len(scores) < 2:
        failures = sorted({result.error.kind for result in results if result.error is not None})
        return f"{len(scores)} of {len(results)} outputs have a score" + (f" (the others: {', '.join(failures)})" if failures else "")
    if min(scores) == max(scores):
        return f"all {len(scores)} scores are {scores[0]:g}"
    return None


def require_varied(results: Sequence[GradeResult]) -> None:
    """Refuse a grader whose scores on a probe batch are all alike: training on them would be paid for and change nothing."""
    if (why := constant(results)) is not None:
        problem = f"this grader gives nothing to learn from on the probe batch: {why}"
        raise InvalidInput(f"{problem}; try it on outputs of which some are better than others, and mend it", field="grader")
