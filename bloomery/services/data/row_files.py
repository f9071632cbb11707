"""Files to records, one at a time: JSON lines, CSV and Parquet as people upload them, with the number of every row that is none.

Nothing here holds more of a file than a row of it. What makes the rest of a file unreadable is `Unreadable`, and no row's fault.
"""

import contextlib
import csv
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, NamedTuple

from bloomery.services.data.row_kinds import Problem
from bloomery.types import strict_json
from bloomery.types.datasets import FileFormat
from bloomery.types.errors import shown

PARQUET_WORKER: Final = Path(__file__).with_name("parquet_worker.py")
LONGEST_ROW: Final = 8 << 20
"""Bytes of a row in its file."""
_BOMS: Final = ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))
_MAGIC: Final = ((b"PAR1", "Parquet"), (b"PK\x03\x04", "a zip archive, as Excel writes it"), (b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
_TEXT_COLUMNS: Final = frozenset({"prompt", "completion", "chosen", "rejected"})
_JSON_COLUMNS: Final = _TEXT_COLUMNS | {"messages", "tools", "input", "preferred_output", "non_preferred_output"}
"""Of CSV: cells that may be JSON; those of `_TEXT_COLUMNS` may be texts as well, and of the others an empty cell is no value."""
_COLUMNS: Final = ({"messages"}, {"chosen", "rejected"}, {"input", "preferred_output", "non_preferred_output"}, {"completion"}, {"prompt"})
_SAYS_NO_FORM: Final = (
    "the first line must name the columns of a form of rows (`text` and `label`; `messages`; `prompt` and `completion`; `chosen` and `rejected`)"
)
_SHOWN_COLUMNS: Final = 20


class Record(NamedTuple):
    """What stands in a row: an object, or why there is none."""

    number: int
    value: dict[str, Any] | Problem


class Unreadable(Exception):
    """The file, or the rest of it, cannot be read; `number` is the row where it is, if it is at one."""

    def __init__(self, message: str, suggestion: str | None = None, number: int | None = None) -> None:
        super().__init__(message)
        self.message, self.suggestion, self.number = message, suggestion, number


def records(file: BinaryIO, format: FileFormat) -> Iterator[Record]:
    """All rows of a file, which stands at its beginning."""
    head = file.read(4)
    file.seek(0)
    if format == "parquet":
        if head != b"PAR1":
            raise Unreadable("the file is not Parquet", "give the format `jsonl` or `csv` if it is one of these")
        return _parquet(file)
    for magic, name in _MAGIC:
        if head.startswith(magic):
            raise Unreadable(f"the file is {name}, not {format}", "give the format `parquet`" if name == "Parquet" else "unpack or export it first")
    for mark, encoding in _BOMS:
        if head.startswith(mark):
            raise Unreadable(f"the file is {encoding}", "save it as UTF-8")
    return _json_lines(file) if format == "jsonl" else _csv(file)


def _json_lines(file: BinaryIO) -> Iterator[Record]:
    for number, line in _lines(file):
        if isinstance(line, Problem):
            yield Record(number, line)
        elif line.strip():
            yield Record(number, _json_record(line, number))


def _json_record(line: bytes, number: int) -> dict[str, Any] | Problem:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    try:
        value = strict_json.read(text)
    except strict_json.NotFinite as error:
        return Problem("not_finite", f"holds {error}, which is no JSON number", None, "write null, or leave the field out")
    except (ValueError, RecursionError) as error:
        return Problem("not_json", f"is not JSON: {error}", None, _json_suggestion(text, number))
    return value if isinstance(value, dict) else Problem("not_an_object", "is not a JSON object", None, _json_suggestion(text, number))


def _json_suggestion(text: str, number: int) -> str | None:
    plain = text.strip()
    if number == 1 and plain.startswith("["):
        return "this looks like one JSON array: write each of its objects on a line of its own, without commas between"
    if number == 1 and plain[:1] not in ("{", '"') and "," in plain:
        return "if this is CSV, give the format `csv`"
    if plain in ("{", "}", "},", "[", "]"):
        return "write each object on one line"
    if plain.endswith("},"):
        return "leave out the comma behind the object"
    if ",}" in plain.replace(" ", "") or ",]" in plain.replace(" ", ""):
        return "leave out the comma before the closing bracket"
    return 'write texts in double quotes: {"text": "..."}' if plain.startswith("{'") else None


def _not_utf8(error: UnicodeDecodeError) -> Problem:
    byte = error.object[error.start]
    return Problem(
        "encoding", f"is not UTF-8 at byte {error.start + 1} of the row (0x{byte:02x})", None, "save the file as UTF-8; it may be Windows-1252"
    )


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes | Problem]]:
    """Without their ends; splitting at other separators would break rows that have them in a text."""
    number = 0
    while line := file.readline(LONGEST_ROW + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if len(line) > LONGEST_ROW and not line.endswith(b"\n"):
            while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            yield number, Problem("too_long", f"is longer than {LONGEST_ROW >> 20} MiB", None, "shorten it, or cut it into several rows")
        else:
            yield number, line.removesuffix(b"\n")


def _csv(file: BinaryIO) -> Iterator[Record]:
    # The default would refuse fields of 128 KiB; the module has one limit for the whole process, and nobody else reads CSV.
    csv.field_size_limit(LONGEST_ROW)
    reader = csv.DictReader(_texts(file), strict=True)
    number = 0
    try:
        names = set(reader.fieldnames or ())
        if not ({"text", "label"} <= names or any(columns <= names for columns in _COLUMNS)):
            raise Unreadable(f"{_SAYS_NO_FORM}, and names {_quoted(reader.fieldnames or ())}", _csv_form(reader.fieldnames or ()))
        for number, record in enumerate(reader, start=1):
            yield Record(number, _csv_record(record, reader.line_num))
    except csv.Error as error:
        raise Unreadable(f"is not CSV: {error}; nothing behind it can be read", _csv_suggestion(str(error)), number + 1) from None


def _quoted(names: Sequence[str]) -> str:
    first = ", ".join(f"`{shown(name)}`" for name in names[:_SHOWN_COLUMNS])
    return (f"{first}, ..." if len(names) > _SHOWN_COLUMNS else first) or "none"


def _csv_form(names: Sequence[str]) -> str | None:
    if names and names[0].lstrip().startswith("{"):
        return "this looks like JSON: give the format `jsonl`"
    (only,) = names if len(names) == 1 else ("",)
    marks = {";": "`;`", "\t": "tabs", "|": "`|`"}
    return next((f"separate columns by commas, not by {said}" for mark, said in marks.items() if mark in only), None)


def _csv_suggestion(error: str) -> str | None:
    return "a quote may be missing at the end of a cell" if "limit" in error or "end of data" in error else None


def _texts(file: BinaryIO) -> Iterator[str]:
    for number, line in _lines(file):
        if isinstance(line, Problem):
            raise Unreadable(f"line {number} {line.message}", line.suggestion)
        # Half pairs stand for bytes that are no UTF-8, and are found with the row.
        yield line.decode(errors="surrogateescape") + "\n"


def _csv_record(record: Mapping[str | None, Any], line: int) -> dict[str, Any] | Problem:
    if None in record:
        return Problem("too_many_values", f"(line {line}) has more values than the first line has columns", None, "put cells with commas into quotes")
    found: dict[str, Any] = {}
    for name, cell in record.items():
        if name is None or cell is None:
            continue
        try:
            cell.encode()
        except UnicodeEncodeError:
            return Problem("encoding", f"`{name}` is not UTF-8", name, "save the file as UTF-8; it may be Windows-1252")
        if not cell and (name == "weight" or name in _JSON_COLUMNS - _TEXT_COLUMNS):
            continue
        if name == "weight":
            found[name] = _number_or_text(cell)
            continue
        if name in _JSON_COLUMNS and cell[:1] in ("[", "{"):
            read = _json_cell(cell)
            if isinstance(read, Problem) and name not in _TEXT_COLUMNS:
                return read._replace(field=name, message=f"`{name}` {read.message}")
            # A text may begin with a bracket, too: messages are a list of objects.
            is_text = isinstance(read, Problem) or (name in _TEXT_COLUMNS and not all(isinstance(each, dict) for each in read))
            cell = cell if is_text else read
        found[name] = cell
    return found


def _number_or_text(cell: str) -> float | str:
    read = _json_cell(cell)
    return read if isinstance(read, int | float) and not isinstance(read, bool) else cell


def _json_cell(cell: str) -> Any:
    wrapped = _json_record(b'{"cell": ' + cell.encode() + b"}", 0)
    return wrapped if isinstance(wrapped, Problem) else wrapped["cell"]


def _parquet(file: BinaryIO) -> Iterator[Record]:
    """In a process of its own, by its path and isolated: it needs nothing of ours, and a file that breaks it breaks nothing else."""
    command = [sys.executable, "-I", str(PARQUET_WORKER)]
    # What is read through a buffer may stand elsewhere than the file does.
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(
            subprocess.Popen(command, stdin=file.fileno(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        )
        stack.callback(child.kill)
        assert child.stdout is not None
        number = 0
        for _, line in _lines(child.stdout):
            number += 1
            yield _parquet_record(line, number)
        if status := child.wait():
            raise Unreadable(
                f"the process that reads it ended with status {status}: it may be damaged, or need more memory than is given", None, number + 1
            )


def _parquet_record(line: bytes | Problem, number: int) -> Record:
    if isinstance(line, Problem):
        return Record(number, line)
    read = _json_record(line, 0)
    if isinstance(read, Problem):
        return Record(number, read)
    if "fatal" in read:
        raise Unreadable(read["fatal"], None, number if number > 1 else None)
    return Record(number, read["row"] if "row" in read else Problem("not_json", read["error"]))
