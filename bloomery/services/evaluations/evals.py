"""Evals of OpenAI's contract: criteria become versions of graders, and a run becomes an evaluation of rows of its own.

The evaluation has the id of its run, and `Evaluations` shows it as any other. Its rows are a blob, so that neither a file nor the eval's later name
matters to it.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row, Select, delete, insert, select, tuple_, update

from bloomery.disk.mapped import mapped_file, nameless_file
from bloomery.grade.declared import LabelModel, Spec, StringCheck, middle
from bloomery.grade.grader import Grader
from bloomery.services.access.principal import Principal
from bloomery.services.data.datasets import Datasets
from bloomery.services.data.files import Files
from bloomery.services.data.row import Row as DataRow
from bloomery.services.data.row_files import LONGEST_ROW
from bloomery.services.data.stored_rows import Blob, write_blob
from bloomery.services.evaluations.counts import counts_of
from bloomery.services.evaluations.evaluation_rows import Asked, NewEvaluation, add_evaluation, evaluation_of, switch
from bloomery.services.evaluations.evaluations import Evaluations, check_whole, forget_evaluation
from bloomery.services.evaluations.items import Asking, check_columns, check_item, read_lines
from bloomery.services.evaluations.questions import GIVEN, PROBLEM, references
from bloomery.services.grading.graders import Graders
from bloomery.services.one_row import one_row
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs
from bloomery.store.database import Database
from bloomery.types.errors import InvalidInput, NotFound, naming, shown
from bloomery.types.evals import Counts, Eval, EvalItems, EvalPage, EvalRun, EvalRunPage, Given, Metadata, NewEval, NewRun
from bloomery.types.evaluations import (
    MAX_ANSWERS,
    ChosenGrader,
    EvaluatedModel,
    EvaluationData,
    EvaluationSpec,
    EvaluationState,
    ItemStatus,
)
from bloomery.types.graders import CreateGrader, GraderVersion
from bloomery.types.ids import new_id, now_us
from bloomery.types.resources import Split

SPLIT: Final[Split] = "eval"
NOBODY: Final = "sample"
"""What the evaluation of rows that have their samples calls who answered."""
CRITERIA: Final = "testing_criteria"


class _Criterion(NamedTuple):
    name: str
    field: str
    spec: Spec


class Evals:
    """Makes and shows them, and their runs."""

    def __init__(self, database: Database, blobs: AsyncBlobs, datasets: Datasets, files: Files, graders: Graders, evaluations: Evaluations) -> None:
        self._database, self._blobs, self._datasets, self._files = database, blobs, datasets, files
        self._graders, self._evaluations = graders, evaluations

    async def create(self, p: Principal, given: NewEval) -> Eval:
        """One without runs. Criteria that are no graders, or ask for columns that the schema has not, are refused."""
        p.require("train")
        criteria = _criteria(given)
        versions = [await self._version(p, each) for each in criteria]
        graders = [ChosenGrader(grader=each.name, version=each.version) for each in versions]
        now = now_us()
        made = Eval(id=new_id("eval"), given=given, graders=graders, created_us=now, updated_us=now)
        values = {"id": made.id, "project": p.project, "given": given.model_dump_json(), "created_us": now, "updated_us": now}
        listed = json.dumps([each.model_dump() for each in graders])
        await self._database.write(lambda connection: connection.execute(insert(rows.openai_eval).values(**values, graders=listed)))
        return made

    async def get(self, p: Principal, eval_: str) -> Eval:
        """One eval."""
        p.require("read", "train")
        return await self._database.read(lambda connection: _eval(_one(connection, p, eval_)))

    async def list(self, p: Principal, *, after: str | None = None, limit: int = 20, newest_first: bool = False, by_update: bool = False) -> EvalPage:
        """Evals, behind the one that is called `after`."""
        p.require("read", "train")
        table = rows.openai_eval.c
        place = tuple_(table.updated_us if by_update else table.created_us, table.id)

        def look(connection: Connection) -> list[Row[Any]]:
            query = select(rows.openai_eval).where(table.project == p.project)
            if after is not None:
                last = _one(connection, p, after, field="after")
                at = (last.updated_us if by_update else last.created_us, last.id)
                query = query.where(place < at if newest_first else place > at)
            ordered = [each.desc() if newest_first else each for each in place.clauses]
            return list(connection.execute(query.order_by(*ordered).limit(limit + 1)))

        found = await self._database.read(look)
        return EvalPage(data=[_eval(row) for row in found[:limit]], has_more=len(found) > limit)

    async def change(self, p: Principal, eval_: str, *, name: str | None, metadata: Metadata | None) -> Eval:
        """Another name, other metadata, or both; None leaves what there is."""
        p.require("train")
        changes = {field: value for field, value in (("name", name), ("metadata", metadata)) if value is not None}

        def change(connection: Connection) -> Eval:
            row = _one(connection, p, eval_)
            given = NewEval.model_validate_json(row.given).model_copy(update=changes)
            mine = rows.openai_eval.c.id == row.id
            connection.execute(update(rows.openai_eval).where(mine).values(given=given.model_dump_json(), updated_us=now_us()))
            return _eval(_one(connection, p, eval_))

        return await self._database.write(change)

    async def delete(self, p: Principal, eval_: str) -> None:
        """Forget one with its runs, which must have ended."""
        p.require("train")

        def forget(connection: Connection) -> None:
            row = _one(connection, p, eval_)
            for run in connection.execute(_runs(p, row.id)).all():
                forget_evaluation(connection, run)
            connection.execute(delete(rows.openai_eval).where(rows.openai_eval.c.id == row.id))

        await self._database.write(forget)

    async def run(self, p: Principal, eval_: str, given: NewRun) -> EvalRun:
        """A run, which waits for its turn. All that can be refused is refused before anything is made."""
        p.require("train")
        found = await self.get(p, eval_)
        asking = Asking(given)
        check_columns(asking.references, found.given.item_schema)
        model, asked = await self._asked(p, given)
        versions = [await self._graders.get(p, each.grader, each.version) for each in found.graders]
        for place, version in enumerate(versions):
            with naming(f"{CRITERIA}.{place}"):
                await self._graders.require_models(p, version.models)
        made = await self._stored(p, found, given, asking)
        run_id = new_id("evalrun")
        spec = EvaluationSpec(
            name=run_id, data=EvaluationData(dataset=found.id, split=SPLIT), models=[model], graders=found.graders, params=given.params
        )
        new = NewEvaluation(run_id, spec, [asked], [each.hash for each in versions], None, made.key, SPLIT, made.stored.count(SPLIT))
        criteria = {each.field: each.spec for each in _criteria(found.given)}
        await check_whole(new, made, criteria)
        values = {"evaluation_id": run_id, "project": p.project, "eval_id": found.id, "gives_rows": int(given.rows is not None)}
        kept = given.model_copy(update={"rows": None}).model_dump_json()

        def add(connection: Connection) -> None:
            # It may have been deleted meanwhile.
            _one(connection, p, eval_)
            add_evaluation(connection, p.project, new)
            connection.execute(insert(rows.openai_eval_run).values(**values, asked=kept))

        await self._database.write(add)
        self._evaluations.changed.tell()
        return await self.get_run(p, eval_, run_id)

    async def get_run(self, p: Principal, eval_: str, run: str) -> EvalRun:
        """One run of an eval."""
        p.require("read", "train")
        looked = await self._database.read(lambda connection: _look(connection, _one(connection, p, eval_), _one_run(connection, p, eval_, run)))
        return await self._shown(looked)

    async def list_runs(
        self, p: Principal, eval_: str, *, after: str | None = None, limit: int = 20, newest_first: bool = False, state: EvaluationState | None = None
    ) -> EvalRunPage:
        """Runs of an eval, behind the one that is called `after`."""
        p.require("read", "train")
        identity = rows.evaluation.c.id

        def look(connection: Connection) -> tuple[list[_Looked], bool]:
            row = _one(connection, p, eval_)
            query = _runs(p, row.id).order_by(identity.desc() if newest_first else identity)
            if state is not None:
                query = query.where(rows.evaluation.c.state == state)
            if after is not None:
                last = _one_run(connection, p, eval_, after, field="after").id
                query = query.where(identity < last if newest_first else identity > last)
            found = connection.execute(query.limit(limit + 1)).all()
            return [_look(connection, row, each) for each in found[:limit]], len(found) > limit

        found, has_more = await self._database.read(look)
        return EvalRunPage(data=[await self._shown(each) for each in found], has_more=has_more)

    async def cancel_run(self, p: Principal, eval_: str, run: str) -> EvalRun:
        """End it; what was answered and scored stays."""
        p.require("train")
        await self._database.write(lambda connection: switch(connection, _one_run(connection, p, eval_, run), EvaluationState.CANCELLED))
        self._evaluations.changed.tell()
        return await self.get_run(p, eval_, run)

    async def delete_run(self, p: Principal, eval_: str, run: str) -> None:
        """Forget one that has ended."""
        p.require("train")
        await self._database.write(lambda connection: forget_evaluation(connection, _one_run(connection, p, eval_, run)))

    async def items(
        self, p: Principal, eval_: str, run: str, *, after: int = -1, limit: int = 20, newest_first: bool = False, status: ItemStatus | None = None
    ) -> EvalItems:
        """Answers of a run that are there, with their scores."""
        p.require("read", "train")
        row, given = await self._database.read(lambda connection: (_one_run(connection, p, eval_, run), _eval(_one(connection, p, eval_)).given))
        found = await self._evaluations.items(p, row.id, after=after, limit=limit, newest_first=newest_first, status=status)
        spec, model = EvaluationSpec.model_validate_json(row.spec), NewRun.model_validate_json(row.asked).model
        return EvalItems(criteria=_names(given), model=model, spec=spec, data=found.data, has_more=found.has_more)

    async def item(self, p: Principal, eval_: str, run: str, number: int) -> EvalItems:
        """One of them."""
        p.require("read", "train")
        found = await self.items(p, eval_, run, after=number - 1, limit=1)
        if not found.data or found.data[0].number != number:
            raise NotFound(f"no output item {number} of run `{shown(run)}`", field="output_item")
        return found

    async def _version(self, p: Principal, criterion: _Criterion) -> GraderVersion:
        grader = Grader(criterion.spec)
        return await self._graders.create(p, CreateGrader(name=f"grader-{grader.hash[:32]}", spec=grader.canonical))

    async def _asked(self, p: Principal, given: NewRun) -> tuple[EvaluatedModel, Asked]:
        if given.model is None:
            return EvaluatedModel(model=NOBODY), Asked("given")
        asked = await self._evaluations.asked(p, given.model, field="data_source.model")
        return self._evaluations.priced(p, EvaluatedModel(model=given.model), asked), asked

    async def _stored(self, p: Principal, found: Eval, given: NewRun, asking: Asking) -> Blob:
        """The rows of a run, in a blob."""
        if given.file is None:
            source, field = iter(given.rows or ()), "data_source.source.content"
        else:
            content = await self._files.content(p, given.file, field="data_source.source.id")
            source, field = read_lines(_lines(content.pieces())), "data_source.source.id"
        key = await asyncio.to_thread(self._write, source, found, asking, field)
        return await self._datasets.blob(key)

    def _write(self, source: Iterator[Given], found: Eval, asking: Asking, field: str) -> str:
        count, first = 0, None

        def made() -> Iterator[DataRow]:
            nonlocal count, first
            for place, given in enumerate(source):
                if place == MAX_ANSWERS:
                    raise InvalidInput(f"`{field}` has more than {MAX_ANSWERS} items, which is the most of a run", field=field)
                check_item(given.item, found.given.item_schema, f"{field}.{place}.item")
                if found.given.samples and not asking.asks and given.sample is None:
                    raise InvalidInput(f"`{field}.{place}` has no `sample`, and nobody is asked for one: give it, or a `model`", field=field)
                row = asking.row(given)
                first = first or row.rest.get(PROBLEM)
                count += PROBLEM not in row.rest
                yield row

        with nameless_file(self._datasets.scratch) as file:
            written = write_blob({SPLIT: made()}, file)
            if not written.items:
                raise InvalidInput(f"`{field}` has no items: give one at least", field=field)
            if not count:
                raise InvalidInput(f"no item can be asked: {first}", field="data_source.input_messages")
            key = f"evaluations/{written.content}.jsonl.zst"
            self._blobs.blobs.put(key, mapped_file(file))
        return key

    async def _shown(self, looked: "_Looked") -> EvalRun:
        if not looked.gives_rows:
            return looked.run
        blob = await self._datasets.blob(looked.rows_key)
        return looked.run.model_copy(update={"rows": await asyncio.to_thread(lambda: [_given(row) for row in blob.stored.rows(SPLIT)])})


class _Looked(NamedTuple):
    run: EvalRun
    gives_rows: bool
    rows_key: str


def _criteria(given: NewEval) -> list[_Criterion]:
    """Graders under names of their own, each of which says what passes."""
    found: dict[str, _Criterion] = {}
    for place, criterion in enumerate(given.criteria):
        field = f"{CRITERIA}.{place}"
        spec = Grader.parse(criterion, field=field).spec
        if not spec.name or spec.name in found:
            problem = "is missing: results go by it" if not spec.name else f"`{shown(spec.name)}` is that of another criterion, too: rename one"
            raise InvalidInput(f"`{field}.name` {problem}", field=f"{field}.name")
        asked = list(references(spec))
        check_columns([(field, reference) for reference in asked], given.item_schema)
        if not given.samples and any(reference.namespace == "sample" for reference in asked):
            problem = "there is no `sample` in this eval: give `include_sample_schema` in its `data_source_config`"
            raise InvalidInput(f"`{field}`: {problem}", field=field)
        found[spec.name] = _Criterion(spec.name, field, spec.model_copy(update={"pass_threshold": _threshold(spec)}))
    return list(found.values())


def _names(given: NewEval) -> list[str]:
    """Of its criteria."""
    return [str(each["name"]) for each in given.criteria]


def _threshold(spec: Spec) -> float | None:
    """Of checks and labels it is known what passes."""
    return spec.pass_threshold if spec.pass_threshold is not None or isinstance(spec, StringCheck | LabelModel) else middle(spec)


def _one(connection: Connection, p: Principal, eval_: str, *, field: str = "eval_id") -> Row[Any]:
    table = rows.openai_eval.c
    return one_row(connection, select(rows.openai_eval).where(table.project == p.project, table.id == eval_), f"eval `{shown(eval_)}`", field=field)


def _eval(row: Row[Any]) -> Eval:
    graders = [ChosenGrader.model_validate(each) for each in json.loads(row.graders)]
    return Eval(id=row.id, given=NewEval.model_validate_json(row.given), graders=graders, created_us=row.created_us, updated_us=row.updated_us)


def _runs(p: Principal, eval_: str) -> Select[Any]:
    joined = rows.evaluation.join(rows.openai_eval_run, rows.openai_eval_run.c.evaluation_id == rows.evaluation.c.id)
    columns = (rows.evaluation, rows.openai_eval_run.c.asked, rows.openai_eval_run.c.gives_rows)
    return select(*columns).select_from(joined).where(rows.evaluation.c.project == p.project, rows.openai_eval_run.c.eval_id == eval_)


def _one_run(connection: Connection, p: Principal, eval_: str, run: str, *, field: str = "run_id") -> Row[Any]:
    _one(connection, p, eval_)
    return one_row(connection, _runs(p, eval_).where(rows.evaluation.c.id == run), f"run `{shown(run)}` of eval `{shown(eval_)}`", field=field)


def _look(connection: Connection, of: Row[Any], row: Row[Any]) -> _Looked:
    """A run of an eval without its rows."""
    given, asked = _eval(of).given, NewRun.model_validate_json(row.asked)
    counted = counts_of(connection, row)
    run = EvalRun(
        id=row.id,
        eval=of.id,
        name=asked.name or row.id,
        shown=asked.shown,
        rows=None,
        model=asked.model,
        metadata=asked.metadata,
        criteria=_names(given),
        evaluation=evaluation_of(connection, row),
        counts=Counts(passed=counted.passed, failed=counted.failed, errored=counted.invalid),
        of_criteria=[Counts(passed=each.passed, failed=each.failed, errored=each.told - each.passed - each.failed) for each in counted.of_graders],
        prompt_tokens=counted.prompt_tokens,
        completion_tokens=counted.completion_tokens,
        invocations=counted.given,
    )
    return _Looked(run, bool(row.gives_rows), row.rows_key)


def _given(row: DataRow) -> Given:
    return Given(item=row.rest["item"], sample=row.rest.get(GIVEN))


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Of one that is too long as much as shows it, and then nothing more."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
        if len(rest) > LONGEST_ROW:
            break
    yield rest
