"""Rows of data sets: read from files with the number of the first broken row, written as canonical lines, and kept apart by split.

`parse` reads, `assemble` decides which rows a new version holds. `stored_lines` is the stored form, `StoredRows` reads it, `Opened` remembers
what was read last.
"""

import csv
import io
import json
import re
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, cast

from blake3 import blake3

from bloomery.services.data.shingles import NearDuplicates
from bloomery.types.errors import InvalidInput
from bloomery.types.resources import LabelSource, Split

HELD_OUT: Final[tuple[Split, ...]] = ("eval", "validation")
ROLES: Final = ("system", "user", "assistant", "tool")
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")

Message = dict[str, str]


class Row(NamedTuple):
    """One example: the last message is the answer to learn."""

    messages: tuple[Message, ...]
    label_source: LabelSource = "import"
    source_span: str | None = None

    @property
    def prompt(self) -> str:
        """What was asked, without the answer: two rows with one prompt must not stand on both sides of a split."""
        return "\n".join(message["content"] for message in self.messages[:-1] if message["role"] != "system")

    @property
    def answer(self) -> str:
        """What the model learns to say."""
        return self.messages[-1]["content"]

    @property
    def hash(self) -> str:
        """Identity of the content, whatever its source."""
        return blake3(json.dumps(self.messages, sort_keys=True).encode()).hexdigest()

    def line(self, split: Split) -> str:
        """The stored form."""
        return json.dumps({"split": split, **self._asdict()}, sort_keys=True)


class Assembled(NamedTuple):
    """The rows of a version by split, and how many passed each stage."""

    splits: dict[Split, list[Row]]
    counts: dict[str, int]


def parse(kind: Literal["jsonl", "csv"], content: str, split: Split) -> list[Row]:
    """The rows of one file; the first broken one refuses the whole, by its number."""
    text = content.removeprefix("\ufeff")
    rows = [_row(record, split, number) for number, record in (_json_records(text, split) if kind == "jsonl" else _csv_records(text, split))]
    if not rows:
        raise InvalidInput(f"{split}: the file has no rows", field=f"splits.{split}")
    return rows


def stored_lines(splits: Mapping[Split, Sequence[Row]]) -> bytes:
    """The rows of a version, one line each, split by split in alphabetical order."""
    return "\n".join(row.line(split) for split in sorted(splits) for row in splits[split]).encode()


class StoredRows:
    """What `stored_lines` wrote. Lines stay lines until their rows are asked for: reading a page costs a page."""

    def __init__(self, content: bytes) -> None:
        self._lines = content.split(b"\n") if content else []
        self.size_bytes = sum(map(sys.getsizeof, self._lines))

    def rows(self, split: Split) -> list[Row]:
        """All rows of a split."""
        return self.page(split, limit=len(self._lines), offset=0)

    def page(self, split: Split, *, limit: int, offset: int) -> list[Row]:
        """At most `limit` rows of a split behind the first `offset`."""
        place = self._place(split)
        return [_stored_row(line) for line in self._lines[place.start : place.stop][offset : offset + limit]]

    def count(self, split: Split) -> int:
        """Rows of a split."""
        return len(self._place(split))

    def _place(self, split: Split) -> range:
        return range(bisect_left(self._lines, split, key=_split_of), bisect_right(self._lines, split, key=_split_of))


class Opened:
    """The stored rows that were asked for last, as many as stay within `limit_bytes` together. What is larger alone is not kept."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: dict[str, StoredRows] = {}

    def get(self, key: str) -> StoredRows | None:
        """The rows under a key, if they are still kept."""
        if (found := self._kept.pop(key, None)) is not None:
            self._kept[key] = found
        return found

    def keep(self, key: str, stored: StoredRows) -> None:
        """Remember rows, and forget those that nobody asked for the longest until all of them fit."""
        if stored.size_bytes > self._limit_bytes:
            return
        self._kept[key] = stored
        while sum(kept.size_bytes for kept in self._kept.values()) > self._limit_bytes:
            del self._kept[next(iter(self._kept))]


def _split_of(line: bytes) -> Split:
    return cast(Split, json.loads(line)["split"])


def _stored_row(line: bytes) -> Row:
    stored = json.loads(line)
    return Row(tuple(stored["messages"]), stored["label_source"], stored["source_span"])


def assemble(pinned: Mapping[Split, Sequence[Row]], inherited: Sequence[Row], given: Mapping[Split, Sequence[Row]]) -> Assembled:
    """All pinned held-out rows, new held-out rows beside them, then the training rows that resemble none of those.

    A prompt belongs to the split that had it first; held-out splits choose before `train` does.
    """
    splits: dict[Split, list[Row]] = {split: list(pinned.get(split, ())) for split in HELD_OUT}
    counts: Counter[str] = Counter()
    for split in HELD_OUT:
        rows = given.get(split, ())
        others = [row for other in HELD_OUT if other != split for row in splits[other]]
        splits[split] += _admit(split, rows, present=splits[split], others=others, counts=counts)
    held_out = [row for split in HELD_OUT for row in splits[split]]
    splits["train"] = _admit("train", [*inherited, *given.get("train", ())], present=(), others=held_out, counts=counts)
    counts.update({f"{split}.rows": len(rows) for split, rows in splits.items()})
    return Assembled(splits, dict(sorted(counts.items())))


def _admit(split: Split, rows: Iterable[Row], *, present: Sequence[Row], others: Sequence[Row], counts: Counter[str]) -> list[Row]:
    seen = {row.hash for row in present}
    prompts, near = {row.prompt for row in others}, NearDuplicates()
    for prompt in prompts:
        near.add(prompt)
    admitted = []
    for row in rows:
        verdict = _verdict(row, seen, prompts, near)
        counts[f"{split}.{verdict}"] += 1
        seen.add(row.hash)
        if verdict == "admitted":
            admitted.append(row)
    return admitted


def _verdict(row: Row, seen: set[str], held_prompts: set[str], held_near: NearDuplicates) -> str:
    if row.hash in seen:
        return "duplicate"
    if row.prompt in held_prompts:
        return "held_out_exact"
    return "held_out_near" if held_near.has(row.prompt) else "admitted"


def _json_records(text: str, split: Split) -> Iterator[tuple[int, dict[str, Any]]]:
    # splitlines() would also break at separators that JSON allows inside a text.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _broken(split, number, f"is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise _broken(split, number, "is not a JSON object")
        yield number, record


def _csv_records(text: str, split: Split) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text), strict=True)
    number = 0
    try:
        if missing := {"text", "label"} - set(reader.fieldnames or ()):
            raise InvalidInput(
                f"{split}: the first line must name the columns `text` and `label`; missing: {sorted(missing)}", field=f"splits.{split}"
            )
        for number, record in enumerate(reader, start=1):
            if None in record:
                raise _broken(split, number, f"(line {reader.line_num}) has more values than the first line has columns")
            yield number, {"text": record["text"], "label": record["label"]}
    except csv.Error as error:
        raise _broken(split, number + 1, f"is not CSV: {error}") from None


def _row(record: dict[str, Any], split: Split, number: int) -> Row:
    chat = "messages" in record
    if chat and ("text" in record or "label" in record):
        raise _broken(split, number, "has both `messages` and `text` or `label`: keep one form")
    problem = chat_problem(record["messages"]) if chat else _labelled_problem(record)
    if problem:
        raise _broken(split, number, problem)
    if chat:
        return Row(tuple({"role": message["role"], "content": message["content"]} for message in record["messages"]))
    return Row(({"role": "user", "content": record["text"]}, {"role": "assistant", "content": str(record["label"])}))


def _labelled_problem(record: dict[str, Any]) -> str | None:
    for column in ("text", "label"):
        if record.get(column) is None:
            return f"lacks `{column}`"
    label = record["label"]
    if isinstance(label, bool) or not isinstance(label, str | int):
        return "`label` must be a text or a whole number"
    return _text_problem("`text`", record["text"]) or _text_problem("`label`", str(label))


def chat_problem(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return "`messages` must be a list of messages"
    for position, message in enumerate(messages):
        if problem := _message_problem(f"message {position + 1}", message):
            return problem
    roles = [message["role"] for message in messages]
    if roles[-1] != "assistant":
        return "the last message must be the assistant's, because it is what the model learns to say"
    return None if "user" in roles else "no message is the user's"


def _message_problem(name: str, message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"{name} is not an object"
    if message.get("role") not in ROLES:
        return f"{name}: `role` must be one of {', '.join(ROLES)}"
    if unknown := set(message) - {"role", "content"}:
        return f"{name}: `{min(unknown)}` is not supported; a message has `role` and `content`"
    return _text_problem(f"{name}: `content`", message.get("content"))


def _text_problem(name: str, text: Any) -> str | None:
    if not isinstance(text, str):
        return f"{name} must be a text"
    if not text.strip():
        return f"{name} is empty"
    return f"{name} holds half a surrogate pair, which is not text" if _LONE_SURROGATE.search(text) else None


def _broken(split: Split, number: int, problem: str) -> InvalidInput:
    return InvalidInput(f"{split}, row {number}: {problem}; nothing was imported", field=f"splits.{split}")
