"""The demo's data set: where its rows come from and what keeps its splits apart."""

import ast
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from bloomery.recipes.stdlib_docs import (
    LABELS,
    TEXT_CHARS,
    DocSplits,
    SeenTexts,
    build,
    module_rows,
    package_rows,
    protected,
    split_of,
)


@pytest.fixture(scope="module")
def splits() -> DocSplits:
    return build()


def test_every_label_has_rows_in_every_split(splits: DocSplits) -> None:
    for rows, least in ((splits.first, 25), (splits.traffic, 25), (splits.held_out, 15)):
        counts = Counter(row.label for row in rows)
        assert set(counts) == set(LABELS) == set(splits.labels)
        assert min(counts.values()) >= least


def test_splits_are_large_enough_and_about_40_40_20(splits: DocSplits) -> None:
    sizes = [len(rows) for rows in splits[:3]]
    shares = [size / sum(sizes) for size in sizes]
    assert sum(sizes) > 3000
    assert shares == pytest.approx([0.4, 0.4, 0.2], abs=0.05)


def test_a_name_belongs_to_the_split_its_hash_says(splits: DocSplits) -> None:
    names = [row.name for row in chain(splits.first, splits.traffic, splits.held_out)]
    assert len(names) == len(set(names))
    assert {split_of(row.name) for row in splits.first} == {"first"}
    assert {split_of(row.name) for row in splits.held_out} == {"held_out"}


def test_no_row_nearly_repeats_a_row_of_another_split(splits: DocSplits) -> None:
    seen = SeenTexts(row.text for row in splits.held_out)
    assert all(seen.add(row.text) for row in [*splits.traffic, *splits.first])


def test_texts_are_short_and_not_empty(splits: DocSplits) -> None:
    assert all(10 <= len(row.text) <= TEXT_CHARS for row in chain(splits.first, splits.traffic, splits.held_out))


def test_the_rows_do_not_depend_on_the_process(splits: DocSplits) -> None:
    program = "from bloomery.recipes.stdlib_docs import build; s = build(); print(s.first[0].name, s.held_out[-1].name, len(s.traffic))"
    environment = {"PYTHONHASHSEED": "7"}
    printed = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert printed == [splits.first[0].name, splits.held_out[-1].name, str(len(splits.traffic))]


def test_building_imports_neither_torch_nor_the_documented_modules() -> None:
    program = (
        "import sys; from bloomery.recipes.stdlib_docs import build; build(); print({'torch', 'turtle', 'xmlrpc', 'mailbox'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "set()"


@pytest.mark.slow
def test_decimal_is_documented_by_its_python_twin() -> None:
    decimal = {row.name: row for row in build().first if row.label == "decimal"}
    assert decimal
    assert all(name.startswith("_pydecimal.") for name in decimal)


def test_a_row_is_signature_then_docstring() -> None:
    source = '''
class Box(Base):
    """Holds things."""

    async def put(self, thing, *, lid=None):
        """Put a thing in."""

    def take(self): ...

    def _hidden(self):
        """Not public."""

    def __len__(self): ...
'''
    assert list(module_rows(ast.parse(source))) == [
        ("Box", "class Box(Base)\nHolds things."),
        ("Box.put", "async def Box.put(self, thing, *, lid=None)\nPut a thing in."),
        ("Box.take", "def Box.take(self)"),
    ]


def test_the_first_definition_of_a_name_counts(tmp_path: Path) -> None:
    (tmp_path / "turtle.py").write_text('try:\n    def go():\n        """Here."""\nexcept Error:\n    def go():\n        """There."""\n')
    assert [(row.name, row.text) for row in package_rows(tmp_path, "turtle")] == [("turtle.go", "def go()\nHere.")]


def test_near_duplicates_are_found_by_words_not_by_layout() -> None:
    seen = SeenTexts(["def Loop.close(self)\nClose the loop, and wait for its tasks."])
    assert not seen.add("def Loop.close(self)\n    Close the loop and wait for its  TASKS")
    assert seen.add("def Loop.start(self)\nStart the loop, and return at once.")


@pytest.mark.slow
def test_protected_rows_are_recognised_inside_longer_text(splits: DocSplits) -> None:
    guard = protected()
    for row in [*splits.held_out[:50], *splits.traffic[:50]]:
        assert guard.holds_part_of(f"Before it.\n\n    {row.text}\n\nAfter it.")
    assert not guard.holds_part_of("Train a gradient boosting classifier on dense feature matrices with early stopping.")
