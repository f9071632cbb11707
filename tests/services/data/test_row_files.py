"""Files as people have them, as they pretend to be, and as they attack: what is read, what is told, and how much memory it takes."""

import io
import json
import resource
from contextlib import ExitStack
from datetime import date
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from bloomery.services.data.reading import Rejected, unpacked
from bloomery.services.data.row_files import LONGEST_ROW
from bloomery.types.datasets import MOST_PROBLEMS, FileFormat
from bloomery.types.errors import InvalidInput, TooLarge
from tests.services.data.rows_of_files import jsonl, read, row, rows_of


def parquet(**columns: Any) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file, compression="zstd")
    return file.getvalue()


def refusal(content: bytes, format: FileFormat) -> str:
    with pytest.raises(InvalidInput) as refused:
        rows_of(content, format)
    assert refused.value.field == "splits.train"
    return refused.value.message


def test_parquet_gives_the_rows_that_jsonl_gives() -> None:
    messages = [[{"role": "user", "content": "q", "name": None}, {"role": "assistant", "content": "a", "name": None}]]
    assert rows_of(parquet(messages=messages, day=[date(2026, 1, 2)]), "parquet") == [row("q")]
    prompts = rows_of(parquet(prompt=["2+2?"], answer=[4], day=[date(2026, 1, 2)], raw=[b"\xff"]), "parquet")
    assert prompts == rows_of(jsonl({"prompt": "2+2?", "answer": 4, "day": "2026-01-02", "raw": "/w=="}))


def test_csv_has_every_form_and_lists_in_cells() -> None:
    content = 'messages\n"[{""role"": ""user"", ""content"": ""q""}, {""role"": ""assistant"", ""content"": ""a""}]"\n'
    assert rows_of(content, "csv") == [row("q")]
    assert rows_of("prompt,completion\n[x,{y\n", "csv") == rows_of(jsonl({"prompt": "[x", "completion": "{y"}))
    assert rows_of('prompt,completion\n"[1, 2]",3\n', "csv") == rows_of(jsonl({"prompt": "[1, 2]", "completion": "3"}))
    assert "`messages` is not JSON" in refusal(b'messages\n"[{"\n', "csv")
    assert rows_of("prompt,chosen,rejected\na,b,c\n", "csv") == rows_of(jsonl({"prompt": "a", "chosen": "b", "rejected": "c"}))


def test_weights_of_csv_are_numbers_and_empty_cells_no_values() -> None:
    def weighted(*weights: float | None) -> str:
        return jsonl(*({"text": "q", "label": "a"} | ({} if weight is None else {"weight": weight}) for weight in weights))

    assert rows_of("text,label,weight\nq,a,0.5\nq,a, 2\nq,a,\nq,a,1\n", "csv") == rows_of(weighted(0.5, 2, None, 1))
    for cell in ("heavy", "true", "NaN", "-1"):
        assert "`weight` of a row must be a number above 0" in refusal(f"text,label,weight\nq,a,{cell}\n".encode(), "csv")
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    cell = json.dumps(asked).replace('"', '""')
    assert rows_of(f'messages,tools\n"{cell}",\n', "csv") == rows_of(jsonl({"messages": asked}))
    assert "lacks `text`" in refusal(b"messages,tools\n,[]\n", "csv")


@pytest.mark.parametrize(
    ("content", "format", "said"),
    [
        (parquet(text=["a"], label=["b"]), "jsonl", "the file is Parquet, not jsonl: give the format `parquet`"),
        (b'{"text": "a", "label": "b"}', "parquet", "the file is not Parquet: give the format `jsonl`"),
        (b"PK\x03\x04rest", "csv", "the file is a zip archive, as Excel writes it, not csv"),
        (b"\x1f\x8brest", "jsonl", "the file is gzip"),
        ("text,label\na,b\n".encode("utf-16"), "csv", "the file is UTF-16: save it as UTF-8"),
        (b"text;label\na;b\n", "csv", "separate columns by commas, not by `;`"),
        (b"text\tlabel\na\tb\n", "csv", "separate columns by commas, not by tabs"),
        (b"question,answer\na,b\n", "csv", "`chosen` and `rejected`), and names `question`, `answer`; nothing was imported"),
        (b'{"text": "a", "label": "b"}\n', "csv", "this looks like JSON: give the format `jsonl`"),
        (b'text,label\n"a,b\n', "csv", "row 1: is not CSV"),
        (parquet(text=["a"] * 99, label=["b"] * 99)[:-9], "parquet", "is not Parquet, or is damaged"),
        (b"PAR1" + b"\0" * 100 + b"PAR1", "parquet", "is not Parquet, or is damaged"),
        (b"", "jsonl", "the file has no rows"),
        (b"", "parquet", "the file is not Parquet"),
    ],
)
def test_a_file_that_is_not_what_it_is_said_to_be_is_told_what_it_is(content: bytes, format: FileFormat, said: str) -> None:
    assert said in refusal(content, format)


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        (b'{"text": "a", "label": "b",}', "leave out the comma before the closing bracket"),
        (b'{"text": "a", "label": "b"},', "leave out the comma behind the object"),
        (b"[", "one JSON array"),
        (b"text,label", "if this is CSV, give the format `csv`"),
        (b"{", "each object on one line"),
        (b"{'text': 'a'}", "double quotes"),
        (b'{"text": "caf\xe9", "label": "b"}', "save the file as UTF-8"),
    ],
)
def test_usual_slips_are_told_what_mends_them(line: bytes, suggestion: str) -> None:
    with ExitStack() as stack:
        (found,) = read(stack, line + b'\n{"text": "a", "label": "b"}').rejected.first
    assert found.row == 1
    assert suggestion in (found.suggestion or "")


def test_what_is_wrong_with_many_rows_is_said_once() -> None:
    with ExitStack() as stack:
        lines = [{"text": "a"}, {"text": "b"}, {"text": "c"}, {"text": 1, "label": "x"}, {"text": "d"}]
        with pytest.raises(InvalidInput) as refused:
            read(stack, jsonl(*lines, {"text": "q", "label": "a"})).refuse_rejected()
    assert refused.value.message.count("lacks `label`") == 2
    assert "Also: train, rows 2 to 3, 5: lacks `label`" in refused.value.message


def test_a_mark_of_byte_order_is_no_part_of_a_row() -> None:
    assert rows_of(b'\xef\xbb\xbf{"text": "q", "label": "a"}') == rows_of(b"\xef\xbb\xbftext,label\nq,a\n", "csv") == [row("q")]


def test_a_row_without_end_is_one_problem_and_the_next_is_read() -> None:
    huge = b'{"text": "' + b"x" * (2 * LONGEST_ROW) + b'", "label": "b"}'
    with ExitStack() as stack:
        reading = read(stack, huge + b'\n{"text": "q", "label": "a"}\n')
        assert [(found.row, found.reason) for found in reading.rejected.first] == [(1, "too_long")]
        assert list(reading.spools["train"]) == [row("q")]
    assert "longer than 8 MiB" in refusal(b"text,label\n" + b"x" * (2 * LONGEST_ROW) + b",b\n", "csv")


@pytest.mark.slow
def test_a_parquet_file_that_unpacks_to_terabytes_is_cut_off_where_it_is_too_much() -> None:
    """A kilobyte of file: one value of 1 MiB, a hundred thousand times."""
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 100_000, pyarrow.int32()), pyarrow.array(["y" * (1 << 20)]))
    bomb = parquet(text=texts, label=["a"] * 100_000)
    assert len(bomb) < 4096
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ExitStack() as stack, pytest.raises(TooLarge, match="more than 1000000 rows and 16 MiB"):
        read(stack, bomb, "parquet", most_bytes=16 << 20)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 256 << 10
    assert "is longer than 8 MiB" in refusal(parquet(text=["y" * (20 << 20)], label=["a"]), "parquet")


def test_all_problems_are_kept_and_a_bounded_number_is_named() -> None:
    with ExitStack() as stack:
        reading = read(stack, jsonl(*({"text": number, "label": "x"} for number in range(250)), {"text": "q", "label": "a"}))
        with pytest.raises(InvalidInput) as refused:
            reading.refuse_rejected()
        packed = reading.rejected.packed()
    assert (
        "train, row 1: `text` must be a text; nothing was imported. Also (the first 100 of 250): train, rows 2 to 100: `text` must be a text"
        in refused.value.message
    )
    assert "101" not in refused.value.message
    assert len(reading.rejected.first) == MOST_PROBLEMS
    assert [problem.row for problem in unpacked(packed, limit=3, offset=120)] == [121, 122, 123]
    assert len(unpacked(packed, limit=1000, offset=0)) == 250
    assert unpacked(Rejected().packed(), limit=1, offset=0) == []
