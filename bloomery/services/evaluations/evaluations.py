"""The verbs of evaluations.

An evaluation is checked whole before it is there: its rows, its models, its graders and what these ask of the rows. It stands on what never changes:
a version's rows, weights, graders by their numbers. So whoever works at it (`running`) needs nothing else, and it may be gone on with at any time.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, delete, exists, func, select

from bloomery.grade.declared import Spec
from bloomery.grade.grader import Grader
from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import Repeatable, answer_before, once
from bloomery.services.data.datasets import Datasets
from bloomery.services.data.stored_rows import Blob
from bloomery.services.evaluations.evaluation_rows import (
    Asked,
    NewEvaluation,
    add_evaluation,
    evaluation_of,
    one_evaluation,
    place_of,
    score_of,
    switch,
)
from bloomery.services.evaluations.questions import KINDS, check_references, questions_of
from bloomery.services.grading.endpoints import Endpoints, is_elsewhere
from bloomery.services.grading.graders import Graders
from bloomery.services.listeners import Listeners
from bloomery.services.serving.sampling import Sampling
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import Conflict, InvalidInput, NotFound, naming
from bloomery.types.evaluations import (
    MAX_ANSWERS,
    Answered,
    AnswerParams,
    EvaluatedModel,
    Evaluation,
    EvaluationItem,
    EvaluationItems,
    EvaluationResult,
    EvaluationSpec,
    EvaluationState,
    ItemStatus,
    Leaderboard,
    Placed,
)
from bloomery.types.graders import GraderVersion
from bloomery.types.ids import new_id
from bloomery.types.resources import Page, Split

_CHECKED_AT_ONCE: Final = 256
"""Rows that are looked through for columns in one go."""


class Evaluations:
    """Makes, shows and ends them; `changed` is told when there is one more to work at, or one less."""

    def __init__(self, database: Database, datasets: Datasets, graders: Graders, sampling: Sampling, endpoints: Endpoints) -> None:
        self._database, self._datasets, self._graders = database, datasets, graders
        self._sampling, self._endpoints = sampling, endpoints
        self.changed = Listeners()

    async def create(self, p: Principal, spec: EvaluationSpec, *, request: Repeatable | None = None) -> Evaluation:
        """One that waits for its turn. A `request` that comes again changes nothing and is answered what it was."""
        p.require("train")
        if (made := await answer_before(self._database, p, request, Evaluation)) is not None:
            return made
        new = await self._resolved(p, spec)
        made = await self._database.write(once(p, request, Evaluation, lambda connection: add_evaluation(connection, p.project, new)))
        self.changed.tell()
        return made

    async def get(self, p: Principal, evaluation: str) -> Evaluation:
        """One, by its id or name."""
        p.require("read", "train")
        return await self._database.read(lambda connection: evaluation_of(connection, one_evaluation(connection, p.project, evaluation)))

    async def list(self, p: Principal, *, state: EvaluationState | None = None, limit: int = 50, offset: int = 0) -> Page[Evaluation]:
        """Evaluations, newest first."""
        p.require("read", "train")
        table = rows.evaluation.c
        query = select(rows.evaluation).where(table.project == p.project).order_by(table.created_us.desc(), table.id.desc())
        if state is not None:
            query = query.where(table.state == state)

        def look(connection: Connection) -> Page[Evaluation]:
            found = connection.execute(query.limit(limit + 1).offset(offset)).all()
            return Page(data=[evaluation_of(connection, row) for row in found[:limit]], offset=offset, has_more=len(found) > limit)

        return await self._database.read(look)

    async def cancel(self, p: Principal, evaluation: str, *, request: Repeatable | None = None) -> Evaluation:
        """End one; what was answered and scored stays."""
        p.require("train")

        def change(connection: Connection) -> Evaluation:
            row = one_evaluation(connection, p.project, evaluation)
            switch(connection, row, EvaluationState.CANCELLED)
            return evaluation_of(connection, one_evaluation(connection, p.project, row.id))

        cancelled = await self._database.write(once(p, request, Evaluation, change))
        self.changed.tell()
        return cancelled

    async def delete(self, p: Principal, evaluation: str) -> None:
        """Forget one that has ended, with all its items."""
        p.require("train")

        def forget(connection: Connection) -> None:
            forget_evaluation(connection, one_evaluation(connection, p.project, evaluation))

        await self._database.write(forget)

    async def items(
        self,
        p: Principal,
        evaluation: str,
        *,
        after: int = -1,
        limit: int = 50,
        status: ItemStatus | None = None,
        model: str | None = None,
        newest_first: bool = False,
    ) -> EvaluationItems:
        """Answers that are there with their scores, in the order of rows, behind the number `after`; of one model alone, or of one status."""
        p.require("read", "train")

        def look(connection: Connection) -> _Looked:
            row = one_evaluation(connection, p.project, evaluation)
            spec = EvaluationSpec.model_validate_json(row.spec)
            answer, score = rows.evaluation_answer.c, rows.evaluation_score.c
            order = answer.number.desc() if newest_first else answer.number
            behind = answer.number < after if newest_first and after >= 0 else answer.number > after
            query = select(rows.evaluation_answer).where(answer.evaluation_id == row.id, behind).order_by(order)
            if status is not None:
                query = query.where(of_status(status, len(spec.graders)))
            if model is not None:
                query = query.where(_of_model(spec, model))
            answers = list(connection.execute(query.limit(limit + 1)))
            numbers = [each.number for each in answers[:limit]]
            scored = select(rows.evaluation_score).where(score.evaluation_id == row.id, score.number.in_(numbers))
            return _Looked(row, spec, answers[:limit], list(connection.execute(scored.order_by(score.number, score.grader))), len(answers) > limit)

        found = await self._database.read(look)
        blob = await self._datasets.blob(found.row.rows_key)
        return EvaluationItems(data=await asyncio.to_thread(_items, blob, found), has_more=found.has_more)

    async def leaderboard(
        self, p: Principal, dataset: str, grader: str, *, version: str | None = None, grader_version: int | None = None, split: Split = "eval"
    ) -> Leaderboard:
        """Models by what a grader said of their answers to the rows of a version, best first."""
        p.require("read", "train")
        chosen = await self._datasets.chosen(p, dataset, version, split)
        graded = await self._graders.get(p, grader, grader_version)
        table = rows.evaluation.c
        query = select(rows.evaluation).where(
            table.project == p.project, table.manifest == chosen.manifest, table.split == split, table.state == EvaluationState.SUCCEEDED
        )
        found = await self._database.read(lambda connection: connection.execute(query.order_by(table.finished_us.desc())).all())
        found = [row for row in found if graded.hash in json.loads(row.graders)]
        most = max((row.rows for row in found), default=0)
        placed = _placed([row for row in found if row.rows == most], graded)
        return Leaderboard(dataset=dataset, version=chosen.id, split=split, grader=f"{graded.name}@{graded.version}", rows=most, data=placed)

    async def _resolved(self, p: Principal, spec: EvaluationSpec) -> NewEvaluation:
        """The spec with nothing left open; what cannot be done is refused."""
        version = await self._datasets.chosen(p, spec.data.dataset, spec.data.version, spec.data.split)
        if version.kind not in KINDS:
            takes = ", ".join(f"`{kind}`" for kind in KINDS)
            raise InvalidInput(
                f"data set `{spec.data.dataset}` holds `{version.kind}` rows, and what is asked are rows of {takes}", field="data.dataset"
            )
        names = [each.model for each in spec.models]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InvalidInput(f"model `{twice}` is named twice: give it once, and more `samples` for more answers", field="models")
        models = [await self.asked(p, name, field=f"models.{place}.model") for place, name in enumerate(names)]
        graders = [await self._grader(p, each.grader, each.version, f"graders.{place}") for place, each in enumerate(spec.graders)]
        stored = await self._datasets.stored(p, spec.data.dataset, version.id)
        there = version.counts.get(f"{spec.data.split}.rows", 0)
        count = min(there, spec.data.rows or there)
        data = spec.data.model_copy(update={"version": version.id})
        priced = [self.priced(p, each, asked) for each, asked in zip(spec.models, models, strict=True)]
        chosen = [each.model_copy(update={"version": found.version}) for each, found in zip(spec.graders, graders, strict=True)]
        new = NewEvaluation(
            id=new_id("evaluation"),
            spec=spec.model_copy(update={"data": data, "graders": chosen, "models": priced}),
            models=models,
            graders=[each.hash for each in graders],
            manifest=version.manifest,
            rows_key=stored.blob.key,
            split=spec.data.split,
            rows=count,
        )
        await check_whole(new, stored.blob, {f"graders.{place}": Grader.parse(each.spec).spec for place, each in enumerate(graders)})
        return new

    async def asked(self, p: Principal, name: str, *, field: str) -> Asked:
        """Who answers as the model of this name; `field` is what called it so."""
        p.require("train")
        with naming(field, NotFound):
            if is_elsewhere(name):
                self._endpoints.named(p, name)
                return Asked("endpoint")
            return Asked("own", await self._sampling.resolve(p, name))

    def priced(self, p: Principal, model: EvaluatedModel, asked: Asked) -> EvaluatedModel:
        """With what its deployment or the configuration says that it costs, where nothing else was said."""
        p.require("train")
        if model.price is not None:
            return model
        told = asked.target.price if asked.target is not None else self._endpoints.named(p, model.model).price if is_elsewhere(model.model) else None
        return model.model_copy(update={"price": told})

    async def _grader(self, p: Principal, name: str, version: int | None, field: str) -> GraderVersion:
        with naming(field):
            found = await self._graders.get(p, name, version)
            await self._graders.require_models(p, found.models)
        return found


class _Looked(NamedTuple):
    """Some answers of an evaluation, whose `row` this is, and all scores of them."""

    row: Row[Any]
    spec: EvaluationSpec
    answers: Sequence[Row[Any]]
    scores: Sequence[Row[Any]]
    has_more: bool


async def check_whole(new: NewEvaluation, blob: Blob, graders: Mapping[str, Spec]) -> None:
    """Refuse what asks for too much, and graders, by their fields, that ask for columns which no row has."""
    if new.answers > MAX_ANSWERS:
        problem = f"{new.rows} rows, {len(new.models)} models and {new.spec.params.samples} samples make {new.answers} answers"
        raise InvalidInput(f"{problem}, and an evaluation has at most {MAX_ANSWERS}: take fewer `rows`", field="data.rows")
    starts = range(0, new.rows, _CHECKED_AT_ONCE)
    pages = (questions_of(blob, new.split, new.rows, start=start, limit=_CHECKED_AT_ONCE) for start in starts)
    await asyncio.to_thread(check_references, graders, (question for page in pages for question in page))


def forget_evaluation(connection: Connection, row: Row[Any]) -> None:
    """All rows of one that has ended."""
    if not EvaluationState(row.state).ended:
        raise Conflict(f"evaluation `{row.name}` {EvaluationState(row.state).words}: cancel it first", field="evaluation")
    for table in (rows.evaluation_score, rows.evaluation_answer, rows.evaluation_model, rows.openai_eval_run):
        connection.execute(delete(table).where(table.c.evaluation_id == row.id))
    connection.execute(delete(rows.evaluation).where(rows.evaluation.c.id == row.id))


def _items(blob: Blob, found: _Looked) -> list[EvaluationItem]:
    of_answers: dict[int, list[Row[Any]]] = {}
    for score in found.scores:
        of_answers.setdefault(score.number, []).append(score)
    return [_item(blob, found, answer, of_answers.get(answer.number, [])) for answer in found.answers]


def _item(blob: Blob, found: _Looked, answer: Row[Any], scores: Sequence[Row[Any]]) -> EvaluationItem:
    spec = found.spec
    place = place_of(answer.number, len(spec.models), spec.params.samples)
    (question,) = questions_of(blob, found.row.split, found.row.rows, start=place.row, limit=1)
    return EvaluationItem(
        number=answer.number,
        row=place.row,
        sample=place.sample,
        model=spec.models[place.model].model,
        messages=[dict(message) for message in question.messages],
        prompt=question.prompt,
        item=dict(question.item),
        answer=Answered.model_validate_json(answer.answer),
        scores=[score_of(each, spec) for each in scores],
        created_us=answer.created_us,
    )


def of_status(status: ItemStatus, graders: int) -> ColumnElement[bool]:
    """Answers of one of them, of an evaluation with so many graders; those whose scores are not all there yet are of none."""
    answer, score = rows.evaluation_answer.c, rows.evaluation_score.c
    mine = (score.evaluation_id == answer.evaluation_id) & (score.number == answer.number)
    failed = exists().where(mine, score.passed == 0)
    invalid = (answer.given == 0) | exists().where(mine, score.score.is_(None))
    if status == "invalid":
        return invalid
    scored = select(func.count()).select_from(rows.evaluation_score).where(mine).scalar_subquery()
    return (scored == graders) & ~invalid & (failed if status == "failed" else ~failed)


def _of_model(spec: EvaluationSpec, model: str) -> ColumnElement[bool]:
    names, samples = [each.model for each in spec.models], spec.params.samples
    if model not in names:
        known = ", ".join(f"`{name}`" for name in names)
        raise NotFound(f"model `{model}` is not in evaluation `{spec.name}`: there are {known}", field="model")
    return rows.evaluation_answer.c.number // samples % len(names) == names.index(model)


def _placed(found: Sequence[Row[Any]], grader: GraderVersion) -> list[Placed]:
    """The newest comes first in `found`, and of one version sampled in one way it alone counts."""
    lines: dict[tuple[str, AnswerParams], Placed] = {}
    for row in found:
        spec = EvaluationSpec.model_validate_json(row.spec)
        for summary in EvaluationResult.model_validate_json(row.result).models:
            mine = [each for each in summary.graders if each.hash == grader.hash]
            key = (summary.version or summary.model, spec.params.model_copy(update={"seed": 0}))
            if key not in lines:
                only = summary.model_copy(update={"graders": mine[:1]})
                lines[key] = Placed(place=0, evaluation=row.name, params=spec.params, summary=only, finished_us=row.finished_us)
    best = sorted(lines.values(), key=lambda line: -_mean(line))
    return [line.model_copy(update={"place": 1 + sum(_mean(other) > _mean(line) for other in best)}) for line in best]


def _mean(line: Placed) -> float:
    """Where nothing has a score, below all that have one."""
    mean = line.summary.graders[0].mean
    return float("-inf") if mean is None else mean.value
