"""What the answers of an evaluation came to in numbers: counted in one pass as its items are, and kept with it once it has ended."""

import asyncio
import json
from pathlib import Path
from typing import get_args

from sqlalchemy import Connection, Row, func, insert, select, update

from bloomery.services.evaluations.counts import Counted, OfGrader, Reached, counts_of, keep, reached, uncounted
from bloomery.services.evaluations.evaluations import of_status
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.evaluations import EvaluationState, ItemStatus
from tests.store.template import migrated

SAID: list[tuple[bool, list[tuple[float | None, bool | None] | None]]] = [
    (True, [(1.0, True), (1.0, True)]),
    (True, [(1.0, True), (0.0, False)]),
    (True, [(1.0, True), (0.5, None)]),
    (True, [(1.0, True), (None, None)]),
    (True, [(0.0, False), (None, None)]),
    (True, [(0.0, False), None]),
    (True, [None, None]),
    (False, [None, None]),
]
"""Whether an answer was given, and what two graders made of it: a score and whether it passes, or nothing yet."""


def add(connection: Connection, name: str, said: list[tuple[bool, list[tuple[float | None, bool | None] | None]]]) -> Row[tuple[object, ...]]:
    held = {"rows_key": "k", "split": "eval", "rows": len(said), "graders": json.dumps(["a", "b"]), "created_us": 1, "updated_us": 1}
    connection.execute(insert(rows.evaluation).values(id=name, project="p", name=name, spec="{}", state=EvaluationState.RUNNING, **held))
    known = {"project": "p", "evaluation_id": name, "created_us": 1}
    for number, (given, scores) in enumerate(said):
        figures = {"given": int(given), "latency_us": 1, "prompt_tokens": 3, "completion_tokens": number}
        connection.execute(insert(rows.evaluation_answer).values(**known, number=number, answer="{}", **figures))
        for grader, told in enumerate(scores):
            if told is not None:
                score, passed = told
                result = {"score": score, "passed": None if passed is None else int(passed), "result": "{}"}
                connection.execute(insert(rows.evaluation_score).values(**known, number=number, grader=grader, **result))
    return row_of(connection, name)


def row_of(connection: Connection, name: str) -> Row[tuple[object, ...]]:
    return connection.execute(select(rows.evaluation).where(rows.evaluation.c.id == name)).one()


def test_numbers_are_those_of_the_items_and_stay_when_it_has_ended(tmp_path: Path) -> None:
    def story(connection: Connection) -> None:
        row = add(connection, "mixed", SAID)
        add(connection, "other", SAID[:2])
        counted = counts_of(connection, row)
        assert counted == Counted(8, 7, 2, 1, 3, 24, sum(range(8)), (OfGrader(6, 4, 2), OfGrader(5, 1, 1)))
        for status in get_args(ItemStatus):
            items = select(func.count()).select_from(rows.evaluation_answer).where(rows.evaluation_answer.c.evaluation_id == "mixed")
            assert connection.execute(items.where(of_status(status, 2))).scalar_one() == getattr(counted, status)
        assert reached(connection, row) == Reached(8, 6 + 5 + 2)

        assert uncounted(connection) is None
        connection.execute(update(rows.evaluation).where(rows.evaluation.c.id == "mixed").values(state=EvaluationState.CANCELLED))
        ended = uncounted(connection)
        assert ended is not None
        assert ended.id == "mixed"
        keep(connection, ended.id, counts_of(connection, ended))
        assert uncounted(connection) is None
        # Nothing of its answers is looked at any more.
        connection.execute(rows.evaluation_answer.delete())
        connection.execute(rows.evaluation_score.delete())
        kept = row_of(connection, "mixed")
        assert (counts_of(connection, kept), reached(connection, kept)) == (counted, Reached(8, 6 + 5 + 2))

    play(tmp_path, story)


def test_one_that_has_no_answers_has_numbers_too(tmp_path: Path) -> None:
    def story(connection: Connection) -> None:
        row = add(connection, "empty", [])
        assert counts_of(connection, row) == Counted(of_graders=(OfGrader(), OfGrader()))
        assert reached(connection, row) == Reached(0, 0)
        # Somebody has deleted it meanwhile.
        keep(connection, "nobody", Counted())

    play(tmp_path, story)


def play(tmp_path: Path, story: object) -> None:
    with Database(migrated(tmp_path / "bloomery.db")) as database:
        asyncio.run(database.write(story))  # type: ignore[arg-type]
