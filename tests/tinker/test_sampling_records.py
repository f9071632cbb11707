"""Records of training's samples beside those of served answers: they never crowd them out, never hold up who reads, and teach nothing."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from bloomery.services.data.span_filter import SpanFilter
from bloomery.services.data.span_rows import Inference
from bloomery.services.data.traffic import Traffic
from bloomery.store.blobs import AsyncBlobs, Blobs
from bloomery.store.database import Database
from bloomery.types.datasets import Curate, ImportRows
from bloomery.types.resources import GiveFeedback
from tests.services.runs_stage import until
from tests.services.stage import ME, Stage, chat, play


def rollout(number: int, **changes: Any) -> Inference:
    """A sample without content."""
    return chat(f"session-1:sample:0:{number}", kind="sample", request={"num_samples": 1}, choices=[], **{"keeps_body": False} | changes)


def test_samples_leave_half_of_the_queue_to_what_is_served(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        for number in range(8):  # no await in between: the writer cannot run
            stage.traffic.record(rollout(number))
        for number in range(6):
            stage.traffic.record(chat(f"chatcmpl-{number}"))
        assert (stage.traffic.state().queued, stage.traffic.state().dropped) == (10, 4)
        assert len((await stage.traffic.list(ME, SpanFilter(kinds=["sample"]))).data) == 5
        assert len((await stage.traffic.list(ME, SpanFilter(kinds=["chat"]))).data) == 5

    play(tmp_path, story, capacity=10)


def test_reading_waits_for_what_was_recorded_before_and_for_nothing_later(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async def sample_without_end() -> None:
            number = 0
            while True:
                if stage.traffic.state().queued < 2:
                    stage.traffic.record(rollout(number))
                    number += 1
                await asyncio.sleep(0)

        training = asyncio.create_task(sample_without_end())
        stage.traffic.record(chat("chatcmpl-1"))
        async with asyncio.timeout(60):
            assert (await stage.traffic.get(ME, "chatcmpl-1")).kind == "chat"
        training.cancel()
        await asyncio.wait({training})

    play(tmp_path, story)


def test_spans_wait_for_each_other_and_who_reads_waits_for_none(tmp_path: Path) -> None:
    async def story(database: Database) -> None:
        async with Traffic(database, AsyncBlobs(Blobs(tmp_path / "blobs")), "full", linger_s=3600) as traffic, asyncio.timeout(60):
            for number in range(3):
                traffic.record(rollout(number))
                # As long as it takes to write a row, a few times over.
                for _ in range(5):
                    await database.write(lambda connection: None)
            assert traffic.state().recorded == 0
            traffic.record(chat("chatcmpl-1"))
            assert len((await traffic.list(ME)).data) == 4
            for number in range(3, 3 + 129):
                traffic.record(rollout(number))
            await until(lambda: traffic.state().recorded >= 4 + 128)

    with Database(tmp_path / "bloomery.db") as database:
        asyncio.run(story(database))


def test_a_recorder_whose_disk_stands_still_does_not_hold_up_a_clean_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(database: Database) -> None:
        release = threading.Event()
        standstill = asyncio.create_task(database.write(lambda connection: release.wait(300)))
        try:
            async with asyncio.timeout(60):
                async with Traffic(database, AsyncBlobs(Blobs(tmp_path / "blobs")), "full", last_flush_s=0.1) as traffic:
                    traffic.record(chat("chatcmpl-1"))
        finally:
            release.set()
            await standstill

    with Database(tmp_path / "bloomery.db") as database:
        asyncio.run(story(database))
    assert any("the traffic recorder is 1 spans behind" in record.getMessage() for record in caplog.records)


def test_content_is_spelled_only_where_it_is_kept(tmp_path: Path) -> None:
    spelled: list[list[int]] = []

    def spell(tokens: Any) -> str:
        spelled.append(list(tokens))
        return "text"

    async def story(stage: Stage) -> None:
        stage.traffic.record(rollout(1, spell=spell))
        await stage.traffic.flush()
        assert spelled == []
        stage.traffic.record(rollout(2, spell=spell, keeps_body=True))
        body = await stage.traffic.body(ME, "session-1:sample:0:2")
        assert body is not None
        assert spelled == [[4, 5], [1, 2, 3]]
        assert (body["request"]["prompt"], body["choices"]) == ("text", [{"index": 0, "text": "text", "finish_reason": "stop"}])

    play(tmp_path, story)


def test_training_rows_are_made_of_served_answers_alone(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        row = '{"messages": [{"role": "user", "content": "before"}, {"role": "assistant", "content": "a"}]}'
        parent = await stage.datasets.import_rows(ME, "data", ImportRows(format="jsonl", splits={"train": row}))
        stage.traffic.record(rollout(1, spell=lambda _: "text", keeps_body=True))
        stage.traffic.record(rollout(2))
        stage.traffic.record(chat("chatcmpl-1", "question", "answer"))
        for target in ("session-1:sample:0:1", "session-1:sample:0:2", "chatcmpl-1"):
            await stage.feedback.give(ME, GiveFeedback(target=target, metric="good", value=True))
        version = await stage.datasets.curate(ME, "data", Curate(parent=parent.id))
        assert version.counts["traffic.accepted"] == 1

    play(tmp_path, story)
