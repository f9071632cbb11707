"""What a grader is given and what it gives: one contract for rewards, evaluations and online scoring.

An infrastructure failure is never a score: a result is valid with a finite `score`, or it has an `error` of a kind that says who failed.
"""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from bloomery.types.resources import Resource

MOST_SCORE: Final = 1e100
"""Either way: of what is larger means and intervals come to no number."""
Number = Annotated[float, Field(ge=-MOST_SCORE, le=MOST_SCORE, allow_inf_nan=False)]
FailureKind = Literal["raised", "timeout", "memory", "killed", "no_score", "wrong_type", "not_finite", "template", "unavailable"]
"""`raised`: the grader's own code did. `timeout`, `memory`: it went over its limit. `killed`: it ended otherwise. `no_score`, `wrong_type` and
`not_finite`: what it gave is no score. `template`: a reference in it leads nowhere for this row. `unavailable`: who should have answered (the jail,
a judge's model) is away, and asking again may help; it mends none of the others."""


class Sample(Resource):
    """What the model said: `{{sample.output_text}}` and its like in templates."""

    output_text: str
    output_json: Any = None
    """The text as JSON, where it is some."""
    output_tools: list[dict[str, Any]] = Field(default_factory=list)
    choices: list[dict[str, Any]] = Field(default_factory=list)


class GradeInput(Resource):
    """One output to be graded. `item` are the row's own fields, which templates and functions reach by name."""

    item: dict[str, Any]
    sample: Sample
    messages: list[dict[str, Any]] = Field(default_factory=list)
    """The conversation that was answered."""
    trace: list[dict[str, Any]] | None = None
    """All messages of a rollout of several turns."""


class GradeError(Resource):
    """Why there is no score; `detail` is for people."""

    kind: FailureKind
    detail: str


class GradeUsage(Resource):
    """Tokens that judges took."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class GradeResult(Resource):
    """A score, or why there is none. `metrics` are its parts by name, `labels` what was classified."""

    score: Number | None = None
    reason: str | None = None
    metrics: dict[str, Number] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    usage: GradeUsage | None = None
    error: GradeError | None = None

    @property
    def valid(self) -> bool:
        """Whether there is a score."""
        return self.error is None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.score is None) == (self.error is None):
            raise ValueError("a result has a score or an error")
        return self

    @classmethod
    def failed(cls, kind: FailureKind, detail: str) -> Self:
        """No score, and why."""
        return cls(error=GradeError(kind=kind, detail=detail))
