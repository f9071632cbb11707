"""What was compared last is remembered while it is what there is, and in bounded memory."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import insert, select, update

from bloomery.services.evaluations.paired import Compared, Pairs, PairsWanted, Remembered
from bloomery.store import rows
from bloomery.types.datasets import ImportRows
from bloomery.types.evaluations import EvaluationSpec, EvaluationState
from tests.services.stage import ME, Stage, play

NOTHING = Compared({}, [])
SPEC = {"name": "at-work", "data": {"dataset": "data", "split": "eval"}, "models": ["tiny", "front"], "graders": ["right@1"]}


def compared(count: int) -> Compared:
    return Compared({"rows": count}, [NOTHING] * count)  # type: ignore[list-item]


def test_what_was_asked_for_the_longest_ago_is_forgotten_first() -> None:
    kept = Remembered(10)
    for name in "abc":
        kept.put(name, compared(3))
    assert kept.get("a") == compared(3)
    kept.put("d", compared(4))
    assert [name for name in "abcd" if kept.get(name)] == ["a", "c", "d"]
    kept.put("e", compared(11))
    assert [name for name in "abcde" if kept.get(name)] == []


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 12)), max_size=40))
def test_no_more_rows_are_kept_than_there_is_room_for(puts: list[tuple[str, int]]) -> None:
    kept, newest = Remembered(20), dict[str, int]()
    for name, count in puts:
        kept.put(name, compared(count))
        newest[name] = count
        there = {name: found for name in newest if (found := kept.get(name)) is not None}
        assert sum(max(1, len(found.pairs)) for found in there.values()) <= 20
        assert all(len(found.pairs) == newest[name] for name, found in there.items())
        assert name in there


def test_a_comparison_is_made_again_when_an_evaluation_at_work_has_another_answer_or_score(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        texts = "\n".join(json.dumps({"text": f"q{number}", "label": "a"}) for number in range(3))
        await stage.datasets.import_rows(ME, "data", ImportRows.model_validate({"format": "jsonl", "splits": {"eval": texts}}))
        key = await stage.database.read(lambda connection: connection.scalar(select(rows.dataset_version.c.key)))
        known = {"project": ME.project, "created_us": 1}
        made = {"id": "e", "name": "at-work", "spec": EvaluationSpec.model_validate(SPEC).model_dump_json(), "state": EvaluationState.RUNNING}
        made |= {"rows_key": key, "split": "eval", "rows": 3, "graders": '["hash"]', "updated_us": 1}
        await stage.database.write(lambda connection: connection.execute(insert(rows.evaluation), known | made))
        pairs = Pairs(stage.database, stage.datasets)

        async def answer(number: int) -> None:
            figures = {"number": number, "answer": "{}", "given": 1, "latency_us": 1, "prompt_tokens": 1, "completion_tokens": 1}
            await stage.database.write(lambda c: c.execute(insert(rows.evaluation_answer), known | {"evaluation_id": "e"} | figures))

        async def score(number: int, value: float) -> None:
            said = {"number": number, "grader": 0, "score": value, "result": "{}"}
            await stage.database.write(lambda c: c.execute(insert(rows.evaluation_score), known | {"evaluation_id": "e"} | said))

        async def found() -> tuple[int, int, int]:
            page = await pairs.compare(ME, "at-work", PairsWanted(other="front"))
            return page.shown, page.unscored, page.wins

        assert await found() == (0, 0, 0)
        await answer(0)
        await answer(1)
        assert await found() == (1, 1, 0)
        await score(0, 1.0)
        await score(1, 0.0)
        assert await found() == (1, 0, 1)
        await answer(2)
        assert await found() == (2, 1, 1)
        state = update(rows.evaluation).values(state=EvaluationState.SUCCEEDED)
        await stage.database.write(lambda connection: connection.execute(state))
        assert await found() == await found() == (2, 1, 1)

    play(tmp_path, story)
