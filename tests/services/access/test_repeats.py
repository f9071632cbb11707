"""How long requests are known, and what of them."""

from pathlib import Path

import pytest
from sqlalchemy import Connection, func, select, update

from bloomery.services.access.repeats import KEPT_S, LARGEST_ANSWER, Repeatable, once
from bloomery.store import rows
from bloomery.types.datasets import Dataset
from bloomery.types.errors import Conflict
from bloomery.types.ids import now_us
from bloomery.types.resources import Feedback, GiveFeedback
from tests.services.stage import ME, Stage, chat, play


def test_a_request_is_known_for_a_day_and_forgotten_then(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async def promote() -> int:
            return (await stage.deployments.promote(ME, "router", "tiny", {}, request=Repeatable("mine", "hash"))).live.number

        await stage.deployments.create(ME, "router", "tiny", {})
        assert [await promote(), await promote()] == [2, 2]
        await age(stage, KEPT_S - 60)
        assert await promote() == 2
        await age(stage, KEPT_S + 60)
        assert [await promote(), await promote()] == [3, 3]
        await age(stage, KEPT_S - 60)
        await stage.garbage.expire()
        assert await known(stage) == 1
        await age(stage, KEPT_S + 60)
        await stage.garbage.expire()
        assert await known(stage) == 0

    play(tmp_path, story)


def test_of_a_long_answer_it_is_known_that_it_was_given(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        made = Dataset(id="d", name="x" * LARGEST_ANSWER, versions=[], created_us=1)
        changes: list[Connection] = []

        def change(connection: Connection) -> Dataset:
            changes.append(connection)
            return made

        assert await stage.database.write(once(ME, Repeatable("mine", "hash"), Dataset, change)) == made
        with pytest.raises(Conflict, match="was done, and the answer is over the 262144 characters that are kept: look at it with a GET"):
            await stage.database.write(once(ME, Repeatable("mine", "hash"), Dataset, change))
        assert len(changes) == 1

    play(tmp_path, story)


def test_of_an_answer_that_another_release_stored_it_is_known_that_it_was_given(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        replays: list[str] = []
        request = Repeatable("mine", "hash", on_replay=lambda: replays.append("mine"))
        await stage.datasets.create(ME, "fresh", request=request)
        await stage.database.write(lambda connection: connection.execute(update(rows.answered).values(answer='{"id": "d", "was": 1}')))
        with pytest.raises(Conflict, match="was done, and the answer that another release of this server gave cannot be read: look") as refused:
            await stage.datasets.create(ME, "fresh", request=request)
        assert (refused.value.field, replays) == ("idempotency-key", [])

    play(tmp_path, story)


def test_a_judgement_is_answered_again_though_nothing_is_recorded_any_more(tmp_path: Path) -> None:
    given, request = GiveFeedback(target="span", metric="m", value=True), Repeatable("mine", "hash")
    made: list[Feedback] = []

    async def story(stage: Stage) -> None:
        stage.traffic.record(chat("span"))
        made.append(await stage.feedback.give(ME, given, request=request))

    async def after(stage: Stage) -> None:
        assert [await stage.feedback.give(ME, given, request=request)] == made
        with pytest.raises(Conflict, match="records no traffic"):
            await stage.feedback.give(ME, given, request=Repeatable("fresh", "hash"))

    play(tmp_path, story)
    play(tmp_path, after, mode="off")


async def age(stage: Stage, seconds: int) -> None:
    """As if all requests had come so long ago."""
    then = now_us() - seconds * 1_000_000
    await stage.database.write(lambda connection: connection.execute(update(rows.answered).values(created_us=then)))


async def known(stage: Stage) -> int:
    found = await stage.database.read(lambda connection: connection.scalar(select(func.count()).select_from(rows.answered)))
    return found or 0
