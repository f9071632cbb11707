"""Which rows a new version holds, and in which split: no prompt in two of them, nothing twice, and nobody lost without being counted."""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from bloomery.services.data.row import Row
from bloomery.services.data.shingles import NearDuplicates
from bloomery.services.data.stored_rows import Spool
from bloomery.types.resources import Split

HELD_OUT: Final[tuple[Split, ...]] = ("eval", "validation")


class Assembled(NamedTuple):
    """The rows of a version by split, and how many passed each stage."""

    splits: dict[Split, Spool]
    counts: dict[str, int]


def assemble(
    pinned: Mapping[Split, Iterable[Row]],
    inherited: Iterable[Row],
    given: Mapping[Split, Iterable[Row]],
    stack: ExitStack,
    scratch: Path | None = None,
) -> Assembled:
    """All pinned held-out rows, new held-out rows beside them, then the training rows that resemble none of those.

    A prompt belongs to the split that had it first; held-out splits choose before `train` does. The spools close with `stack`.
    """
    splits: dict[Split, Spool] = {split: stack.enter_context(Spool(scratch)) for split in (*HELD_OUT, "train")}
    counts: Counter[str] = Counter()
    held = {split: _Held() for split in HELD_OUT}
    for split in HELD_OUT:
        for row in pinned.get(split, ()):
            splits[split].append(row)
            held[split].add(row)
    for split in HELD_OUT:
        others = [held[other] for other in HELD_OUT if other != split]
        for row in _admit(split, given.get(split, ()), set(held[split].hashes), others, counts):
            splits[split].append(row)
            held[split].add(row)
    seen: set[bytes] = set()
    for rows in (inherited, given.get("train", ())):
        for row in _admit("train", rows, seen, list(held.values()), counts):
            splits["train"].append(row)
    counts.update({f"{split}.rows": len(rows) for split, rows in splits.items()})
    return Assembled(splits, dict(sorted(counts.items())))


class _Held:
    """What a held-out split has: its rows are to turn up nowhere else."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.groups: set[str] = set()
        self._prompts: set[str] = set()
        self._near = NearDuplicates()

    def add(self, row: Row) -> None:
        self.hashes.add(_digest(row))
        if row.group is not None:
            self.groups.add(row.group)
        if (prompt := row.prompt) not in self._prompts:
            self._prompts.add(prompt)
            self._near.add(prompt)

    def verdict(self, row: Row) -> str | None:
        if row.prompt in self._prompts:
            return "held_out_exact"
        if row.group in self.groups:
            return "held_out_group"
        return "held_out_near" if self._near.has(row.prompt) else None


def _admit(split: Split, rows: Iterable[Row], seen: set[bytes], others: list[_Held], counts: Counter[str]) -> Iterable[Row]:
    for row in rows:
        digest = _digest(row)
        verdict = "duplicate" if digest in seen else next((found for held in others if (found := held.verdict(row))), "admitted")
        counts[f"{split}.{verdict}"] += 1
        seen.add(digest)
        if verdict == "admitted":
            yield row


def _digest(row: Row) -> bytes:
    """Half of its hash: of a million rows, twice as much would be in memory for nothing."""
    return bytes.fromhex(row.hash[:32])
