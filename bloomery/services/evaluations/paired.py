"""Two models' scores on the same rows, of one evaluation or of two: which rows differ, by how much, and whether that may be chance.

A row is the unit, as everywhere: several answers to it count as their mean. Rows of two evaluations are the same where both took them from one split
of one content, and scores are compared only where the same grader gave them.

Who pages through thousands of rows asks the same again and again, so what was compared last is remembered. It is found by what it was made of: to an
evaluation answers and scores are only ever added, and none once it has ended, so their numbers say whether it is still that.
"""

import asyncio
import json
import math
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row, func, select

from bloomery.services.access.principal import Principal
from bloomery.services.data.datasets import Datasets
from bloomery.services.data.stored_rows import Blob
from bloomery.services.evaluations.evaluation_rows import one_evaluation
from bloomery.services.evaluations.questions import Question, questions_of
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import InvalidInput, NotFound, shown
from bloomery.types.evaluations import EvaluationSpec, EvaluationState, Measured
from bloomery.types.paired import PairedRow, PairedRows, PairOrder, PairShow, SideOfPairs
from bloomery.types.resources import Split
from bloomery.types.statistics import difference_of, sign_test

_ASKED_CHARS: Final = 200
KEPT_ROWS: Final = 100_000
"""Of what is remembered: as many as an evaluation may have, which take some fifty megabytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairsWanted:
    """Whose rows, and which of them."""

    model: str | None = None
    """The first of the evaluation where there is none."""
    other: str | None = None
    """Beside it; None: nobody, unless there is an `against`."""
    against: str | None = None
    """The evaluation of `other`; None: the same."""
    grader: str | None = None
    """As results name it, or by its name alone; the first where there is none."""
    show: PairShow = "all"
    order: PairOrder = "apart"


class Pairs:
    """Shows them."""

    def __init__(self, database: Database, datasets: Datasets) -> None:
        self._database, self._datasets = database, datasets
        self._kept = Remembered(KEPT_ROWS)

    async def compare(self, p: Principal, evaluation: str, wanted: PairsWanted, *, limit: int = 50, offset: int = 0) -> PairedRows:
        """A page of rows, and what all come to."""
        p.require("read", "train")
        found = await self._database.read(lambda connection: _look(connection, p.project, evaluation, wanted))
        compared = self._kept.get(found.key(wanted))
        if compared is None:
            found, scores = await self._database.read(lambda connection: _look_whole(connection, p.project, evaluation, wanted))
            compared = await asyncio.to_thread(_compare, scores, wanted)
            self._kept.put(found.key(wanted), compared)
        blob = await self._datasets.blob(found.longest.rows_key)
        return await asyncio.to_thread(_page, found, compared, blob, limit, offset)


class Compared(NamedTuple):
    """All that two models have been compared by, and the rows that are shown of it, in their order."""

    figures: dict[str, Any]
    pairs: "list[_Pair]"


class Remembered:
    """What was compared last, of so many rows altogether."""

    def __init__(self, most_rows: int) -> None:
        self._most_rows, self._rows = most_rows, 0
        self._kept: OrderedDict[Hashable, Compared] = OrderedDict()

    def get(self, key: Hashable) -> Compared | None:
        """What was put under it, if it is still there."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: Hashable, compared: Compared) -> None:
        """Keep it, and forget what was asked for the longest ago where it is too much."""
        if (before := self._kept.pop(key, None)) is not None:
            self._rows -= _rows(before)
        self._kept[key] = compared
        self._rows += _rows(compared)
        while self._rows > self._most_rows:
            _, oldest = self._kept.popitem(last=False)
            self._rows -= _rows(oldest)


def _rows(compared: Compared) -> int:
    """Where none are shown there are figures."""
    return max(1, len(compared.pairs))


class _Answers(NamedTuple):
    """A model's answers to one row: their numbers, and the mean score of those that have one."""

    numbers: list[int]
    mean: float | None

    @classmethod
    def of(cls, scored: Sequence[tuple[int, float | None]]) -> "_Answers":
        scores = [score for _, score in scored if score is not None]
        return cls([number for number, _ in scored], math.fsum(scores) / len(scores) if scores else None)


class _Side(NamedTuple):
    row: Row[Any]
    """Of the evaluation."""
    shown: SideOfPairs
    models: int
    samples: int
    place: int
    """Of the model among these."""
    grader: int
    reached: tuple[int, int] | None
    """How many answers and scores of the evaluation there are; None where it has ended."""

    @property
    def key(self) -> Hashable:
        """What its scores are found by: the same as long as these are."""
        return self.row.id, self.place, self.grader, self.reached


_Scores = dict[int, _Answers]
"""By row."""


class _Found(NamedTuple):
    first: _Side
    other: _Side | None
    grader: str

    @property
    def longest(self) -> Row[Any]:
        """The evaluation that was asked more of the rows."""
        return max((side.row for side in self.sides), key=lambda row: row.rows)

    @property
    def sides(self) -> tuple[_Side, ...]:
        """One or two."""
        return (self.first,) if self.other is None else (self.first, self.other)

    def key(self, wanted: PairsWanted) -> Hashable:
        """The same as long as what comes of it is."""
        return tuple(side.key for side in self.sides), wanted.show, wanted.order


class _Pair(NamedTuple):
    row: int
    one: _Answers
    other: _Answers | None
    """None where there is no other model."""

    @property
    def difference(self) -> float | None:
        if self.other is None or self.one.mean is None or self.other.mean is None:
            return None
        return self.one.mean - self.other.mean


def _look(connection: Connection, project: str, evaluation: str, wanted: PairsWanted) -> _Found:
    row = one_evaluation(connection, project, evaluation)
    spec = EvaluationSpec.model_validate_json(row.spec)
    grader = _grader(spec, wanted.grader)
    first = _side(connection, row, spec, wanted.model or spec.models[0].model, grader)
    label = spec.graders[grader].label
    if wanted.other is None and wanted.against is None:
        return _Found(first, None, label)
    beside = row if wanted.against is None else one_evaluation(connection, project, wanted.against)
    if not _same_rows(row, beside):
        problem = f"evaluations `{row.name}` and `{beside.name}` were not asked the same rows"
        raise InvalidInput(f"{problem}: compare those of one split of one version of a data set", field="against")
    other_spec = EvaluationSpec.model_validate_json(beside.spec)
    same = [place for place, each in enumerate(json.loads(beside.graders)) if each == json.loads(row.graders)[grader]]
    if not same:
        raise InvalidInput(f"evaluation `{beside.name}` was not graded by `{label}`: name a grader that both have", field="grader")
    return _Found(first, _side(connection, beside, other_spec, wanted.other or other_spec.models[0].model, same[0], field="other"), label)


def _side(connection: Connection, row: Row[Any], spec: EvaluationSpec, model: str, grader: int, *, field: str = "model") -> _Side:
    names, samples = [each.model for each in spec.models], spec.params.samples
    if model not in names:
        known = ", ".join(f"`{name}`" for name in names)
        raise NotFound(f"model `{shown(model, 256)}` is not in evaluation `{spec.name}`: there are {known}", field=field)
    shown_as = SideOfPairs(evaluation=row.name, model=model)
    return _Side(row, shown_as, len(names), samples, names.index(model), grader, _reached(connection, row))


def _reached(connection: Connection, row: Row[Any]) -> tuple[int, int] | None:
    if EvaluationState(row.state).ended:
        return None
    tables = (rows.evaluation_answer, rows.evaluation_score)
    answers, scores = (select(func.count()).select_from(table).where(table.c.evaluation_id == row.id).scalar_subquery() for table in tables)
    answered, scored = connection.execute(select(answers, scores)).one()
    return answered, scored


def _look_whole(connection: Connection, project: str, evaluation: str, wanted: PairsWanted) -> tuple[_Found, list[_Scores]]:
    """The same, with the scores of each side as they are in this moment."""
    found = _look(connection, project, evaluation, wanted)
    return found, [_scores(connection, side) for side in found.sides]


def _scores(connection: Connection, side: _Side) -> _Scores:
    answer, score = rows.evaluation_answer.c, rows.evaluation_score.c
    said = (score.evaluation_id == answer.evaluation_id) & (score.number == answer.number) & (score.grader == side.grader)
    joined = rows.evaluation_answer.outerjoin(rows.evaluation_score, said)
    query = select(answer.number, score.score).select_from(joined).where(answer.evaluation_id == side.row.id)
    query = query.where(answer.number // side.samples % side.models == side.place).order_by(answer.number)
    scored: dict[int, list[tuple[int, float | None]]] = defaultdict(list)
    for number, value in connection.execute(query):
        scored[number // (side.samples * side.models)].append((number, value))
    return {place: _Answers.of(answers) for place, answers in scored.items()}


def _grader(spec: EvaluationSpec, wanted: str | None) -> int:
    if wanted is None:
        return 0
    places = [place for place, each in enumerate(spec.graders) if wanted in (each.label, each.grader)]
    if not places:
        known = ", ".join(f"`{each.label}`" for each in spec.graders)
        raise NotFound(f"grader `{shown(wanted)}` is not in evaluation `{spec.name}`: there are {known}", field="grader")
    return places[0]


def _same_rows(one: Row[Any], other: Row[Any]) -> bool:
    """Rows of OpenAI's evals are of no version, and each run has its own."""
    same_content = one.rows_key == other.rows_key or (one.manifest is not None and one.manifest == other.manifest)
    return same_content and bool(one.split == other.split)


def _compare(scores: Sequence[_Scores], wanted: PairsWanted) -> Compared:
    """Of one model or two. Thousands of rows take a while: not for the event loop."""
    pairs = _paired(*scores)
    shown = sorted((pair for pair in pairs if _is(pair, wanted.show)), key=lambda pair: _place(pair, wanted.order, alone=len(scores) == 1))
    return Compared(_figures(pairs), shown)


def _page(found: _Found, compared: Compared, blob: Blob, limit: int, offset: int) -> PairedRows:
    """`blob` has the rows of the evaluation that was asked more of them; reading them takes a while, too."""
    return PairedRows(
        first=found.first.shown,
        other=None if found.other is None else found.other.shown,
        grader=found.grader,
        **compared.figures,
        shown=len(compared.pairs),
        data=_asked(blob, found.longest, compared.pairs[offset : offset + limit]),
        offset=offset,
        has_more=len(compared.pairs) > offset + limit,
    )


def _paired(first: _Scores, other: _Scores | None = None) -> list[_Pair]:
    nothing = _Answers([], None)
    if other is None:
        return [_Pair(row, answers, None) for row, answers in first.items()]
    return [_Pair(row, first.get(row, nothing), other.get(row, nothing)) for row in sorted({*first, *other})]


def _is(pair: _Pair, show: PairShow) -> bool:
    difference = pair.difference
    if show == "all":
        return True
    if show == "unscored":
        return pair.one.mean is None or (pair.other is not None and pair.other.mean is None)
    if difference is None:
        return False
    return {"better": difference > 0, "worse": difference < 0, "alike": difference == 0, "differ": difference != 0}[show]


def _place(pair: _Pair, order: PairOrder, *, alone: bool) -> tuple[bool, float, int]:
    if order == "row":
        return False, 0.0, pair.row
    value = pair.one.mean if alone else pair.difference
    if value is None:
        return True, 0.0, pair.row
    if alone:
        return False, -value if order == "better" else value, pair.row
    return False, {"apart": -abs(value), "better": -value, "worse": value}[order], pair.row


def _figures(pairs: Sequence[_Pair]) -> dict[str, Any]:
    ones = [(pair.one.mean, pair.other.mean) for pair in pairs if pair.other is not None]
    both = [(one, other) for one, other in ones if one is not None and other is not None]
    wins, losses = sum(one > other for one, other in both), sum(one < other for one, other in both)
    figures = {"rows": len(both), "wins": wins, "losses": losses, "ties": len(both) - wins - losses}
    figures["unscored"] = sum(_is(pair, "unscored") for pair in pairs)
    if not both:
        return figures | {"difference": None, "interval": None, "p_value": None, "test": None}
    right_or_wrong = {score for pair in both for score in pair} <= {0.0, 1.0}
    difference = Measured.of(difference_of([other for _, other in both], [one for one, _ in both]))
    said = {"difference": difference, "p_value": sign_test(wins, losses), "test": "mcnemar" if right_or_wrong else "sign"}
    return figures | said | {"interval": None if difference.interval is None else "bonett_price" if right_or_wrong else "normal"}


def _asked(blob: Blob, evaluation: Row[Any], pairs: Sequence[_Pair]) -> list[PairedRow]:
    split: Split = evaluation.split
    return [
        PairedRow(
            row=pair.row,
            asked=_words(*questions_of(blob, split, evaluation.rows, start=pair.row, limit=1)),
            score=pair.one.mean,
            other_score=None if pair.other is None else pair.other.mean,
            difference=pair.difference,
            numbers=pair.one.numbers,
            other_numbers=[] if pair.other is None else pair.other.numbers,
        )
        for pair in pairs
    ]


def _words(question: Question) -> str:
    last = question.prompt if question.prompt is not None else question.messages[-1].get("content") if question.messages else ""
    text = last if isinstance(last, str) else "" if last is None else json.dumps(last)
    return " ".join(text.split())[:_ASKED_CHARS]
