"""Imports of files as versions: what is skipped is kept, what is held out stays, and one kind of rows in a data set."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from bloomery.types.datasets import ChatRow, Curate, ImportRows, PromptRow, SplitChoice, UploadRows
from bloomery.types.errors import InvalidInput, NotFound
from bloomery.types.resources import Split
from tests.services.data.rows_of_files import jsonl
from tests.services.stage import ME, Stage, play

GOOD = [{"text": f"question {number} of {number * 7919}", "label": "ab"[number % 2], "user": {"id": number // 4}} for number in range(80)]
PROMPTS = [{"messages": [{"role": "user", "content": f"{number} + {number}?"}], "answer": 2 * number} for number in range(20)]


def file(*records: Any) -> BytesIO:
    return BytesIO(jsonl(*records).encode())


async def texts(stage: Stage, version: str, split: Split) -> list[str]:
    page = await stage.datasets.rows(ME, "data", version, split, limit=500)
    return [row.messages[0]["content"] for row in page.data if isinstance(row, ChatRow | PromptRow)]


def test_broken_rows_can_be_skipped_and_are_kept_with_the_version(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        broken = [{"text": ""}, {"conversations": []}]
        with pytest.raises(InvalidInput, match=r"train, row 81: lacks `label`; nothing was imported\. Also: train, row 82: has `conversations`"):
            await stage.datasets.upload(ME, "data", UploadRows(format="jsonl"), file(*GOOD, *broken))
        assert (await stage.datasets.get(ME, "data")).versions == []
        version = await stage.datasets.upload(ME, "data", UploadRows(format="jsonl", on_error="skip"), file(*GOOD, *broken))
        assert (version.counts["train.rejected"], version.counts["train.rows"]) == (2, 80)
        page = await stage.datasets.rejected(ME, "data", version.id, limit=1)
        assert ([(problem.row, problem.reason) for problem in page.data], page.has_more) == ([(81, "missing_field")], True)
        assert [problem.row for problem in (await stage.datasets.rejected(ME, "data", version.id, offset=1)).data] == [82]
        await stage.garbage.collect(ME, grace_us=0)
        assert len((await stage.datasets.rejected(ME, "data", version.id)).data) == 2
        with pytest.raises(InvalidInput, match="nothing was imported"):
            await stage.datasets.upload(ME, "data", UploadRows(format="jsonl", on_error="skip"), file(*broken))

    play(tmp_path, story)


def test_an_upload_is_divided_by_group_and_a_later_one_keeps_every_group_where_it_is(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        asked = UploadRows(format="jsonl", eval=0.3, validation=0.2, by="user.id")
        first = await stage.datasets.upload(ME, "data", asked, file(*GOOD[:60]))
        assert first.recipe["split"] == {"eval": 0.3, "validation": 0.2, "by": "user.id"}
        assert first.counts["split.groups"] == 15
        groups = {row["text"]: row["user"]["id"] for row in GOOD}  # type: ignore[index]
        sides = {split: {groups[text] for text in await texts(stage, first.id, split)} for split in ("train", "validation", "eval")}
        assert sum(map(len, sides.values())) == 15
        assert all(sides.values())
        second = await stage.datasets.upload(ME, "data", asked.model_copy(update={"parent": first.id}), file(*GOOD))
        later = {split: {groups[text] for text in await texts(stage, second.id, split)} for split in ("train", "validation", "eval")}
        assert all(sides[split] <= later[split] for split in sides)
        assert sum(map(len, later.values())) == 20
        with pytest.raises(InvalidInput, match="lacks `team`, by which the rows are split"):
            await stage.datasets.upload(ME, "data", asked.model_copy(update={"by": "team"}), file(*GOOD))

    play(tmp_path, story)


def test_rows_that_are_all_alike_cannot_be_divided(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        alike = [
            {"text": f"Say in one word what the mood of this rather long customer message number {number} is", "label": "a"} for number in range(9)
        ]
        with pytest.raises(InvalidInput, match="leaves nothing to train on: all 9 rows are of one group or nearly the same"):
            await stage.datasets.upload(ME, "data", UploadRows(format="jsonl", eval=0.99), file(*alike))

    play(tmp_path, story)


def test_a_version_can_be_divided_later_by_what_its_rows_have(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        whole = await stage.datasets.upload(ME, "data", UploadRows(format="jsonl"), file(*PROMPTS))
        assert whole.kind == "prompt"
        divided = await stage.datasets.split(ME, "data", whole.id, SplitChoice(eval=0.4, by="answer"))
        assert (divided.parent, divided.kind) == (whole.id, "prompt")
        assert divided.counts["eval.rows"] + divided.counts["train.rows"] == 20
        assert divided.counts["eval.rows"] > 2
        rows = (await stage.datasets.rows(ME, "data", divided.id, "eval")).data
        assert all(isinstance(row, PromptRow) and set(row.item) == {"answer"} for row in rows)
        with pytest.raises(InvalidInput, match=r"train, row 0: lacks `level`, .* \(stored rows have only the fields of their kind"):
            await stage.datasets.split(ME, "data", whole.id, SplitChoice(eval=0.4, by="level"))
        with pytest.raises(NotFound):
            await stage.datasets.split(ME, "data", "version-x", SplitChoice(eval=0.4))

    play(tmp_path, story)


def test_a_data_set_has_rows_of_one_kind(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        version = await stage.datasets.upload(ME, "data", UploadRows(format="jsonl"), file(*PROMPTS))
        with pytest.raises(InvalidInput, match="row 1: the last message is the assistant's"):
            await stage.datasets.upload(
                ME, "data", UploadRows(format="jsonl"), file({"messages": [*PROMPTS[0]["messages"], {"role": "assistant", "content": "x"}]})
            )  # type: ignore[misc]
        with pytest.raises(InvalidInput, match="data set `data` holds `prompt` rows, not `chat`") as refused:
            await stage.datasets.import_rows(ME, "data", ImportRows(format="jsonl", splits={"train": jsonl(*GOOD)}, kind="chat"))
        assert refused.value.field == "kind"
        with pytest.raises(InvalidInput, match="traffic gives conversations"):
            await stage.datasets.curate(ME, "data", Curate(parent=version.id))

    play(tmp_path, story)


def test_validation_says_what_an_import_would_do_and_stores_nothing(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        await stage.datasets.upload(ME, "data", UploadRows(format="jsonl", split="eval"), file(*GOOD[:10]))
        blobs = stage.blobs.blobs.list()
        asked = UploadRows(format="jsonl")
        found = await stage.datasets.validate(ME, asked, file(*GOOD, {"text": "x"}, GOOD[79]), "data")
        assert (found.kind, found.rows, found.accepted, found.rejected) == ("chat", 82, 81, 1)
        assert found.reasons == {"missing_field": 1}
        assert [(problem.row, problem.field) for problem in found.problems] == [(81, "label")]
        assert found.ignored == {"user": 81}
        assert (found.counts["train.held_out_exact"], found.counts["train.duplicate"], found.counts["train.admitted"]) == (10, 1, 70)
        assert {label.label: label.rows for label in found.labels} == {"a": 40, "b": 41}
        alone = await stage.datasets.validate(ME, asked, file(*GOOD))
        assert alone.counts["train.admitted"] == 80
        assert stage.blobs.blobs.list() == blobs
        assert len((await stage.datasets.get(ME, "data")).versions) == 1

    play(tmp_path, story)


def test_the_same_rows_with_fields_in_another_order_are_the_same_version(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        there = await stage.datasets.upload(ME, "data", UploadRows(format="jsonl"), file(*PROMPTS))
        turned = [json.loads(json.dumps(dict(reversed(row.items())))) for row in PROMPTS]
        assert await stage.datasets.upload(ME, "data", UploadRows(format="jsonl"), file(*turned)) == there

    play(tmp_path, story)


def test_a_later_split_without_a_field_keeps_the_groups_of_the_upload(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.datasets.create(ME, "data")
        rows = [{"text": f"{number * 7919**3} by user {number // 4}", "label": "a", "user": {"id": number // 4}} for number in range(1, 81)]
        whole = await stage.datasets.upload(ME, "data", UploadRows(format="jsonl", eval=0.2, by="user.id"), file(*rows))
        with pytest.raises(InvalidInput, match=r"lacks `user\.id`"):
            await stage.datasets.split(ME, "data", whole.id, SplitChoice(validation=0.4, by="user.id"))
        divided = await stage.datasets.split(ME, "data", whole.id, SplitChoice(validation=0.4))
        splits: list[Split] = ["train", "validation", "eval"]
        users = [{text.rpartition(" ")[2] for text in await texts(stage, divided.id, split)} for split in splits]
        assert all(users)
        assert sum(len(some) for some in users) == len(set[str]().union(*users))

    play(tmp_path, story)
