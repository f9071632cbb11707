"""Files as bytes, and what a reading of them finds."""

import json
from contextlib import ExitStack
from tempfile import TemporaryFile
from typing import Any, BinaryIO, cast

from bloomery.services.data.reading import Reading, Source
from bloomery.services.data.row import Row
from bloomery.types.datasets import FileFormat, RowKind
from bloomery.types.resources import Split


def read(
    stack: ExitStack,
    content: str | bytes,
    format: FileFormat = "jsonl",
    kind: RowKind | None = None,
    *,
    split: Split = "train",
    by: str | None = None,
    **limits: int,
) -> Reading:
    """A reading of one file."""
    file = stack.enter_context(TemporaryFile())  # noqa: SIM115 - closed with the stack
    file.write(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    file.flush()
    file.seek(0)
    reading = Reading(kind, by, stack, **limits)
    reading.read(Source(split, format, cast(BinaryIO, file)))
    return reading


def rows_of(content: str | bytes, format: FileFormat = "jsonl", kind: RowKind | None = None, *, split: Split = "train") -> list[Row]:
    """All rows of a file; InvalidInput that names those that are none."""
    with ExitStack() as stack:
        reading = read(stack, content, format, kind, split=split)
        reading.refuse_rejected()
        return list(reading.spools[split])


def jsonl(*records: Any) -> str:
    """Records as lines."""
    return "\n".join(map(json.dumps, records))


def row(prompt: str, answer: str = "a", **changes: Any) -> Row:
    """A question with its answer."""
    return Row(({"content": prompt, "role": "user"}, {"content": answer, "role": "assistant"}))._replace(**changes)
