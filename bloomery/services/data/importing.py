"""A new version, from files or rows to a blob and the row that names it: all of it on one thread, and in files rather than in memory.

`prepare_files`, `prepare_rows` and `prepare_split` read, divide and assemble; `build` writes what came of it. A dry run stops in between.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from bloomery.disk.mapped import mapped_file, nameless_file
from bloomery.services.data.dataset_rows import HELD_OUT, Assembled, assemble
from bloomery.services.data.reading import Reading, Source, regrouped
from bloomery.services.data.row import Row, group_of
from bloomery.services.data.row_kinds import Broken
from bloomery.services.data.splitting import Divided, divide
from bloomery.services.data.stored_rows import Blob, Spool, write_blob
from bloomery.store.blobs import Blobs
from bloomery.types.datasets import OnError, RowKind, SplitChoice, Validation, unfilled
from bloomery.types.errors import InvalidInput, Unavailable
from bloomery.types.ids import new_id, now_us
from bloomery.types.resources import Split

Splits = Mapping[Split, Iterable[Row]]


class Ground(NamedTuple):
    """What a version is made on: the latest version of its data set, whose held-out rows stay, and the one whose training rows it takes."""

    latest: Blob | None = None
    parent: Blob | None = None
    parent_id: str | None = None

    def pinned(self) -> Splits:
        """Rows that every later version holds."""
        return {split: self.latest.stored.rows(split) for split in HELD_OUT} if self.latest else {}

    def inherited(self) -> Iterable[Row]:
        """The parent's training rows."""
        return self.parent.stored.rows("train") if self.parent else ()

    def groups(self) -> dict[str, Split]:
        """Where groups are that were held out before."""
        return {row.group or group_of(row.prompt): split for split, rows in self.pinned().items() for row in rows}


class Prepared(NamedTuple):
    """What a version would hold."""

    kind: RowKind
    assembled: Assembled
    counts: dict[str, int]
    rejected: bytes | None = None


class Built(NamedTuple):
    """The row of a version whose blobs are written, and the rows of its items."""

    row: dict[str, Any]
    items: list[tuple[str, Split, str | None, str]]


def prepare_files(
    sources: Sequence[Source],
    ground: Ground,
    *,
    kind: RowKind | None,
    choice: SplitChoice | None,
    on_error: OnError,
    stack: ExitStack,
    scratch: Path | None,
) -> Prepared:
    """Rows of files. Where any is none the whole is refused, unless it is to be skipped."""
    reading = read(sources, kind, choice, stack, scratch)
    if on_error == "refuse":
        reading.refuse_rejected()
    if not any(map(len, reading.spools.values())):
        reading.refuse_rejected()
    packed = reading.rejected.packed() if reading.rejected.count else None
    return _prepared(reading, ground, choice, stack, scratch)._replace(rejected=packed)


def read(sources: Sequence[Source], kind: RowKind | None, choice: SplitChoice | None, stack: ExitStack, scratch: Path | None) -> Reading:
    """All rows of all files, those that are none too."""
    reading = Reading(kind, choice.by if choice else None, stack, scratch)
    for source in sources:
        reading.read(source)
    return reading


def validate_file(source: Source, ground: Ground, kind: RowKind | None, choice: SplitChoice | None, scratch: Path | None) -> Validation:
    """What an import of a file would come to."""
    with ExitStack() as stack, told_when_full():
        reading = read([source], kind, choice, stack, scratch)
        accepted = sum(map(len, reading.spools.values()))
        counts = _prepared(reading, ground, choice, stack, scratch).counts if accepted else {}
        return Validation(
            format=source.format,
            kind=reading.kind,
            rows=reading.rows.total(),
            accepted=accepted,
            rejected=reading.rejected.count,
            reasons=dict(reading.reasons.most_common()),
            problems=reading.rejected.first,
            ignored=dict(reading.ignored.most_common()),
            counts=counts,
            unfilled=unfilled(choice.model_dump() if choice else {}, counts),
            labels=reading.labels.most_common(),
        )


def prepare_rows(given: Splits, ground: Ground, kind: RowKind, counts: dict[str, int], stack: ExitStack, scratch: Path | None) -> Prepared:
    """Rows that are there already."""
    assembled = assemble(ground.pinned(), ground.inherited(), given, stack, scratch)
    return Prepared(kind, assembled, counts | assembled.counts)


def prepare_split(parent: Blob, ground: Ground, kind: RowKind, choice: SplitChoice, stack: ExitStack, scratch: Path | None) -> Prepared:
    """The training rows of a version, divided anew."""
    rows = stack.enter_context(Spool(scratch))
    for number, row in enumerate(parent.stored.rows("train")):
        try:
            rows.append(regrouped(row, choice.by))
        except Broken as broken:
            advice = "stored rows have only the fields of their kind; other fields count at the upload, whose groups stay where a split names no `by`"
            raise InvalidInput(f"train, row {number}: {broken.problem.message} ({advice})", field="by") from None
    divided = _divided(rows, choice, ground, stack, scratch)
    return prepare_rows(divided.splits, ground._replace(parent=None), kind, divided.counts, stack, scratch)


def build(prepared: Prepared, ground: Ground, recipe: dict[str, Any], blobs: Blobs, scratch: Path | None) -> Built:
    """Write the blobs."""
    with nameless_file(scratch) as file:
        written = write_blob(prepared.assembled.splits, file)
        key = f"datasets/{written.content}.jsonl.zst"
        blobs.put(key, mapped_file(file))
    rejected_key = None
    if prepared.rejected is not None:
        rejected_key = f"datasets/{blake3(prepared.rejected).hexdigest()}.rejected.zst"
        blobs.put(rejected_key, prepared.rejected)
    text = json.dumps(recipe | {"parent": ground.parent_id}, sort_keys=True)
    row = {
        "id": new_id("version"),
        "kind": prepared.kind,
        "recipe": json.dumps(recipe),
        "recipe_hash": blake3(text.encode()).hexdigest(),
        "manifest": written.manifest,
        "parent": ground.parent_id,
        "counts": json.dumps(prepared.counts),
        "key": key,
        "rejected_key": rejected_key,
        "created_us": now_us(),
    }
    return Built(row, written.items)


@contextmanager
def told_when_full() -> Iterator[None]:
    """A disk without room is no fault of the rows."""
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"the rows cannot be written ({error.strerror}) and nothing was added: is the server's disk full? Free space there and ask again"
        ) from error


def made(prepare: Callable[[ExitStack], Prepared], ground: Ground, recipe: dict[str, Any], blobs: Blobs, scratch: Path | None) -> Built:
    """A version from what prepares it."""
    with ExitStack() as stack, told_when_full():
        return build(prepare(stack), ground, recipe, blobs, scratch)


def _prepared(reading: Reading, ground: Ground, choice: SplitChoice | None, stack: ExitStack, scratch: Path | None) -> Prepared:
    assert reading.kind is not None, "a row was accepted, so there is a kind"
    counts = {f"{split}.rejected": gone for split, spool in reading.spools.items() if (gone := reading.rows[split] - len(spool))}
    given: dict[Split, Iterable[Row]] = dict(reading.spools)
    if choice is not None and choice.holds_out and "train" in reading.spools:
        divided = _divided(reading.spools["train"], choice, ground, stack, scratch)
        given |= {split: chain(reading.spools.get(split, ()), rows) for split, rows in divided.splits.items() if split != "train"}
        given["train"] = divided.splits["train"]
        counts |= divided.counts
    return prepare_rows(given, ground, reading.kind, counts, stack, scratch)


def _divided(rows: Spool, choice: SplitChoice, ground: Ground, stack: ExitStack, scratch: Path | None) -> Divided:
    pinned = ground.groups()
    divided = divide(rows, choice, pinned, stack, scratch)
    if len(rows) and not len(divided.splits["train"]) and not pinned:
        groups = divided.counts["split.unlike_groups"]
        why = f"all {len(rows)} rows are of one group or nearly the same" if groups == 1 else f"all {groups} groups are held out"
        advice = "give smaller shares, or move what all prompts have in common into the system message"
        raise InvalidInput(f"the split leaves nothing to train on: {why}; {advice}", field="eval")
    return divided
