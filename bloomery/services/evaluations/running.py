"""Whoever works at evaluations: in the background of the api process, until they have ended.

What is missing is found in the rows, page by page: an answer that is there is not asked for again, a score that is there is not given again. So an
evaluation whose process was killed goes on with the rest at the next start. Each has some questions in hand at a time, and each grader takes what has
been answered meanwhile together, because programs are graded cheapest that way. Samples are of the class that leaves the engine to production.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final, NamedTuple, Self, TypeVar

from sqlalchemy import Connection, Row, func, select

from bloomery.grade.grader import Grader, gathered
from bloomery.obs import background
from bloomery.services.access.principal import Principal
from bloomery.services.data.datasets import Datasets
from bloomery.services.data.stored_rows import Blob
from bloomery.services.evaluations.answering import Answers, Askable, answered, seed_of
from bloomery.services.evaluations.counts import counts_of, keep, uncounted
from bloomery.services.evaluations.evaluation_rows import Asked, models_of, place_of, put_answer, put_scores, switch
from bloomery.services.evaluations.evaluations import Evaluations
from bloomery.services.evaluations.questions import Question, questions_of
from bloomery.services.evaluations.results import FREE, AnswerFigures, GraderName, Named, ScoreFigures, summarise
from bloomery.services.grading.graders import Graders
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import BloomeryError, Conflict, Unavailable, reason
from bloomery.types.evaluations import Answered, EvaluatedModel, EvaluationResult, EvaluationSpec, EvaluationState
from bloomery.types.graders import GraderVersion, OutputRow
from bloomery.types.grading import GradeResult
from bloomery.types.ids import now_us
from bloomery.types.keys import Scope

log = logging.getLogger(__name__)

AT_ONCE: Final = 4
"""Evaluations that are worked at; of those that wait, the project with the fewest at work goes first, and one that has none waits for nobody's."""
QUESTIONS_AT_ONCE: Final = 32
"""Of one evaluation, in hand together."""
GRADED_AT_ONCE: Final = 64
"""Answers that a grader takes together at most."""
LOOK_AGAIN_S: Final = 30.0
"""After so long it looks although nobody said that anything changed, and begins again what the database kept from being stored."""
SCOPES: Final[frozenset[Scope]] = frozenset({"infer", "read", "train"})
_PAGE: Final = 128
"""Rows that are looked at together for what is missing of them."""
_GRADE_TRIES: Final = 3

T = TypeVar("T")


class Work(NamedTuple):
    """One evaluation, with all that it takes to work at it."""

    row: Row[Any]
    spec: EvaluationSpec
    p: Principal
    blob: Blob
    asked: list[Asked]
    models: list[Answers]
    versions: list[GraderVersion]
    graders: list[Grader]


class Task(NamedTuple):
    """One answer, and the graders whose score of it is missing, by their places; `answer` None: it is missing, too."""

    number: int
    question: Question
    answer: Answered | None
    missing: list[int]


class Evaluating:
    """Works while it is entered."""

    def __init__(self, database: Database, evaluations: Evaluations, datasets: Datasets, graders: Graders, askable: Askable) -> None:
        self._database, self._evaluations, self._datasets = database, evaluations, datasets
        self._graders, self._askable = graders, askable
        self._changed = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._still: set[str] = set()
        """Evaluations that wait for somebody who is away: others are worked at meanwhile."""
        self._uncountable: set[str] = set()
        """Evaluations that were tried in vain, while there are others to count."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self._evaluations.changed.calling(self._changed.set))
        await self._stack.enter_async_context(background.running(self._work(), "evaluations"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        await background.stop(*self._tasks.values())

    async def _work(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._begin_and_end()
                await self._count_next()
            except Exception:
                log.exception("evaluations are looked at again in %g s", LOOK_AGAIN_S)
            try:
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _begin_and_end(self) -> None:
        """Stop working at what is not running any more, and begin with what is or may be."""
        open_ = {row.id: row for row in await self._database.read(_running)}
        for name in [name for name, task in self._tasks.items() if task.done() or name not in open_]:
            await background.stop(self._tasks.pop(name))
        while (row := await self._next(full=len(open_.keys() - self._still) >= AT_ONCE)) is not None:
            open_[row.id] = row
        for name, row in open_.items():
            if name not in self._tasks:
                task = background.start(self._evaluate(row), f"evaluation {row.name}")
                task.add_done_callback(lambda _: self._changed.set())
                self._tasks[name] = task

    async def _count_next(self) -> None:
        """Have the numbers of one that has ended kept, if there is one, and look at once for the next, behind whatever else there is to do."""
        if (row := await self._database.read(lambda connection: uncounted(connection, self._uncountable))) is None:
            # What could not be counted is tried again at the next look.
            self._uncountable.clear()
            return
        try:
            # Not where they are written: to count a hundred thousand answers takes most of a second, for which nobody else could write.
            counted = await self._database.read(lambda connection: counts_of(connection, row))
            await self._database.write(lambda connection: keep(connection, row.id, counted))
        except Exception:
            log.exception("the answers of evaluation `%s` could not be counted: those of others are, and then these are tried again", row.name)
            self._uncountable.add(row.id)
        self._changed.set()

    async def _next(self, *, full: bool) -> Row[Any] | None:
        return await self._database.write(lambda connection: _begin_next(connection, full=full))

    async def _evaluate(self, row: Row[Any]) -> None:
        spec = EvaluationSpec.model_validate_json(row.spec)
        try:
            try:
                async with asyncio.timeout(spec.deadline_s - (now_us() - row.started_us) / 1e6):
                    work = await self._prepared(row, spec)
                    await self._until_nothing_is_missing(work)
            except TimeoutError:
                return await self._end(row, EvaluationState.FAILED, reason=f"it was not done within {spec.deadline_s:g} s: raise `deadline_s`")
            result = await self._result(work)
            if not any(model.answers for model in result.models):
                return await self._end(row, EvaluationState.FAILED, reason=await self._first_failure(row))
            await self._end(row, EvaluationState.SUCCEEDED, result=result.model_dump_json())
        except Unavailable:
            # The database, or whoever else it is, may be back soon: nothing that is stored is lost.
            log.exception("evaluation `%s` stands still, and is gone on with in %g s", row.name, LOOK_AGAIN_S)
            self._still.add(row.id)
            self._changed.set()
            try:
                await asyncio.sleep(LOOK_AGAIN_S)
            finally:
                self._still.discard(row.id)
        except BloomeryError as error:
            await self._end(row, EvaluationState.FAILED, reason=reason(error))
        except Exception as error:
            log.exception("evaluation `%s` failed", row.name)
            await self._end(row, EvaluationState.FAILED, reason=f"internal error ({type(error).__name__}); the api's log says more")

    async def _prepared(self, row: Row[Any], spec: EvaluationSpec) -> Work:
        p = Principal(row.project, row.id, SCOPES, patient=True)
        asked = await self._database.read(lambda connection: models_of(connection, row, spec))
        versions = [await self._graders.get(p, each.grader, each.version) for each in spec.graders]
        return Work(
            row=row,
            spec=spec,
            p=p,
            blob=await self._datasets.blob(row.rows_key),
            asked=asked,
            models=[self._askable.model(p, each, wanted.model) for each, wanted in zip(asked, spec.models, strict=True)],
            versions=versions,
            graders=[Grader.parse(each.spec) for each in versions],
        )

    async def _until_nothing_is_missing(self, work: Work) -> None:
        todo: asyncio.Queue[Task | None] = asyncio.Queue(QUESTIONS_AT_ONCE)
        said: list[asyncio.Queue[Task | None]] = [asyncio.Queue(4 * GRADED_AT_ONCE) for _ in work.graders]

        async def ask_all() -> None:
            await gathered([_fill(todo, self._missing(work)), *(self._ask(work, todo, said) for _ in range(QUESTIONS_AT_ONCE))])
            for queue in said:
                await queue.put(None)

        await gathered([ask_all(), *(self._grade(work, grader, queue) for grader, queue in enumerate(said))])

    async def _missing(self, work: Work) -> AsyncIterator[Task]:
        """In the order of their numbers."""
        of_row = len(work.models) * work.spec.params.samples
        for start in range(0, work.row.rows, _PAGE):
            questions = await asyncio.to_thread(questions_of, work.blob, work.row.split, work.row.rows, start=start, limit=_PAGE)
            first, last = start * of_row, (start + len(questions)) * of_row
            there = await self._database.read(partial(_there, evaluation=work.row.id, first=first, last=last))
            for number in range(first, last):
                known = there.get(number)
                missing = [grader for grader in range(len(work.graders)) if known is None or grader not in known.scored]
                if known is None or (missing and known.answer.error is None):
                    yield Task(number, questions[number // of_row - start], None if known is None else known.answer, missing)

    async def _ask(self, work: Work, todo: asyncio.Queue[Task | None], said: Sequence[asyncio.Queue[Task | None]]) -> None:
        while (task := await todo.get()) is not None:
            if task.answer is None:
                task = await self._asked(work, task)
            if task.answer is not None and task.answer.error is None:
                for grader in task.missing:
                    await said[grader].put(task)
        # For the next of those who ask.
        todo.put_nowait(None)

    async def _asked(self, work: Work, task: Task) -> Task:
        row, model, sample = place_of(task.number, len(work.models), work.spec.params.samples)
        answer = await answered(work.models[model], task.question, work.spec.params, seed_of(work.spec.params, row, sample))
        await self._database.write(lambda connection: put_answer(connection, work.row.project, work.row.id, task.number, answer))
        return task._replace(answer=answer)

    async def _grade(self, work: Work, grader: int, said: asyncio.Queue[Task | None]) -> None:
        while (first := await said.get()) is not None:
            together, last = [first], False
            while len(together) < GRADED_AT_ONCE and not said.empty():
                if (more := said.get_nowait()) is None:
                    last = True
                    break
                together.append(more)
            results = await self._graded(work, grader, [_output(task) for task in together])
            await self._keep(work, grader, [(task.number, result) for task, result in zip(together, results, strict=True)])
            if last:
                return

    async def _keep(self, work: Work, grader: int, results: Sequence[tuple[int, GradeResult]]) -> None:
        spec = work.graders[grader].spec
        await self._database.write(lambda connection: put_scores(connection, work.row.project, work.row.id, grader, spec, results))

    async def _graded(self, work: Work, grader: int, outputs: Sequence[OutputRow]) -> list[GradeResult]:
        """A grader whom nobody can ask for any row is raised. Rows that nobody could grade are tried again, and are no score in the end."""
        results: dict[int, GradeResult] = {}
        left = list(range(len(outputs)))
        for _ in range(_GRADE_TRIES):
            found = await self._tried(work, grader, [outputs[place] for place in left])
            results |= zip(left, found, strict=True)
            left = [place for place in left if (error := results[place].error) is not None and error.kind == "unavailable"]
            if not left:
                break
        return [results[place] for place in range(len(outputs))]

    async def _tried(self, work: Work, grader: int, outputs: Sequence[OutputRow]) -> list[GradeResult]:
        try:
            tried = await self._graders.attempt(work.p, work.versions[grader].spec, outputs)
            return [each.result for each in tried.graded]
        except BloomeryError as error:
            if error.category == "user":
                raise
            return [GradeResult.failed("unavailable", reason(error))] * len(outputs)

    async def _result(self, work: Work) -> EvaluationResult:
        models, samples = len(work.models), work.spec.params.samples
        answers, scores = await self._database.read(lambda connection: _figures(connection, work.row.id, models, samples))
        named = [_named(model, asked) for model, asked in zip(work.spec.models, work.asked, strict=True)]
        graders = [GraderName(chosen.label, version.hash) for chosen, version in zip(work.spec.graders, work.versions, strict=True)]
        return await asyncio.to_thread(summarise, named, graders, answers, scores)

    async def _first_failure(self, row: Row[Any]) -> str:
        table = rows.evaluation_answer.c
        query = select(table.answer).where(table.evaluation_id == row.id, table.given == 0).order_by(table.number).limit(1)
        error = Answered.model_validate_json(await self._database.read(lambda connection: connection.execute(query).scalar_one())).error
        return "no model gave any answer" + ("" if error is None else f": {error.kind}: {error.detail}")

    async def _end(self, row: Row[Any], state: EvaluationState, **values: Any) -> None:
        try:
            await self._database.write(lambda connection: switch(connection, row, state, **values))
        except Conflict:
            # Somebody has cancelled it meanwhile.
            log.info("evaluation `%s` ended otherwise", row.name)


class _There(NamedTuple):
    answer: Answered
    scored: frozenset[int]


def _running(connection: Connection) -> list[Row[Any]]:
    table = rows.evaluation.c
    return list(connection.execute(select(rows.evaluation).where(table.state == EvaluationState.RUNNING).order_by(table.created_us, table.id)))


def _begin_next(connection: Connection, *, full: bool) -> Row[Any] | None:
    """The one that waits the longest, of the project with the fewest at work; of one with none, where all places are taken."""
    table = rows.evaluation
    other = table.alias("other")
    same = (other.c.project == table.c.project) & (other.c.state == EvaluationState.RUNNING)
    at_work = select(func.count()).select_from(other).where(same).correlate(table).scalar_subquery()
    waiting = select(table).where(table.c.state == EvaluationState.QUEUED).order_by(at_work, table.c.created_us, table.c.id).limit(1)
    row = connection.execute(waiting.where(at_work == 0) if full else waiting).first()
    if row is None:
        return None
    switch(connection, row, EvaluationState.RUNNING, started_us=now_us())
    return connection.execute(select(table).where(table.c.id == row.id)).one()


def _there(connection: Connection, evaluation: str, first: int, last: int) -> dict[int, _There]:
    """What there is of the answers from one number to before another."""
    answer, score = rows.evaluation_answer.c, rows.evaluation_score.c
    scored: dict[int, set[int]] = {}
    query = select(score.number, score.grader).where(score.evaluation_id == evaluation, score.number >= first, score.number < last)
    for row in connection.execute(query):
        scored.setdefault(row.number, set()).add(row.grader)
    answers = select(answer.number, answer.answer).where(answer.evaluation_id == evaluation, answer.number >= first, answer.number < last)
    found = connection.execute(answers)
    return {row.number: _There(Answered.model_validate_json(row.answer), frozenset(scored.get(row.number, ()))) for row in found}


def _figures(connection: Connection, evaluation: str, models: int, samples: int) -> tuple[list[AnswerFigures], list[ScoreFigures]]:
    answer, score = rows.evaluation_answer.c, rows.evaluation_score.c
    columns = (answer.number, answer.given, answer.latency_us, answer.prompt_tokens, answer.completion_tokens)
    answers = []
    for row in connection.execute(select(*columns).where(answer.evaluation_id == evaluation).order_by(answer.number)):
        place = place_of(row.number, models, samples)
        figures = (bool(row.given), row.latency_us / 1e6, row.prompt_tokens, row.completion_tokens)
        answers.append(AnswerFigures(place.row, place.model, row.number, *figures))
    said = select(score.number, score.grader, score.score, score.passed, score.failure).where(score.evaluation_id == evaluation)
    scores = [
        ScoreFigures(row.number, row.grader, row.score, None if row.passed is None else bool(row.passed), row.failure)
        for row in connection.execute(said.order_by(score.number, score.grader))
    ]
    return answers, scores


def _named(model: EvaluatedModel, asked: Asked) -> Named:
    """Tokens of this server's own models are free, unless it was said what they cost."""
    free = None if asked.source == "endpoint" else FREE
    return Named(model.model, None if asked.target is None else asked.target.weights.version, model.price or free)


async def _fill(queue: asyncio.Queue[T | None], items: AsyncIterator[T]) -> None:
    """Behind the last of them stands None."""
    async for item in items:
        await queue.put(item)
    await queue.put(None)


def _output(task: Task) -> OutputRow:
    assert task.answer is not None, "only what was answered is graded"
    messages = [dict(message) for message in task.question.messages]
    return OutputRow(item=dict(task.question.item), output=task.answer.text, tools=task.answer.tools, messages=messages)
