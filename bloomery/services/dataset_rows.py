"""Rows of data sets: read from files with the number of the first broken row, written as canonical lines, and kept apart by split.

`parse` reads, `assemble` decides which rows a new version holds, `Row.line` and `read_lines` are the stored form.
"""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, cast

from blake3 import blake3

from bloomery.services.shingles import NearDuplicates
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


def read_lines(lines: Iterable[str]) -> Iterator[tuple[Split, Row]]:
    """Stored lines back to rows."""
    for line in lines:
        stored = json.loads(line)
        split = cast(Split, stored.pop("split"))
        yield split, Row(tuple(stored["messages"]), stored["label_source"], stored["source_span"])


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
