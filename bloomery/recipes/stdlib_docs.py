"""The demo's labelled data: which package of the standard library does this piece of documentation belong to?

`build` parses the source of the running Python (nothing is imported), makes one row of each public class, function and method, splits them by a hash
of the qualified name and drops near-duplicates. The same Python gives the same rows on every machine.
`protected` is for pretraining, whose text must hold no row that the demo measures on or receives as traffic.
"""

import ast
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import cleandoc
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from bloomery.recipes.task import share_of

LABELS = (
    "asyncio",
    "collections",
    "decimal",
    "email",
    "http",
    "importlib",
    "logging",
    "mailbox",
    "multiprocessing",
    "turtle",
    "unittest",
    "urllib",
    "xml",
    "xmlrpc",
)
# These re-export definitions that live elsewhere; the home of a row is the place people import it from.
SOURCES = {"decimal": ("_pydecimal",), "collections": ("collections", "_collections_abc")}
TEXT_CHARS = 400
# Jaccard overlap of word pairs above which two rows say the same.
DUPLICATE_OVERLAP = 0.7
# Share of a row's word pairs that, inside another text, gives the row away.
PART_SHARE = 0.5
# Every signature has these, so they say nothing about likeness.
SIGNATURE_WORDS = frozenset({"async", "class", "def", "self"})

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Example:
    """One piece of documentation; `name` identifies it and is not shown to the model."""

    name: str
    text: str
    label: str


class DocSplits(NamedTuple):
    """Disjoint rows: to train on, to arrive as traffic, to measure on."""

    first: list[Example]
    traffic: list[Example]
    held_out: list[Example]
    labels: tuple[str, ...]


def build(stdlib: Path | None = None) -> DocSplits:
    """Read the documentation of the standard library and split it 40 / 40 / 20."""
    root = stdlib or Path(sysconfig.get_path("stdlib"))
    splits: dict[str, list[Example]] = {"held_out": [], "traffic": [], "first": []}
    for row in (row for label in LABELS for row in package_rows(root, label)):
        splits[split_of(row.name)].append(row)
    # Held-out rows are kept before the others, so what they repeat disappears from training and not the other way round.
    kept = SeenTexts()
    distinct = {name: [row for row in in_hash_order(rows) if kept.add(row.text)] for name, rows in splits.items()}
    return DocSplits(distinct["first"], distinct["traffic"], distinct["held_out"], LABELS)


def protected() -> "SeenTexts":
    """The rows that pretraining must not see; ask `holds_part_of` about each text."""
    splits = build()
    return SeenTexts(row.text for row in [*splits.held_out, *splits.traffic])


def split_of(name: str) -> str:
    share = share_of(name)
    return "first" if share < 0.4 else "traffic" if share < 0.8 else "held_out"


def in_hash_order(rows: list[Example]) -> list[Example]:
    """A fixed shuffle: neighbours in the source are not neighbours in the data."""
    return sorted(rows, key=lambda row: share_of(f"order {row.name}"))


def package_rows(root: Path, label: str) -> Iterator[Example]:
    """Every public definition of one package, each at the place that defines it."""
    seen = set()
    for file in source_files(root, label):
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for name, text in module_rows(ast.parse(file.read_text(encoding="utf-8"))):
            # A name can be defined once per platform; the first definition counts.
            if (qualified := f"{module}.{name}") not in seen:
                seen.add(qualified)
                yield Example(qualified, text, label)


def source_files(root: Path, label: str) -> Iterator[Path]:
    for source in SOURCES.get(label, (label,)):
        module = root / f"{source}.py"
        files = [module] if module.exists() else sorted((root / source).rglob("*.py"))
        # Some distributions leave the tests of a package out.
        yield from (file for file in files if "test" not in file.relative_to(root).parts)


def module_rows(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Qualified name and text of each public definition that says something beyond its name."""
    for path, node in definitions(tree.body, ()):
        if is_informative(node):
            yield ".".join(path), describe(path, node)


def definitions(body: Iterable[ast.stmt], outer: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Definition]]:
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from definitions([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)], outer)
        elif isinstance(node, Definition) and is_public(node.name):
            path = (*outer, node.name)
            yield path, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, path)


def is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def is_informative(node: Definition) -> bool:
    """A dunder method without a docstring says the same in every class."""
    return bool(ast.get_docstring(node)) or not node.name.startswith("_")


def describe(path: tuple[str, ...], node: Definition) -> str:
    """Signature, then docstring, cut at a word."""
    text = f"{signature(path, node)}\n{cleandoc(ast.get_docstring(node) or '')}".strip()
    return text if len(text) <= TEXT_CHARS else text[:TEXT_CHARS].rsplit(maxsplit=1)[0]


def signature(path: tuple[str, ...], node: Definition) -> str:
    """The definition as its source has it, a method with the name of its class."""
    name = ".".join(path[-2:])
    if isinstance(node, ast.ClassDef):
        return f"class {name}({', '.join(ast.unparse(base) for base in node.bases)})".removesuffix("()")
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{keyword} {name}({ast.unparse(node.args)})"


class SeenTexts:
    """Texts seen so far, indexed by word pairs."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._sizes: list[int] = []
        self._index: dict[tuple[str, str], list[int]] = defaultdict(list)
        for text in texts:
            self._insert(word_pairs(text))

    def add(self, text: str) -> bool:
        """Remember the text unless it repeats one that is here already; True if it was new."""
        pairs = word_pairs(text)
        if self._repeats(pairs):
            return False
        self._insert(pairs)
        return True

    def holds_part_of(self, text: str) -> bool:
        """Whether the text, which may be much longer, holds half of a remembered one."""
        return any(count >= PART_SHARE * self._sizes[i] for i, count in self._common(word_pairs(text)).items())

    def _repeats(self, pairs: set[tuple[str, str]]) -> bool:
        return any(count >= DUPLICATE_OVERLAP * (len(pairs) + self._sizes[i] - count) for i, count in self._common(pairs).items())

    def _common(self, pairs: set[tuple[str, str]]) -> Counter[int]:
        return Counter(i for pair in pairs for i in self._index.get(pair, ()))

    def _insert(self, pairs: set[tuple[str, str]]) -> None:
        for pair in pairs:
            self._index[pair].append(len(self._sizes))
        self._sizes.append(len(pairs))


def word_pairs(text: str) -> set[tuple[str, str]]:
    words = [word for word in re.findall(r"[a-z]+|\d+", text.lower()) if word not in SIGNATURE_WORDS]
    return set(pairwise(words)) or {(word, "") for word in words}
