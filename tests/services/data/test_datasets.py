"""Versions that never change, evaluation rows that never reach training, and rows made of judged traffic."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from blake3 import blake3
from sqlalchemy import select, update

from bloomery.services.data.curation import Curation
from bloomery.services.data.datasets import Datasets
from bloomery.store import rows
from bloomery.types.datasets import ChatRow, Curate, ImportRows
from bloomery.types.errors import Conflict, InvalidInput, NotFound
from bloomery.types.resources import GiveFeedback, Split
from tests.services.stage import ME, STRANGER, Stage, chat, play


def jsonl(*pairs: tuple[str, str]) -> str:
    return "\n".join(json.dumps({"text": text, "label": label}) for text, label in pairs)


def importing(parent: str | None = None, **splits: str) -> ImportRows:
    return ImportRows.model_validate({"format": "jsonl", "splits": splits, "parent": parent})


async def pairs(stage: Stage, version: str, split: Split = "train") -> list[tuple[str, str]]:
    page = await stage.datasets.rows(ME, "data", version, split, limit=500)
    return [(row.messages[0]["content"], row.messages[-1]["content"]) for row in page.data]


async def judge(stage: Stage, target: str, value: Any, kind: Any = None, metric: str = "correct") -> None:
    await stage.feedback.give(ME, GiveFeedback(target=target, metric=metric, value=value, type=kind))


def test_an_import_is_read_back_by_split(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        version = await stage.datasets.import_rows(ME, "data", importing(train=jsonl(("a", "1"), ("b", "2"), ("a", "1")), eval=jsonl(("c", "3"))))
        assert (version.number, version.parent) == (1, None)
        assert version.counts == {
            "eval.admitted": 1,
            "eval.rows": 1,
            "train.admitted": 2,
            "train.duplicate": 1,
            "train.rows": 2,
            "validation.rows": 0,
        }
        assert await pairs(stage, version.id) == [("a", "1"), ("b", "2")]
        assert await pairs(stage, version.manifest, "eval") == [("c", "3")]
        page = await stage.datasets.rows(ME, "data", version.id, "train", limit=1)
        assert page.has_more
        assert page.data == [
            ChatRow(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "1"}], label_source="import", source_span=None)
        ]

    play(tmp_path, story)


def test_rows_that_were_in_no_file_say_where_they_come_from(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        asked = importing(train=jsonl(("a", "1"))).model_copy(update={"origin": "the playground"})
        assert (await stage.datasets.import_rows(ME, "data", asked)).recipe == {"kind": "import", "format": "jsonl", "origin": "the playground"}

    play(tmp_path, story)


def test_a_version_is_unpacked_once_for_all_its_pages(tmp_path: Path) -> None:
    """Told by taking the blob away once the first page was read."""

    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        version = await stage.datasets.import_rows(ME, "data", importing(train=jsonl(*((f"q{number}", "a") for number in range(5)))))
        forgetful = Datasets(stage.database, stage.blobs, Curation(stage.database, stage.blobs, stage.traffic), opened_bytes=0)
        assert (await forgetful.rows(ME, "data", version.id, "train", limit=2)).has_more
        assert len(await pairs(stage, version.id)) == 5
        await stage.blobs.delete(f"datasets/{version.manifest}.jsonl.zst")
        page = await stage.datasets.rows(ME, "data", version.id, "train", limit=2, offset=3)
        assert ([row.messages[0]["content"] for row in page.data], page.has_more) == (["q3", "q4"], False)
        with pytest.raises(NotFound):
            await forgetful.rows(ME, "data", version.id, "train", limit=2, offset=2)

    play(tmp_path, story)


def test_versions_of_earlier_releases_are_read_and_grown(tmp_path: Path) -> None:
    """They lie in one frame without an index, and their rows in the database know no kinds."""

    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        first = await stage.datasets.import_rows(ME, "data", importing(train=jsonl(("a", "1"), ("b", "2")), eval=jsonl(("held out", "3"))))
        rows_as_they_were = [("eval", "held out", "3"), ("train", "a", "1"), ("train", "b", "2")]
        lines = [
            json.dumps(
                {
                    "split": split,
                    "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": label}],
                    "label_source": "import",
                    "source_span": None,
                },
                sort_keys=True,
            )
            for split, text, label in rows_as_they_were
        ]
        content = "\n".join(lines).encode()
        assert blake3(content).hexdigest() == first.manifest
        await stage.blobs.put(f"datasets/{first.manifest}.jsonl.zst", zstandard.compress(content))
        await stage.database.write(lambda connection: connection.execute(update(rows.dataset_version).values(kind=None)))
        reopened = Datasets(stage.database, stage.blobs, Curation(stage.database, stage.blobs, stage.traffic))
        page = await reopened.rows(ME, "data", first.id, "train", limit=1, offset=1)
        assert page.data == [
            ChatRow(messages=[{"role": "user", "content": "b"}, {"role": "assistant", "content": "2"}], label_source="import", source_span=None)
        ]
        second = await reopened.import_rows(ME, "data", importing(first.id, train=jsonl(("held out", "3"), ("c", "4"))))
        assert (second.kind, await pairs(stage, second.id)) == ("chat", [("a", "1"), ("b", "2"), ("c", "4")])
        assert await pairs(stage, second.id, "eval") == [("held out", "3")]

    play(tmp_path, story)


def test_the_same_content_is_the_same_version(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        first = await stage.datasets.import_rows(ME, "data", importing(train=jsonl(("a", "1"))))
        assert await stage.datasets.import_rows(ME, "data", importing(train=jsonl(("a", "1")))) == first
        other = await stage.datasets.import_rows(ME, "data", importing(train=jsonl(("a", "2"))))
        assert other.manifest != first.manifest
        assert await pairs(stage, first.id) == [("a", "1")]
        assert [version.id for version in (await stage.datasets.get(ME, "data")).versions] == [first.id, other.id]

    play(tmp_path, story)


def test_a_broken_row_imports_nothing(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        with pytest.raises(InvalidInput, match="eval, row 2: lacks `label`"):
            await stage.datasets.import_rows(ME, "data", importing(train=jsonl(("a", "1")), eval=jsonl(("b", "2")) + '\n{"text": "x"}'))
        assert (await stage.datasets.get(ME, "data")).versions == []
        assert stage.blobs.blobs.list() == []

    play(tmp_path, story)


def test_evaluation_rows_are_pinned_for_every_later_version(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        first = await stage.datasets.import_rows(ME, "data", importing(train=jsonl(("a", "1")), eval=jsonl(("held out", "2"))))
        second = await stage.datasets.import_rows(ME, "data", importing(train=jsonl(("held out", "2"), ("b", "2"))))
        assert await pairs(stage, second.id) == [("b", "2")]
        assert await pairs(stage, second.id, "eval") == [("held out", "2")]
        third = await stage.datasets.import_rows(ME, "data", importing(first.id, train=jsonl(("c", "3")), eval=jsonl(("a", "1"))))
        assert await pairs(stage, third.id) == [("c", "3")]  # the parent's `a` is an evaluation row now
        assert await pairs(stage, third.id, "eval") == [("held out", "2"), ("a", "1")]
        assert third.parent == first.id

    play(tmp_path, story)


def test_a_data_set_that_is_deleted_while_a_version_is_made_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        work = stage.datasets._work

        async def work_while_it_is_deleted(making: Any) -> Any:
            made = await work(making)
            await stage.datasets.delete(ME, "data")
            return made

        monkeypatch.setattr(stage.datasets, "_work", work_while_it_is_deleted)
        with pytest.raises(NotFound, match="`data` was deleted meanwhile"):
            await stage.datasets.import_rows(ME, "data", importing(train=jsonl(("a", "1"))))
        for table in (rows.dataset, rows.dataset_version, rows.dataset_item):
            assert await stage.database.read(lambda connection, table=table: connection.execute(select(table)).all()) == []

    play(tmp_path, story)


def test_what_is_deleted_leaves_no_rows_behind(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        for name in ("data", "other"):
            await stage.datasets.create(ME, name)
            await stage.datasets.import_rows(ME, name, importing(train=jsonl(("a", "1"), ("b", "2")), eval=jsonl(("c", "1"))))
        await stage.datasets.delete(ME, "data")
        assert [each.name for each in (await stage.datasets.list(ME)).data] == ["other"]
        for table, left in ((rows.dataset, 1), (rows.dataset_version, 1), (rows.dataset_item, 3)):
            assert len(await stage.database.read(lambda connection, table=table: connection.execute(select(table)).all())) == left

    play(tmp_path, story)


def test_versions_added_at_once_cannot_miss_each_others_pins(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        files = [importing(eval=jsonl(("x", "1"))), importing(train=jsonl(("x", "1")))]
        outcomes = await asyncio.gather(*(stage.datasets.import_rows(ME, "data", given) for given in files), return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Conflict", "DatasetVersion"]

    play(tmp_path, story)


def test_curation_takes_corrections_and_confirmed_answers_only(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        parent = await stage.datasets.import_rows(ME, "data", importing(train=jsonl(("known question", "k")), eval=jsonl(("evaluated", "e"))))
        questions = ["right", "wrong", "corrected", "unjudged", "no consent", "failed", "known question", "evaluated", "episode says yes"]
        for number, question in enumerate(questions):
            changes = {"started_us": number, "status": "error" if question == "failed" else "ok", "episode_id": f"episode-{number}"}
            consent = "eval" if question == "no consent" else "train"
            stage.traffic.record(chat(f"chatcmpl-{number}", question, "k", consent=consent, **changes))
        for number in (0, 4, 5, 6, 7):
            await judge(stage, f"chatcmpl-{number}", True)
        await judge(stage, "chatcmpl-1", False)
        await judge(stage, "chatcmpl-2", False)
        await judge(stage, "chatcmpl-2", "better", "demonstration")
        await judge(stage, "episode-8", True)
        version = await stage.datasets.curate(ME, "data", Curate(parent=parent.id))
        assert await pairs(stage, version.id) == [("known question", "k"), ("right", "k"), ("corrected", "better"), ("episode says yes", "k")]
        assert await pairs(stage, version.id, "eval") == [("evaluated", "e")]
        rows = (await stage.datasets.rows(ME, "data", version.id, "train")).data
        assert [(row.label_source, row.source_span) for row in rows] == [
            ("import", None),
            ("confirmed", "chatcmpl-0"),
            ("correction", "chatcmpl-2"),
            ("confirmed", "chatcmpl-8"),
        ]
        stages = {name.removeprefix("traffic."): count for name, count in version.counts.items() if name.startswith("traffic.")}
        assert stages == {
            "spans": 9,
            "confirmed": 4,
            "correction": 1,
            "rejected": 1,
            "unjudged": 1,
            "without_consent": 1,
            "not_ok": 1,
            "superseded": 0,
            "known": 1,
            "accepted": 4,
        }
        assert version.counts["train.held_out_exact"] == 1
        assert version.parent == parent.id

    play(tmp_path, story)


def test_near_duplicates_of_evaluation_rows_are_not_curated(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        text = "Open the file at this path and return a stream that reads its lines one by one, in the order in which they stand."
        await stage.datasets.create(ME, "data")
        parent = await stage.datasets.import_rows(ME, "data", importing(train=jsonl(("a", "1")), eval=jsonl((text, "io"))))
        stage.traffic.record(chat("chatcmpl-1", text.upper().replace("STAND", "LIE"), "io"))
        await judge(stage, "chatcmpl-1", True)
        version = await stage.datasets.curate(ME, "data", Curate(parent=parent.id))
        assert version.counts["train.held_out_near"] == 1
        assert await pairs(stage, version.id) == [("a", "1")]

    play(tmp_path, story)


def test_the_latest_judgement_wins_and_a_correction_wins_over_thumbs(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        parent = await stage.datasets.import_rows(ME, "data", importing(train=jsonl(("a", "1"))))
        for number, question in enumerate(["changed to no", "changed to yes", "corrected twice", "one metric says no", "asked again", "asked again"]):
            stage.traffic.record(chat(f"chatcmpl-{number}", question, f"answer {number}", started_us=number))
        for target, value, kind, metric in [
            (0, True, None, "correct"),
            (0, False, None, "correct"),
            (1, False, None, "correct"),
            (1, True, None, "correct"),
            (2, "first", "demonstration", "answer"),
            (2, "second", "demonstration", "answer"),
            (2, True, None, "correct"),
            (3, True, None, "correct"),
            (3, False, None, "polite"),
            (4, True, None, "correct"),
            (5, True, None, "correct"),
        ]:
            await judge(stage, f"chatcmpl-{target}", value, kind, metric)
        version = await stage.datasets.curate(ME, "data", Curate(parent=parent.id))
        expected = [("changed to yes", "answer 1"), ("corrected twice", "second"), ("asked again", "answer 5")]
        assert await pairs(stage, version.id) == [("a", "1"), *expected]
        one_metric = await stage.datasets.curate(ME, "data", Curate(parent=parent.id, metric="correct"))
        assert ("one metric says no", "answer 3") in await pairs(stage, one_metric.id)

    play(tmp_path, story)


def test_answers_that_are_no_rows_are_counted_by_reason(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        parent = await stage.datasets.import_rows(ME, "data", importing(train=jsonl(("a", "1"))))
        two = [{"message": {"role": "assistant", "content": text}} for text in ("x", "y")]
        parts = [{"role": "user", "content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]}]
        for number, changes in enumerate(
            [
                {"choices": two},
                {"request": {"prompt": "no chat"}, "kind": "completion"},
                {"choices": [{"message": {"role": "assistant", "content": None}}]},
                {"choices": [{"message": {"role": "assistant", "content": "I add.", "tool_calls": [{"id": "call_1"}]}}]},
                {"request": {"messages": parts}},
                {"request": {"messages": [{"role": "user", "content": "who", "name": "Ann"}]}},
                {"request": {"messages": [{"role": "user", "content": "who else", "name": None}]}},
            ]
        ):
            stage.traffic.record(chat(f"chatcmpl-{number}", **changes))
            await judge(stage, f"chatcmpl-{number}", True)
        version = await stage.datasets.curate(ME, "data", Curate(parent=parent.id))
        assert {name: version.counts[f"traffic.{name}"] for name in ("several_answers", "not_chat", "not_text", "accepted")} == {
            "several_answers": 1,
            "not_chat": 1,
            "not_text": 2,
            "accepted": 3,
        }
        assert await pairs(stage, version.id) == [("a", "1"), ("in parts", "a"), ("who", "a"), ("who else", "a")]
        rows = (await stage.datasets.rows(ME, "data", version.id, "train")).data
        assert [row.messages[0].get("name") for row in rows] == [None, None, "Ann", None]

    play(tmp_path, story)


def test_samples_of_training_are_no_traffic_to_curate(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        parent = await stage.datasets.import_rows(ME, "data", importing(train=jsonl(("a", "1"))))
        for kind in ("chat", "sample"):
            stage.traffic.record(chat(f"{kind}-1", f"asked in a {kind}", kind=kind))
            await judge(stage, f"{kind}-1", True)
        version = await stage.datasets.curate(ME, "data", Curate(parent=parent.id))
        assert [prompt for prompt, _ in await pairs(stage, version.id)] == ["a", "asked in a chat"]
        assert version.counts["traffic.spans"] == 1

    play(tmp_path, story)


def test_curation_is_confined_to_deployment_and_time(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        await stage.deployments.create(ME, "router", "tiny", {})
        target = await stage.deployments.target(ME, "router")
        parent = await stage.datasets.import_rows(ME, "data", importing(train=jsonl(("a", "1"))))
        for number in range(4):
            stage.traffic.record(chat(f"chatcmpl-{number}", f"question {number}", started_us=number, **({"target": target} if number else {})))
            await judge(stage, f"chatcmpl-{number}", True)
        version = await stage.datasets.curate(ME, "data", Curate(parent=parent.id, deployment="router", since_us=1, until_us=3))
        assert [prompt for prompt, _ in await pairs(stage, version.id)] == ["a", "question 1", "question 2"]
        with pytest.raises(NotFound):
            await stage.datasets.curate(ME, "data", Curate(parent=parent.id, deployment="nobody"))

    play(tmp_path, story)


def test_data_sets_are_confined_to_the_project_and_names_are_taken_once(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        created = await stage.datasets.create(ME, "data")
        assert (await stage.datasets.list(ME)).data == [created]
        assert (await stage.datasets.list(STRANGER)).data == []
        for attempt, kind in [
            (stage.datasets.create(ME, "data"), Conflict),
            (stage.datasets.get(STRANGER, "data"), NotFound),
            (stage.datasets.import_rows(ME, "data", importing()), InvalidInput),
            (stage.datasets.import_rows(ME, "data", importing("version-x", train=jsonl(("a", "1")))), NotFound),
            (stage.datasets.rows(ME, "data", "version-x", "train"), NotFound),
        ]:
            with pytest.raises(kind):
                await attempt

    play(tmp_path, story)
