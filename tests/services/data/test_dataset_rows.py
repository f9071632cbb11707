"""Files to rows with the number of the broken one, and splits that never mix."""

import io
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import NamedTuple

import pytest
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from bloomery.services.data import dataset_rows
from bloomery.services.data.row import Row
from bloomery.services.data.stored_rows import Opened, StoredRows, write_blob
from bloomery.types.errors import InvalidInput
from bloomery.types.resources import Split
from tests.services.data.rows_of_files import row, rows_of

CHAT = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'
BROKEN_JSONL = {
    "{}": "row 1: lacks `text`",
    '{"text": "x", "label": "y"}\n{"text": "x"}': "row 2: lacks `label`",
    '{"text": "x", "label": "y"}\n\n{"text": "x", "label": true}': "row 3: `label` must be a text or a whole number",
    '{"text": " ", "label": "y"}': "row 1: `text` is empty",
    "not json": "row 1: is not JSON",
    "[1]": "row 1: is not a JSON object",
    '{"messages": []}': "row 1: `messages` must be a list of messages",
    '{"messages": [{"role": "user", "content": "q"}]}': "row 1: the last message must be the assistant's",
    '{"messages": [{"role": "assistant", "content": "q"}]}': "row 1: no message is the user's",
    '{"messages": [{"role": "robot", "content": "q"}]}': "row 1: message 1: `role` must be one of",
    '{"messages": [{"role": "user", "content": "q", "weight": 0}]}': "row 1: message 1: `weight` is for messages of the role `assistant`",
    '{"messages": [{"role": "user", "content": 3}]}': "row 1: message 1: `content` must be a text",
    '{"text": "\\ud800", "label": "y"}': "row 1: `text` holds half a surrogate pair",
    '{"text": "x", "messages": []}': "row 1: has both `messages` and `text`",
    "[" * 100_000: "row 1: is not JSON",
    "\n \n": "the file has no rows",
}
BROKEN_CSV = {
    "text,answer\na,b\n": "names `text`, `answer`; nothing",
    "text,label\na\n": "row 1: lacks `label`",
    "text,label\na,b\na,b,c\n": "row 2: (line 3) has more values",
    'text,label\n"a" b,c\n': "row 1: is not CSV",
    "text,label\n": "the file has no rows",
    "": "names none; nothing",
}


class Assembled(NamedTuple):
    splits: dict[Split, list[Row]]
    counts: dict[str, int]


def assemble(pinned: Mapping[Split, Iterable[Row]], inherited: Iterable[Row], given: Mapping[Split, Iterable[Row]]) -> Assembled:
    with ExitStack() as stack:
        splits, counts = dataset_rows.assemble(pinned, inherited, given, stack)
        return Assembled({split: list(rows) for split, rows in splits.items()}, counts)


def stored(splits: Mapping[Split, Iterable[Row]], block_bytes: int = 1 << 20) -> StoredRows:
    file = io.BytesIO()
    write_blob(splits, file, block_bytes)
    content = file.getvalue()
    return StoredRows.open(len(content), lambda start, stop: content[start:stop])


@pytest.mark.parametrize(("content", "message"), BROKEN_JSONL.items())
def test_a_broken_jsonl_row_is_named(content: str, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        rows_of(content)
    assert message in refused.value.message
    assert refused.value.message.startswith("train")
    assert refused.value.field == "splits.train"


@pytest.mark.parametrize(("content", "message"), BROKEN_CSV.items())
def test_a_broken_csv_row_is_named(content: str, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        rows_of(content, "csv", split="eval")
    assert message in refused.value.message


def test_all_forms_give_the_same_row() -> None:
    labelled = rows_of('{"text": "q", "label": "a", "id": 7}')
    assert labelled == rows_of(CHAT) == rows_of('\ufeffid,text,label\r\n7,"q",a\r\n', "csv") == [row("q")]


def test_whole_numbers_are_labels() -> None:
    assert rows_of('{"text": "q", "label": 3}') == [row("q", "3")]


def test_separators_inside_json_texts_do_not_break_rows() -> None:
    assert rows_of('{"text": "one\u2028two\x85", "label": "a"}') == [row("one\u2028two\x85")]


def test_held_out_rows_never_reach_train() -> None:
    text = "Open the file at this path and return a stream that reads its lines one by one, in order."
    given_rows = {"eval": [row(text)], "train": [row(text), row(text, "b"), row(text.replace("order", "turn")), row("Close it.")]}
    assembled = assemble({}, [], given_rows)
    assert assembled.splits["train"] == [row("Close it.")]
    assert assembled.counts["train.held_out_exact"] == 2
    assert assembled.counts["train.held_out_near"] == 1
    assert assembled.counts["eval.rows"] == 1


def test_pinned_rows_push_inherited_ones_out() -> None:
    assembled = assemble({"eval": [row("pinned")]}, [row("pinned"), row("old")], {"train": [row("new")]})
    assert assembled.splits["train"] == [row("old"), row("new")]
    assert assembled.splits["eval"] == [row("pinned")]


def test_a_new_held_out_row_stays_out_of_the_other_held_out_split() -> None:
    assembled = assemble({"eval": [row("a")]}, [], {"validation": [row("a"), row("b")]})
    assert assembled.splits["validation"] == [row("b")]


prompts = st.lists(st.sampled_from("abcdefgh").map(lambda letter: row(letter * 8)), max_size=12)


@given(pinned=prompts, inherited=prompts, train=prompts, evaluation=prompts, validation=prompts)
def test_a_prompt_is_in_one_split_only_and_pins_stay(
    pinned: list[Row], inherited: list[Row], train: list[Row], evaluation: list[Row], validation: list[Row]
) -> None:
    before = assemble({}, [], {"eval": pinned}).splits
    splits = assemble(before, inherited, {"train": train, "eval": evaluation, "validation": validation}).splits
    sets = [{row.prompt for row in rows} for rows in splits.values()]
    assert sum(len(prompts) for prompts in sets) == len(set().union(*sets))
    assert splits["eval"][: len(before["eval"])] == before["eval"]
    everything = {row.prompt for rows in (pinned, inherited, train, evaluation, validation) for row in rows}
    assert set().union(*sets) == everything


def test_lines_are_read_back_as_they_were() -> None:
    rows = [row("q\u2028\n\x85"), row("b", label_source="correction", source_span="chatcmpl-1", group="ab")]
    assert list(stored({"train": rows}).rows("train")) == rows


def test_what_earlier_releases_stored_is_read_and_has_the_manifest_that_it_had() -> None:
    rows = [row("q"), row("b", label_source="correction", source_span="chatcmpl-1")]
    lines = [
        json.dumps({"split": "train", "messages": each.messages, "label_source": each.label_source, "source_span": each.source_span}, sort_keys=True)
        for each in rows
    ]
    packed = zstandard.compress("\n".join(lines).encode())
    assert list(StoredRows.open(len(packed), lambda start, stop: packed[start:stop]).rows("train")) == rows
    written = write_blob({"train": rows}, io.BytesIO())
    assert written.manifest == written.content == blake3("\n".join(lines).encode()).hexdigest()
    assert rows[0].hash == blake3(json.dumps(rows[0].messages, sort_keys=True).encode()).hexdigest()


def test_a_blob_is_what_zstd_unpacks() -> None:
    file = io.BytesIO()
    write_blob({"train": [row("q")], "eval": [row("e")]}, file)
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(file.getvalue()), read_across_frames=True) as reader:
        assert [json.loads(line)["split"] for line in reader.read().replace(b"}{", b"}\n{").split(b"\n")] == ["eval", "train"]


SPLITS: tuple[Split, ...] = ("train", "validation", "eval")


@given(kept=st.fixed_dictionaries({split: prompts for split in SPLITS}), limit=st.integers(1, 4), offset=st.integers(0, 9), block=st.integers(1, 400))
def test_every_page_of_every_split_is_found_among_the_blocks(kept: dict[Split, list[Row]], limit: int, offset: int, block: int) -> None:
    read = stored(kept, block)
    for split, rows in kept.items():
        assert (read.count(split), list(read.rows(split))) == (len(rows), rows)
        assert read.page(split, limit=limit, offset=offset) == rows[offset : offset + limit]
        spread = list(read.spread(split, limit))
        assert len(spread) == min(limit, len(rows))
        assert all(rows[place] == found for place, found in spread)


def test_what_was_asked_for_last_is_remembered_within_the_limit() -> None:
    opened = Opened(20)
    for key in "ab":
        opened.keep(key, key * 10, 10)
    assert opened.get("a") == "a" * 10
    opened.keep("c", "c", 10)
    assert [opened.get(key) is not None for key in "abc"] == [True, False, True]
    opened.keep("large", "x", 1000)
    assert [opened.get(key) is not None for key in ("a", "large", "c")] == [True, False, True]
