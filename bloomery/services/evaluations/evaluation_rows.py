"""Rows of evaluations, as values, and the one place where an evaluation's state changes."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from sqlalchemy import Connection, Row, Select, insert, select, update

from bloomery.grade.declared import Spec
from bloomery.services.evaluations.counts import reached
from bloomery.services.held import require_kept
from bloomery.services.one_row import one_row
from bloomery.services.weights.target import Target
from bloomery.store import rows
from bloomery.types.errors import Conflict, shown
from bloomery.types.evaluations import (
    EVALUATION_NEXT,
    Answered,
    Evaluation,
    EvaluationProgress,
    EvaluationResult,
    EvaluationSpec,
    EvaluationState,
    Score,
)
from bloomery.types.generation import Weights
from bloomery.types.grading import GradeResult
from bloomery.types.ids import now_us
from bloomery.types.resources import Split

Source = Literal["own", "endpoint", "given"]


class Asked(NamedTuple):
    """Who answers as one of the models of an evaluation."""

    source: Source
    target: Target | None = None


class NewEvaluation(NamedTuple):
    """What makes one: a spec with nothing left open, and all that it stands on."""

    id: str
    spec: EvaluationSpec
    models: Sequence[Asked]
    graders: Sequence[str]
    """Hashes."""
    manifest: str | None
    rows_key: str
    split: Split
    rows: int

    @property
    def answers(self) -> int:
        """How many it asks for."""
        return self.rows * len(self.models) * self.spec.params.samples


class Place(NamedTuple):
    """What one answer of an evaluation is to."""

    row: int
    model: int
    sample: int


def place_of(number: int, models: int, samples: int) -> Place:
    """By its number: answers to one row are side by side."""
    rest, sample = divmod(number, samples)
    return Place(*divmod(rest, models), sample)


def passes(spec: Spec, score: float) -> bool | None:
    """Whether a grader passes what it gave this score; None where it does not say."""
    if spec.pass_threshold is not None:
        return score >= spec.pass_threshold
    return score >= 1 if spec.type in ("string_check", "label_model") else None


def named(project: str, name: str) -> Select[Any]:
    """The evaluation of a project with this id or name."""
    return select(rows.evaluation).where(rows.evaluation.c.project == project, (rows.evaluation.c.id == name) | (rows.evaluation.c.name == name))


def one_evaluation(connection: Connection, project: str, name: str) -> Row[Any]:
    """The same; NotFound where there is none."""
    return one_row(connection, named(project, name), f"evaluation `{shown(name)}`", field="evaluation")


def add_evaluation(connection: Connection, project: str, new: NewEvaluation) -> Evaluation:
    """Insert one that waits; the weights of its models are held from here on."""
    if connection.execute(named(project, new.spec.name)).first() is not None:
        raise Conflict(f"there is an evaluation `{new.spec.name}` already: choose another name", field="name")
    for asked in new.models:
        if asked.target is not None:
            require_kept(connection, asked.target.weights.key)
    now = now_us()
    values = {"id": new.id, "project": project, "name": new.spec.name, "spec": new.spec.model_dump_json(), "state": EvaluationState.QUEUED}
    held = {"manifest": new.manifest, "rows_key": new.rows_key, "split": new.split, "rows": new.rows, "graders": json.dumps(list(new.graders))}
    connection.execute(insert(rows.evaluation).values(**values, **held, created_us=now, updated_us=now))
    connection.execute(insert(rows.evaluation_model), [_model(project, new.id, place, asked) for place, asked in enumerate(new.models)])
    return evaluation_of(connection, one_evaluation(connection, project, new.id))


def evaluation_of(connection: Connection, row: Row[Any]) -> Evaluation:
    """As `/api/v1` shows it."""
    spec = EvaluationSpec.model_validate_json(row.spec)
    models = connection.execute(_models(row.id)).all()
    so_far, asked = reached(connection, row), row.rows * len(models) * spec.params.samples
    return Evaluation(
        id=row.id,
        spec=spec,
        versions=[model.version for model in models],
        rows=row.rows,
        state=EvaluationState(row.state),
        reason=row.reason,
        progress=EvaluationProgress(answers=asked, answered=so_far.answered, scores=asked * len(spec.graders), scored=so_far.scored),
        result=None if row.result is None else EvaluationResult.model_validate_json(row.result),
        created_us=row.created_us,
        updated_us=row.updated_us,
        started_us=row.started_us,
        finished_us=row.finished_us,
    )


def models_of(connection: Connection, row: Row[Any], spec: EvaluationSpec) -> list[Asked]:
    """Who answers, in their order."""
    found = connection.execute(_models(row.id)).all()
    return [_asked(model, wanted.model) for model, wanted in zip(found, spec.models, strict=True)]


def switch(connection: Connection, row: Row[Any], state: EvaluationState, **values: Any) -> None:
    """Change an evaluation's state, by compare-and-swap; one that has ended holds no weights any more."""
    before = EvaluationState(row.state)
    if state not in EVALUATION_NEXT[before]:
        raise Conflict(f"evaluation `{row.name}` {before.words}, and cannot be {state} after that")
    now = now_us()
    changed = {"state": state, "updated_us": now, **values} | ({"finished_us": now} if state.ended else {})
    if not rows.changed(connection, update(rows.evaluation).where(rows.evaluation.c.id == row.id, rows.evaluation.c.state == before).values(changed)):
        raise Conflict(f"evaluation `{row.name}` was changed meanwhile: look at it again")
    if state.ended:
        connection.execute(update(rows.evaluation_model).where(rows.evaluation_model.c.evaluation_id == row.id).values(key=""))


def put_answer(connection: Connection, project: str, evaluation: str, number: int, said: Answered) -> None:
    """Keep what was answered."""
    _require_running(connection, evaluation)
    values = {"project": project, "evaluation_id": evaluation, "number": number, "answer": said.model_dump_json(), "given": int(said.error is None)}
    figures = {"latency_us": round(said.latency_s * 1e6), "prompt_tokens": said.prompt_tokens, "completion_tokens": said.completion_tokens}
    connection.execute(insert(rows.evaluation_answer).values(**values, **figures, created_us=now_us()))


def put_scores(connection: Connection, project: str, evaluation: str, grader: int, spec: Spec, results: Iterable[tuple[int, GradeResult]]) -> None:
    """Keep what one grader said of some answers, by their numbers."""
    _require_running(connection, evaluation)
    now = now_us()
    values = [
        {
            "project": project,
            "evaluation_id": evaluation,
            "number": number,
            "grader": grader,
            "score": result.score,
            "passed": None if result.score is None or (passed := passes(spec, result.score)) is None else int(passed),
            "failure": None if result.error is None else result.error.kind,
            "result": result.model_dump_json(),
            "created_us": now,
        }
        for number, result in results
    ]
    connection.execute(insert(rows.evaluation_score), values)


def _require_running(connection: Connection, evaluation: str) -> None:
    """Of one that was cancelled and forgotten meanwhile, nothing would ever be deleted again."""
    if connection.scalar(select(rows.evaluation.c.state).where(rows.evaluation.c.id == evaluation)) != EvaluationState.RUNNING:
        raise Conflict(f"evaluation `{evaluation}` has ended: nothing more of it is kept")


def score_of(row: Row[Any], spec: EvaluationSpec) -> Score:
    """As it is shown."""
    passed = None if row.passed is None else bool(row.passed)
    return Score(grader=spec.graders[row.grader].label, result=GradeResult.model_validate_json(row.result), passed=passed)


def _models(evaluation: str) -> Select[Any]:
    return select(rows.evaluation_model).where(rows.evaluation_model.c.evaluation_id == evaluation).order_by(rows.evaluation_model.c.place)


def _model(project: str, evaluation: str, place: int, asked: Asked) -> dict[str, Any]:
    values: dict[str, Any] = {"project": project, "evaluation_id": evaluation, "place": place, "source": asked.source}
    if asked.target is None:
        return values | {"base_hash": None, "version": None, "key": ""}
    weights = asked.target.weights
    return values | {"base_hash": asked.target.base_hash, "version": weights.version, "key": weights.key or ""}


def _asked(row: Row[Any], name: str) -> Asked:
    if row.source != "own":
        return Asked(row.source)
    return Asked("own", Target(Weights(version=row.version, key=row.key or None), row.base_hash, None, None, name))
