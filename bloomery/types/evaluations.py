"""Evaluations: what models answer to the rows of a data set, and what graders say of it, row by row.

Whatever decides the scores stands in the spec, with nothing left open. A score that there is none of is invalid and counted, and never a 0; what is
not known, such as what a token costs somewhere else, is None and never 0.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field

from bloomery.types.graders import VersionNumber
from bloomery.types.grading import GradeResult
from bloomery.types.resources import Name, Price, Resource, Split
from bloomery.types.statistics import Mean, difference_of

MAX_MODELS: Final = 16
MAX_GRADERS: Final = 16
MAX_SAMPLES: Final = 64
MAX_ANSWERS: Final = 100_000
"""Rows times models times samples of one evaluation."""
USUAL_DEADLINE_S: Final = 6 * 3600.0

Row = TypeVar("Row")
Text = Annotated[str, Field(max_length=512)]
Interval = Annotated[tuple[float, float], Field(strict=False)]
ModelName = Annotated[str, Field(min_length=1, max_length=512)]
GraderName = Annotated[str, Field(min_length=1, max_length=140, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}(@[1-9][0-9]{0,8})?$")]


class EvaluationState(StrEnum):
    """Where an evaluation stands."""

    QUEUED = "queued"
    RUNNING = "running"
    """Also while no server runs: the next one goes on with what is missing."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether it stays as it is."""
        return not EVALUATION_NEXT[self]

    @property
    def words(self) -> str:
        """As sentences say it."""
        return f"has {self}" if self in (EvaluationState.SUCCEEDED, EvaluationState.FAILED) else f"is {self}"


EVALUATION_NEXT: Final[dict[EvaluationState, frozenset[EvaluationState]]] = {
    EvaluationState.QUEUED: frozenset({EvaluationState.RUNNING, EvaluationState.FAILED, EvaluationState.CANCELLED}),
    EvaluationState.RUNNING: frozenset({EvaluationState.SUCCEEDED, EvaluationState.FAILED, EvaluationState.CANCELLED}),
    EvaluationState.SUCCEEDED: frozenset(),
    EvaluationState.FAILED: frozenset(),
    EvaluationState.CANCELLED: frozenset(),
}
"""What each state may become."""


# What is asked for


class EvaluatedModel(Resource):
    """A model by any name that can be asked for answers: a base model's, a version, a deployment's. What a deployment serves when the evaluation is
    made is what is evaluated. Without a `price` that of its deployment or endpoint counts; tokens of this server's other models are free."""

    model: ModelName
    price: Price | None = None


class ChosenGrader(Resource):
    """A version of a grader; without a number the newest when the evaluation is made, which it then names."""

    grader: Name
    version: VersionNumber | None = None

    @property
    def label(self) -> str:
        """How results name it."""
        return f"{self.grader}@{self.version}"


def _model(given: Any) -> Any:
    return {"model": given} if isinstance(given, str) else given


def _grader(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    name, at, version = given.partition("@")
    if at and not (version.isascii() and version.isdigit()):
        raise ValueError("the version of a grader is a number, as in NAME@2")
    return {"grader": name, "version": int(version) if at else None}


NamedModel = Annotated[EvaluatedModel, BeforeValidator(_model, json_schema_input_type=EvaluatedModel | ModelName)]
NamedGrader = Annotated[ChosenGrader, BeforeValidator(_grader, json_schema_input_type=ChosenGrader | GraderName)]


class EvaluationData(Resource):
    """The rows of one split of a version of a data set."""

    dataset: Name
    version: str | None = None
    """Id or manifest; without it the newest when the evaluation is made, which it then names."""
    split: Split = "eval"
    rows: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    """At most so many, the first of the split; None: all of them."""


class AnswerParams(Resource):
    """How models are sampled. Answer `n` to a row has one seed for all models."""

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] = 512
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=1 << 53)] = 0
    samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    """Answers of each model to each row."""


class EvaluationSpec(Resource):
    """An evaluation as it is asked for, and as it is kept with nothing left open. A model may be given as its name alone, a grader as `NAME` or
    `NAME@VERSION`."""

    name: Name
    data: EvaluationData
    models: Annotated[list[NamedModel], Field(min_length=1, max_length=MAX_MODELS)]
    graders: Annotated[list[NamedGrader], Field(min_length=1, max_length=MAX_GRADERS)]
    params: AnswerParams = AnswerParams()
    deadline_s: Annotated[float, Field(gt=0, le=30 * 86_400, allow_inf_nan=False)] = USUAL_DEADLINE_S
    """From its beginning; what is missing then is named, and the evaluation has failed."""
    metadata: Annotated[dict[str, Text], Field(max_length=16)] = Field(default_factory=dict)


# What came of it


class Measured(Resource):
    """A mean or a share with its 95 % interval; of a single row there is none, unless it is right or wrong."""

    value: float
    interval: Interval | None

    @classmethod
    def of(cls, mean: Mean) -> Self:
        """As it is shown."""
        return cls(value=mean.value, interval=mean.interval)


class GraderSummary(Resource):
    """What one grader says of one model's answers. Of several answers to a row the mean counts, so that intervals are over rows."""

    grader: str
    hash: str
    rows: int
    """With a score."""
    mean: Measured | None
    passed: Measured | None
    """The share of scored answers that pass; None where the grader has no `pass_threshold` and is none that passes or fails by itself."""
    invalid: int
    """Answers without a score, whoever is at fault."""
    invalid_rate: float
    failures: dict[str, int]
    """The same by kind; `no_answer` where the model gave none."""


class ModelSummary(Resource):
    """How one model did."""

    model: str
    version: str | None
    """Of the weights; None of what is served elsewhere."""
    answers: int
    """That were given."""
    failed: int
    """Questions that came to no answer."""
    latency_p50_s: float | None
    latency_p95_s: float | None
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    """Of all answers together."""
    usd_per_1000: float | None
    """What 1,000 answers cost in US dollars; None where the price is not known."""
    graders: list[GraderSummary]


class Difference(Resource):
    """How much higher one model scores than another on the same rows: of the rows that both have a score for."""

    grader: str
    model: str
    other: str
    rows: int
    difference: Measured | None
    wins: int
    losses: int
    ties: int

    @classmethod
    def between(cls, grader: str, one: tuple[str, Mapping[Row, float]], other: tuple[str, Mapping[Row, float]]) -> Self:
        """Of two models by their scores of each row."""
        (name, mine), (other_name, theirs) = one, other
        both = [row for row in mine if row in theirs]
        differences = [mine[row] - theirs[row] for row in both]
        wins, losses = sum(each > 0 for each in differences), sum(each < 0 for each in differences)
        return cls(
            grader=grader,
            model=name,
            other=other_name,
            rows=len(differences),
            difference=Measured.of(difference_of([theirs[row] for row in both], [mine[row] for row in both])) if both else None,
            wins=wins,
            losses=losses,
            ties=len(differences) - wins - losses,
        )


class EvaluationResult(Resource):
    """What an evaluation came to: a summary for each model, and all pairs of models by each grader."""

    models: list[ModelSummary]
    differences: list[Difference]


class EvaluationProgress(Resource):
    """How far it is: answers that are there, with or without success, and scores that are there or were failed to be given, of so many."""

    answers: int
    answered: int
    scores: int
    scored: int


class Evaluation(Resource):
    """An evaluation; `versions` are the weights of its models, in their order."""

    id: str
    spec: EvaluationSpec
    versions: list[str | None]
    rows: int
    state: Annotated[EvaluationState, Field(strict=False)]
    reason: str | None
    """Why it failed."""
    progress: EvaluationProgress
    result: EvaluationResult | None
    created_us: int
    updated_us: int
    started_us: int | None
    finished_us: int | None


# Item by item

AnswerFailure = Literal["refused", "unavailable", "timeout", "template"]
"""`refused`: the model cannot be asked this, for example because it is too long. `unavailable`: who should have answered is away. `template`: a
reference of the question leads nowhere in this row."""


class AnswerError(Resource):
    """Why there is no answer."""

    kind: AnswerFailure
    detail: str


class Answered(Resource):
    """What a model said, or why it said nothing."""

    text: str = ""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    """Calls, as chat completions have them."""
    finish_reason: str | None = None
    version: str | None = None
    latency_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: AnswerError | None = None


class Score(Resource):
    """What a grader said of an answer, and whether it passes, where the grader says that."""

    grader: str
    result: GradeResult
    passed: bool | None


class EvaluationItem(Resource):
    """One answer of one model to one row: what was asked, what was said, and what it is worth. `number` is its place in the evaluation."""

    number: int
    row: int
    sample: int
    model: str
    messages: list[dict[str, Any]]
    prompt: str | None
    item: dict[str, Any]
    """The row's own fields, as graders see them."""
    answer: Answered
    scores: list[Score]
    created_us: int


ItemStatus = Literal["passed", "failed", "invalid"]
"""`invalid`: the model or a grader came to nothing; `failed`: a grader fails it; `passed`: none does. What is not scored yet is none of them."""


class EvaluationItems(Resource):
    """Items in their order; ask again with `after` = the last `number`."""

    data: list[EvaluationItem]
    has_more: bool


class Placed(Resource):
    """A line of a leaderboard."""

    place: int
    """Those whose means are equal share one."""
    evaluation: str
    """Its name."""
    params: AnswerParams
    summary: ModelSummary
    """With this grader alone."""
    finished_us: int


class Leaderboard(Resource):
    """Models by what one grader says of their answers to the same rows, best first: of each version, and each way to sample it, the newest result."""

    dataset: str
    version: str
    split: Split
    grader: str
    rows: int
    """Only evaluations of so many rows are compared: the most that any has."""
    data: list[Placed]
