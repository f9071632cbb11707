"""How far an evaluation is, and what its answers came to, in numbers.

They are counted while it is at work. Nothing is added to one that has ended, so its numbers are counted once more soon after that (`running`), and
stay with it: what is shown of many evaluations does not take longer by the answers that those have.
"""

import json
from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Row, case, func, select, update

from bloomery.store import rows
from bloomery.types.evaluations import EvaluationState


class OfGrader(msgspec.Struct, frozen=True):
    """What one grader said: of so many answers, some of which it passed or failed."""

    told: int = 0
    passed: int = 0
    failed: int = 0


class Counted(msgspec.Struct, frozen=True):
    """Answers that are there, those of them that were `given`, and what all graders together made of them (`ItemStatus`)."""

    answered: int = 0
    given: int = 0
    passed: int = 0
    failed: int = 0
    invalid: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    of_graders: tuple[OfGrader, ...] = ()
    """In their order."""


class Reached(NamedTuple):
    """Answers that are there, and scores that are there or will not come any more: what was not answered is scored by nobody."""

    answered: int
    scored: int


def counts_of(connection: Connection, row: Row[Any]) -> Counted:
    """Of an evaluation, by its row."""
    if row.counts is not None:
        return _kept(row)
    graders = len(json.loads(row.graders))
    said = _of_graders(connection, row.id)
    return Counted(**_of_answers(connection, row.id, graders), of_graders=tuple(said.get(place, OfGrader()) for place in range(graders)))


def reached(connection: Connection, row: Row[Any]) -> Reached:
    """The same of what people who wait ask again and again: of one at work it takes a small part of the time."""
    answer, score, graders = rows.evaluation_answer.c, rows.evaluation_score, len(json.loads(row.graders))
    if row.counts is not None:
        kept = _kept(row)
        return Reached(kept.answered, sum(each.told for each in kept.of_graders) + (kept.answered - kept.given) * graders)
    given = select(func.count(), func.coalesce(func.sum(1 - answer.given), 0)).where(answer.evaluation_id == row.id)
    answered, failed = connection.execute(given).one()
    scored = connection.execute(select(func.count()).select_from(score).where(score.c.evaluation_id == row.id)).scalar_one()
    return Reached(answered, scored + failed * graders)


def uncounted(connection: Connection, besides: Collection[str] = ()) -> Row[Any] | None:
    """An evaluation that has ended, and whose numbers are not kept yet; another one than `besides`."""
    table = rows.evaluation.c
    ended = [state for state in EvaluationState if state.ended]
    query = select(rows.evaluation).where(table.counts.is_(None), table.state.in_(ended), table.id.not_in(besides))
    return connection.execute(query.limit(1)).first()


def keep(connection: Connection, evaluation: str, counted: Counted) -> None:
    """With one that has ended. Somebody may have deleted it meanwhile."""
    values = {"counts": msgspec.json.encode(counted).decode()}
    connection.execute(update(rows.evaluation).where(rows.evaluation.c.id == evaluation).values(values))


def _kept(row: Row[Any]) -> Counted:
    return msgspec.json.decode(row.counts, type=Counted)


def _of_graders(connection: Connection, evaluation: str) -> dict[int, OfGrader]:
    score = rows.evaluation_score.c
    query = select(score.grader, func.count(), _times(score.passed == 1), _times(score.passed == 0)).where(score.evaluation_id == evaluation)
    return {place: OfGrader(told, passed, failed) for place, told, passed, failed in connection.execute(query.group_by(score.grader))}


def _of_answers(connection: Connection, evaluation: str, graders: int) -> dict[str, int]:
    """An answer whose scores are not all there yet has no status."""
    answer, score = rows.evaluation_answer.c, rows.evaluation_score.c
    told = select(score.number, func.count().label("told"), _times(score.score.is_(None)).label("none"), _times(score.passed == 0).label("failed"))
    said = told.where(score.evaluation_id == evaluation).group_by(score.number).subquery()
    of = {name: func.coalesce(said.c[name], 0) for name in ("told", "none", "failed")}
    invalid = (answer.given == 0) | (of["none"] > 0)
    whole = (of["told"] == graders) & ~invalid
    figures = {
        "answered": func.count(),
        "given": func.coalesce(func.sum(answer.given), 0),
        "passed": _times(whole & (of["failed"] == 0)),
        "failed": _times(whole & (of["failed"] > 0)),
        "invalid": _times(invalid),
        "prompt_tokens": func.coalesce(func.sum(answer.prompt_tokens), 0),
        "completion_tokens": func.coalesce(func.sum(answer.completion_tokens), 0),
    }
    joined = rows.evaluation_answer.outerjoin(said, said.c.number == answer.number)
    found = connection.execute(select(*figures.values()).select_from(joined).where(answer.evaluation_id == evaluation)).one()
    return dict(zip(figures, found, strict=True))


def _times(condition: Any) -> Any:
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)
