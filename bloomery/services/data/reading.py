"""Files of an import to rows, with an account of every one of them: it is read and in a spool, or rejected with its number and why."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import zstandard

from bloomery.services.data.row import NOTHING, Row, group_of
from bloomery.services.data.row_files import Record, Unreadable, records
from bloomery.services.data.row_kinds import Broken, Made, Problem, kind_of, row_of
from bloomery.services.data.stored_rows import Spool
from bloomery.types.datasets import MOST_PROBLEMS, FileFormat, Label, RowKind, RowProblem
from bloomery.types.errors import InvalidInput, TooLarge, shown
from bloomery.types.resources import Split

MOST_ROWS: Final = 1_000_000
MOST_BYTES: Final = 1 << 30
"""Of the rows of an import as they are stored: files are compressed, and CSV says the name of a field once."""
MOST_LABELS: Final = 50
"""That are shown; answers with more than ten times as many values are no labels."""
_LABEL_CHARS: Final = 64
_SAID_CHARS: Final = 16_384
"""Of all problems in one message."""


class Source(NamedTuple):
    """A file of rows for one split."""

    split: Split
    format: FileFormat
    file: BinaryIO


class Reading:
    """Reads the files of one import. Their rows are of one kind: the one that is wanted, or that of the first that has any."""

    def __init__(
        self, kind: RowKind | None, group_by: str | None, stack: ExitStack, scratch: Path | None = None, *, most_bytes: int = MOST_BYTES
    ) -> None:
        self.kind = kind
        self._most_bytes = most_bytes
        self._group_by = group_by
        self._stack, self._scratch = stack, scratch
        self.spools: dict[Split, Spool] = {}
        self.rows: Counter[Split] = Counter()
        self.reasons: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        self.rejected = Rejected()
        self.labels = Labels()

    def read(self, source: Source) -> None:
        """All rows of a file. InvalidInput where the file itself, or the rest of it, cannot be read."""
        spool = self._stack.enter_context(Spool(self._scratch))
        self.spools[source.split] = spool
        field = f"splits.{source.split}"
        try:
            for record in records(source.file, source.format):
                self.rows[source.split] += 1
                self._take(record, source.split, spool)
                if self.rows.total() > MOST_ROWS or sum(kept.size_bytes for kept in self.spools.values()) > self._most_bytes:
                    limits = f"{MOST_ROWS} rows and {self._most_bytes >> 20} MiB"
                    raise TooLarge(f"{source.split}: there are more than {limits} at row {record.number}: import them in parts", field=field)
        except Unreadable as broken:
            place = source.split if broken.number is None else f"{source.split}, row {broken.number}"
            advice = f": {broken.suggestion}" if broken.suggestion else ""
            raise InvalidInput(f"{place}: {broken.message}{advice}; nothing was imported", field=field) from None
        if not self.rows[source.split]:
            raise InvalidInput(f"{source.split}: the file has no rows", field=field)

    def refuse_rejected(self) -> None:
        """InvalidInput that names the rejected rows, if there are any."""
        if self.rejected.first:
            raise refusal(self.rejected.first, self.reasons.total(), field=f"splits.{self.rejected.first[0].split}")

    def _take(self, record: Record, split: Split, spool: Spool) -> None:
        try:
            made = self._made(record.value)
        except Broken as broken:
            self._reject(record.number, split, broken.problem)
            return
        for field in made.ignored:
            # A file may have as many names as rows.
            if field in self.ignored or len(self.ignored) < MOST_PROBLEMS:
                self.ignored[field] += 1
        self.labels.add(made.row)
        spool.append(made.row)

    def _made(self, value: Mapping[str, Any] | Problem) -> Made:
        if isinstance(value, Problem):
            raise Broken(*value)
        if self.kind is None:
            kind = kind_of(value)
            made = row_of(value, kind)
            self.kind = kind
        else:
            made = row_of(value, self.kind)
        if self._group_by is None:
            return made
        return Made(made.row._replace(group=group_of(_field(value, self._group_by))), set(made.ignored) - {self._group_by.partition(".")[0]})

    def _reject(self, number: int, split: Split, problem: Problem) -> None:
        self.reasons[problem.reason] += 1
        message = shown(problem.message, 1000)
        self.rejected.add(
            RowProblem(split=split, row=number, field=problem.field, reason=problem.reason, message=message, suggestion=problem.suggestion)
        )


def refusal(problems: Sequence[RowProblem], total: int, *, field: str) -> InvalidInput:
    """What says why rows are none: the first problems of so many."""
    first, *others = problems
    said = f"{_said(first)}; nothing was imported"
    if others:
        more = f" (the first {len(problems)} of {total})" if total > len(problems) else ""
        said += f". Also{more}: " + "; ".join(_grouped(others))
    return InvalidInput(shown(said, _SAID_CHARS), field=field)


class Rejected:
    """The problems of rows: the first of them for an answer, all of them packed."""

    def __init__(self) -> None:
        self.first: list[RowProblem] = []
        self.count = 0
        self._packer = zstandard.ZstdCompressor().compressobj()
        self._packed = bytearray()

    def add(self, problem: RowProblem) -> None:
        """One more."""
        self.count += 1
        if len(self.first) < MOST_PROBLEMS:
            self.first.append(problem)
        self._packed += self._packer.compress(problem.model_dump_json().encode() + b"\n")

    def packed(self) -> bytes:
        """All of them, one line each; asked for once, when there are no more."""
        return bytes(self._packed + self._packer.flush())


def unpacked(packed: bytes, *, limit: int, offset: int) -> list[RowProblem]:
    """Problems that were packed, at most `limit` behind the first `offset`."""
    with zstandard.ZstdDecompressor().stream_reader(packed) as reader:
        return [RowProblem.model_validate_json(line) for line in islice(_lines(reader), offset, offset + limit)]


def _lines(reader: Any) -> Iterator[bytes]:
    rest = b""
    while piece := reader.read(1 << 16):
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole


class Labels:
    """How often each short answer is given, as long as they are few enough to be labels."""

    def __init__(self) -> None:
        self._rows: Counter[str] | None = Counter()

    def add(self, row: Row) -> None:
        """Count a row's answer."""
        if self._rows is None:
            return
        if not (answer := row.answer) or len(answer) > _LABEL_CHARS:
            self._rows = None
            return
        self._rows[answer] += 1
        if len(self._rows) > 10 * MOST_LABELS:
            self._rows = None

    def most_common(self) -> list[Label]:
        """Nothing where answers are no labels: they are long, or hardly two are the same."""
        if self._rows is None or len(self._rows) * 2 > self._rows.total():
            return []
        return [Label(label=label, rows=rows) for label, rows in self._rows.most_common(MOST_LABELS)]


def regrouped(row: Row, group_by: str | None) -> Row:
    """A stored row in the group that one of its fields says, or in the one that it had."""
    if group_by is None:
        return row
    record = {"messages": list(row.messages), **row.rest, **row.rest.get("item", NOTHING)}
    return row._replace(group=group_of(_field(record, group_by)))


def _field(record: Mapping[str, Any], path: str) -> Any:
    found: Any = record
    # A field whose own name has dots is meant as it is.
    for name in [path] if path in record else path.split("."):
        found = found.get(name) if isinstance(found, dict | Mapping) else None
    if found is None:
        raise Broken("no_group", f"lacks `{path}`, by which the rows are split", path, "give every row the field, or split without `by`")
    return found


def _said(problem: RowProblem, *others: RowProblem) -> str:
    advice = f" ({problem.suggestion})" if problem.suggestion else ""
    rows = f"rows {_ranges([problem.row, *(each.row for each in others)])}" if others else f"row {problem.row}"
    return f"{problem.split}, {rows}: {problem.message}{advice}"


def _grouped(problems: Sequence[RowProblem]) -> Iterator[str]:
    """What is wrong with many rows alike is said once, in the place of the first."""
    alike: dict[tuple[str, str, str | None], list[RowProblem]] = {}
    for problem in problems:
        alike.setdefault((problem.split, problem.message, problem.suggestion), []).append(problem)
    return (_said(*group) for group in alike.values())


def _ranges(numbers: Sequence[int]) -> str:
    """Growing numbers, as people write them: 2 to 5, 9."""
    # Neighbours are as far from their numbers as from their places.
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda each: each[1] - each[0])]
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
