"""Groups that stay on one side whatever comes beside them, and no row without an account."""

from collections import Counter
from contextlib import ExitStack
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.services.data.dataset_rows import assemble
from bloomery.services.data.row import Row, group_of
from bloomery.services.data.splitting import divide
from bloomery.services.data.stored_rows import Spool
from bloomery.types.datasets import SplitChoice
from bloomery.types.resources import Split
from tests.services.data.rows_of_files import jsonl, read, row

HALF = SplitChoice(eval=0.3, validation=0.2)
TEXT = "Open the file at path number {} and return a stream that reads its lines one by one, in the order in which they stand there."
VERDICTS = ("admitted", "duplicate", "held_out_exact", "held_out_near", "held_out_group")


def sides(rows: list[Row], choice: SplitChoice = HALF, pinned: dict[str, Split] | None = None) -> dict[Split, list[Row]]:
    with ExitStack() as stack:
        spool = stack.enter_context(Spool())
        for each in rows:
            spool.append(each)
        return {split: list(kept) for split, kept in divide(spool, choice, pinned or {}, stack).splits.items()}


def side_of(rows: dict[Split, list[Row]]) -> dict[str, Split]:
    return {row.prompt: split for split, kept in rows.items() for row in kept}


grouped = st.lists(
    st.builds(lambda prompt, group: row(f"{prompt} " * 9, group=group_of(group)), st.sampled_from("abcdefghijklm"), st.integers(0, 8)), max_size=24
)


@settings(max_examples=60, deadline=None)
@given(rows=grouped)
def test_groups_and_prompts_are_on_one_side_and_no_row_is_lost(rows: list[Row]) -> None:
    divided = sides(rows)
    assert Counter(each.hash for kept in divided.values() for each in kept) == Counter(each.hash for each in rows)
    for left, right in combinations(divided.values(), 2):
        assert {each.group for each in left}.isdisjoint(each.group for each in right)
        assert {each.prompt for each in left}.isdisjoint(each.prompt for each in right)


def test_the_side_of_a_group_is_the_same_whatever_comes_beside_it() -> None:
    rows = [row(f"question {number} about the number {number * 7919}") for number in range(400)]
    everything = side_of(sides(rows))
    assert side_of(sides(rows[::-1][:150])).items() <= everything.items()
    shares = Counter(everything.values())
    assert 80 < shares["eval"] < 160
    assert 50 < shares["validation"] < 110


def test_rows_that_are_nearly_the_same_stay_together() -> None:
    numbers = (" ".join(str(family * factor % 99_991) for factor in range(3, 40)) for family in range(1000, 1060))
    families = [[row(f"{text} {word}") for word in ("one", "two")] for text in numbers]
    where = side_of(sides([member for family in families for member in family]))
    assert all(where[left.prompt] == where[right.prompt] for left, right in families)
    assert len(set(where.values())) == 3


def test_a_group_that_was_held_out_stays_where_it_is() -> None:
    rows = [row(f"question {number}", group=group_of("user")) for number in range(5)]
    for split in ("eval", "validation", "train"):
        assert sides(rows, pinned={group_of("user"): split})[split] == rows


def test_a_training_row_of_a_held_out_group_is_not_admitted() -> None:
    held = row("something else entirely", group=group_of("user"))
    with ExitStack() as stack:
        assembled = assemble({"eval": [held]}, [], {"train": [row("quite another thing", group=group_of("user")), row("a stranger asks")]}, stack)
        assert list(assembled.splits["train"]) == [row("a stranger asks")]
        assert assembled.counts["train.held_out_group"] == 1


lines = st.lists(
    st.sampled_from(
        [{"text": TEXT.format(number), "label": label} for number in (1, 2, 77777) for label in "ab"] + [{"text": ""}, {"text": "short", "label": 1}]
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(train=lines, evaluation=lines, pinned=lines)
def test_every_row_of_an_import_is_in_exactly_one_stage(train: list[object], evaluation: list[object], pinned: list[object]) -> None:
    with ExitStack() as stack:
        before = assemble({}, [], {"eval": read(stack, jsonl(*pinned)).spools["train"]}, stack).splits
        readings = {"train": read(stack, jsonl(*train)), "eval": read(stack, jsonl(*evaluation))}
        assembled = assemble(before, [], {split: reading.spools["train"] for split, reading in readings.items()}, stack)
        for split, reading in readings.items():
            stages = [assembled.counts.get(f"{split}.{verdict}", 0) for verdict in VERDICTS]
            assert sum(stages) + reading.rejected.count == reading.rows["train"]
        assert assembled.counts["train.rows"] == assembled.counts.get("train.admitted", 0)
