"""Files to rows with the number of the broken one, and splits that never mix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.services.data.dataset_rows import Opened, Row, StoredRows, assemble, parse, stored_lines
from bloomery.types.errors import InvalidInput
from bloomery.types.resources import Split

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
    '{"messages": [{"role": "user", "content": "q", "weight": 0}]}': "row 1: message 1: `weight` is not supported",
    '{"messages": [{"role": "user", "content": 3}]}': "row 1: message 1: `content` must be a text",
    '{"text": "\\ud800", "label": "y"}': "row 1: `text` holds half a surrogate pair",
    '{"text": "x", "messages": []}': "row 1: has both `messages` and `text`",
    "[" * 100_000: "row 1: is not JSON",
    "\n \n": "the file has no rows",
}
BROKEN_CSV = {
    "text,answer\na,b\n": "missing: ['label']",
    "text,label\na\n": "row 1: lacks `label`",
    "text,label\na,b\na,b,c\n": "row 2: (line 3) has more values",
    'text,label\n"a" b,c\n': "row 1: is not CSV",
    "text,label\n": "the file has no rows",
    "": "missing: ['label', 'text']",
}


def row(prompt: str, answer: str = "a") -> Row:
    return Row(({"role": "user", "content": prompt}, {"role": "assistant", "content": answer}))


@pytest.mark.parametrize(("content", "message"), BROKEN_JSONL.items())
def test_a_broken_jsonl_row_is_named(content: str, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse("jsonl", content, "train")
    assert message in refused.value.message
    assert refused.value.message.startswith("train")
    assert refused.value.field == "splits.train"


@pytest.mark.parametrize(("content", "message"), BROKEN_CSV.items())
def test_a_broken_csv_row_is_named(content: str, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse("csv", content, "eval")
    assert message in refused.value.message


def test_all_forms_give_the_same_row() -> None:
    labelled = parse("jsonl", '{"text": "q", "label": "a", "id": 7}', "train")
    assert labelled == parse("jsonl", CHAT, "train") == parse("csv", '\ufeffid,text,label\r\n7,"q",a\r\n', "train") == [row("q")]


def test_whole_numbers_are_labels() -> None:
    assert parse("jsonl", '{"text": "q", "label": 3}', "train") == [row("q", "3")]


def test_separators_inside_json_texts_do_not_break_rows() -> None:
    assert parse("jsonl", '{"text": "one\u2028two\x85", "label": "a"}', "train") == [row("one\u2028two\x85")]


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
    rows = [row("q\u2028\n\x85"), row("b")._replace(label_source="correction", source_span="chatcmpl-1")]
    assert StoredRows(stored_lines({"train": rows})).rows("train") == rows


SPLITS: tuple[Split, ...] = ("train", "validation", "eval")


@given(kept=st.fixed_dictionaries({split: prompts for split in SPLITS}), limit=st.integers(1, 4), offset=st.integers(0, 9))
def test_every_page_of_every_split_is_found_among_the_lines(kept: dict[Split, list[Row]], limit: int, offset: int) -> None:
    stored = StoredRows(stored_lines(kept))
    for split, rows in kept.items():
        assert (stored.count(split), stored.rows(split)) == (len(rows), rows)
        assert stored.page(split, limit=limit, offset=offset) == rows[offset : offset + limit]


def test_what_was_asked_for_last_is_remembered_within_the_limit() -> None:
    first, second, third = (StoredRows(stored_lines({"train": [row(name * 10)]})) for name in "abc")
    opened = Opened(2 * first.size_bytes)
    for key, stored in (("a", first), ("b", second)):
        opened.keep(key, stored)
    assert opened.get("a") is first
    opened.keep("c", third)
    assert [opened.get(key) for key in "abc"] == [first, None, third]
    opened.keep("large", StoredRows(stored_lines({"train": [row("x" * 1000)]})))
    assert [opened.get(key) for key in ("a", "large", "c")] == [first, None, third]
