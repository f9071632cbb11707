"""Online scoring: what a grader says of answers that were served, kept as feedback on them.

The grader is a version, the same that scores evaluations and rewards; its feedback has the metric `NAME@VERSION`. An answer is scored once, so that
`score_served` may be called again and again, and an answer without a score gets no feedback: a failure is no zero.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from bloomery.client import Client
from bloomery.types.graders import GraderVersion, OutputRow
from bloomery.types.grading import GradeResult
from bloomery.types.resources import FeedbackSource, SpanDetail

_AT_A_TIME: Final = 64


class Online(NamedTuple):
    """An answer, by its id, and what the grader says of it."""

    span: str
    model: str
    result: GradeResult


def score_served(
    client: Client,
    grader: str,
    *,
    version: int | None = None,
    deployment: str | None = None,
    since_us: int | None = None,
    limit: int = 100,
) -> list[Online]:
    """Score the newest `limit` chats and completions, of one deployment or of all; those that were scored before are left out."""
    found = client.graders.get(grader, version)
    spans = client.spans.list(deployment=deployment, kinds=("chat", "completion"), since_us=since_us, limit=limit)
    details = (client.spans.get(span.id) for span in spans if span.status == "ok" and span.has_body)
    asked = [(detail, row) for detail in details if metric_of(found) not in judged(detail) and (row := output_of(detail)) is not None]
    return [online for start in range(0, len(asked), _AT_A_TIME) for online in _score(client, found, asked[start : start + _AT_A_TIME])]


def metric_of(grader: GraderVersion) -> str:
    """The name of its feedback."""
    return f"{grader.name}@{grader.version}"


def judged(detail: SpanDetail) -> set[str]:
    """Metrics that an answer has feedback of."""
    return {each.metric for each in detail.feedback}


def output_of(detail: SpanDetail) -> OutputRow | None:
    """An answer as graders take one: what was noted with the request (`metadata`) is its `item`. None where there were several choices, or none."""
    body = detail.body or {}
    choices: list[dict[str, Any]] = body.get("choices", [])
    if len(choices) != 1:
        return None
    request, (choice,) = body.get("request", {}), choices
    if "message" not in choice:
        return OutputRow(item={"prompt": request.get("prompt"), **detail.span.tags}, output=choice.get("text") or "")
    message = choice["message"]
    return OutputRow(
        item=dict(detail.span.tags), output=message.get("content") or "", tools=message.get("tool_calls") or [], messages=request.get("messages", [])
    )


def _score(client: Client, grader: GraderVersion, asked: Sequence[tuple[SpanDetail, OutputRow]]) -> Iterator[Online]:
    run = client.graders.run(grader.name, [row for _, row in asked], version=grader.version)
    for (detail, _), result in zip(asked, run.results, strict=True):
        if result.score is not None:
            source: FeedbackSource = "judge" if grader.judges else "code"
            client.feedback(detail.span.id, metric_of(grader), result.score, type="float", comment=result.reason or None, source=source)
        yield Online(detail.span.id, detail.span.model, result)
