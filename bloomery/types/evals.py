"""Evals and their runs in the words of OpenAI's contract: what is asked for, and what there is. A run is an evaluation, of rows of its own."""

from typing import Annotated, Any, Literal

from pydantic import Field

from bloomery.types.evaluations import MAX_GRADERS, AnswerParams, ChosenGrader, Evaluation, EvaluationItem, EvaluationSpec
from bloomery.types.resources import Resource

Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Key, Value], Field(max_length=16)]
EvalName = Annotated[str, Field(min_length=1, max_length=256)]
SourceKind = Literal["jsonl", "completions", "responses"]


class NewEval(Resource):
    """What is evaluated: items of this schema, with samples that are there or are asked for, by these criteria, which are graders."""

    name: EvalName | None = None
    item_schema: dict[str, Any]
    samples: bool = False
    criteria: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_GRADERS)]
    metadata: Metadata | None = None


class Eval(Resource):
    """An eval, and the versions of graders that its criteria are."""

    id: str
    given: NewEval
    graders: list[ChosenGrader]
    created_us: int
    updated_us: int


class EvalPage(Resource):
    """Some of them."""

    data: list[Eval]
    has_more: bool


class Given(Resource):
    """An item, and an answer to it where there is one already."""

    item: dict[str, Any]
    sample: dict[str, Any] | None = None


class NewRun(Resource):
    """What a run asks: of which rows, given or in a file, in which messages, and whom."""

    name: EvalName | None = None
    kind: SourceKind
    shown: dict[str, Any]
    """The data source as it was given, but for rows."""
    rows: list[Given] | None = None
    file: str | None = None
    template: list[dict[str, Any]] | None = None
    item_reference: str | None = None
    tools: list[dict[str, Any]] | None = None
    model: str | None = None
    """None: nobody, because the rows have their samples."""
    params: AnswerParams = AnswerParams()
    metadata: Metadata | None = None


class Counts(Resource):
    """Of answers that pass, fail, or came to nothing."""

    passed: int = 0
    failed: int = 0
    errored: int = 0


class EvalRun(Resource):
    """A run; `evaluation` has the same id."""

    id: str
    eval: str
    name: str
    shown: dict[str, Any]
    rows: list[Given] | None
    """Those that were given with it; None: they are those of a file."""
    model: str | None
    metadata: Metadata | None
    criteria: list[str]
    """Names."""
    evaluation: Evaluation
    counts: Counts
    of_criteria: list[Counts]
    prompt_tokens: int
    completion_tokens: int
    invocations: int


class EvalRunPage(Resource):
    """Some of them."""

    data: list[EvalRun]
    has_more: bool


class EvalItems(Resource):
    """Answers of a run with their scores, and what these are to: the names of its criteria, whom it asked, and the spec of its evaluation."""

    criteria: list[str]
    model: str | None
    spec: EvaluationSpec
    data: list[EvaluationItem]
    has_more: bool
