"""What a grader and its rows give away to somebody who wants its reward: texts of its source, forms it looks for, fields and words of references.

A form is a text with SLOT where anything may stand: `<answer>SLOT</answer>` of a pattern `<answer>(.*?)</answer>`.
"""

import ast
import json
import keyword
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

SLOT: Final = "\0"
CONSTANT_CHARS: Final = 120
MOST: Final = 24
"""Of each kind of finding."""
_FORM_CHARS: Final = 4096
"""Of a part of a form that is repeated: repetitions within each other make more than any memory holds."""
_PATTERN: Final = re.compile(r"\\|\[.+\]|\(.+\)|\.[*+]")
_REFERENCE_FIELDS: Final = (
    "reference",
    "references",
    "answer",
    "answers",
    "ground_truth",
    "solution",
    "target",
    "label",
    "labels",
    "expected",
    "gold",
    "correct",
)
_FUNCTION_FIELDS: Final = ("function", "function_name", "entry_point")


def sources(spec: Any) -> list[str]:
    """Programs in a grader's JSON."""
    if isinstance(spec, Mapping):
        own = [spec["source"]] if isinstance(spec.get("source"), str) else []
        return own + [found for key, below in spec.items() if key != "source" for found in sources(below)]
    return [found for below in spec for found in sources(below)] if isinstance(spec, list) else []


def constants(source: str) -> list[str]:
    """Short texts in a program, in their order; none where it is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return list(dict.fromkeys(text for text in found if 0 < len(text) <= CONSTANT_CHARS))


def declared_texts(spec: Any) -> list[str]:
    """Short texts of a grader's JSON that its templates compare with, labels among them."""
    if isinstance(spec, Mapping):
        return [
            found
            for key, below in spec.items()
            if key not in {"source", "type", "name", "operation", "calculate_output"}
            for found in declared_texts(below)
        ]
    if isinstance(spec, list):
        return [found for below in spec for found in declared_texts(below)]
    return [spec] if isinstance(spec, str) and 0 < len(spec) <= CONSTANT_CHARS and "{{" not in spec else []


def json_paths(spec: Any) -> list[list[str]]:
    """Fields of the output as JSON that templates read."""
    found = re.findall(r"sample\.output_json((?:\.\w+)+)", json.dumps(spec))
    return [path.strip(".").split(".") for path in dict.fromkeys(found)]


def forms(texts: Iterable[str]) -> list[str]:
    """A text that each regular expression among them finds, with slots."""
    found = []
    for text in texts:
        if not _PATTERN.search(text):
            continue
        try:
            # Read, and never searched with: patterns of others may take for ever.
            re.compile(text)
            form = _Reading(text).form()
        except (re.error, IndexError, OverflowError, RecursionError):
            continue
        if form:
            found.append(form)
    return list(dict.fromkeys(found))[:MOST]


class _Reading:
    """Of a regular expression: the first way through it, every part once."""

    _ESCAPED: Final[Mapping[str, str]] = {
        "d": "1",
        "w": "x",
        "s": " ",
        "S": "x",
        "D": "x",
        "W": " ",
        "b": "",
        "B": "",
        "A": "",
        "Z": "",
        "n": "\n",
        "t": "\t",
    }

    def __init__(self, pattern: str) -> None:
        self._left = pattern

    def form(self) -> str:
        """Up to the end, or to the parenthesis that closes."""
        made: list[str] = []
        while self._left and not self._left.startswith(")"):
            if self._left.startswith("|"):
                self._skip()
                break
            made.append(self._atom())
        return "".join(made)

    def _atom(self) -> str:
        first = self._take(1)
        match first:
            case "(":
                atom = self._group()
            case "[":
                atom = self._class()
            case "\\":
                escaped = self._take(1)
                atom = self._ESCAPED.get(escaped, escaped)
            case ".":
                atom = SLOT
            case "^" | "$":
                return ""
            case _:
                atom = first
        if len(atom) * (times := self._least()) > _FORM_CHARS:
            raise OverflowError("no form that anybody says")
        return atom * times

    def _group(self) -> str:
        ahead = re.match(r"\?(?:P<\w+>|[a-z]*:|[a-z]+(?=\)))", self._left)
        if ahead is None and self._left.startswith("?"):
            self._skip()
            self._take(1)
            return ""
        self._take(ahead.end() if ahead else 0)
        inside = self.form()
        self._take(1)
        return inside

    def _class(self) -> str:
        whole = re.match(r"\^?\]?(?:\\.|[^\]\\])*\]", self._left)
        text = self._take(whole.end() if whole else 1)
        if text.startswith("^"):
            return SLOT
        return "1" if "\\d" in text or "0-9" in text else SLOT if "a-z" in text.lower() or "\\w" in text or "\\S" in text else text[:1]

    def _least(self) -> int:
        times = re.match(r"[*+?]|\{(\d+)(?:,\d*)?\}", self._left)
        if times is None:
            return 1
        self._take(times.end())
        if self._left.startswith("?"):
            self._take(1)
        return min(int(times.group(1) or 1), 64)

    def _skip(self) -> None:
        depth = 0
        while self._left and not (depth == 0 and self._left.startswith(")")):
            taken = self._take(1)
            if taken == "\\":
                self._take(1)
            depth += (taken == "(") - (taken == ")")

    def _take(self, count: int) -> str:
        taken, self._left = self._left[:count], self._left[count:]
        return taken


def references(item: Mapping[str, Any]) -> list[str]:
    """What is right in a row, as texts: by the usual names of such fields, or all fields where there is none."""
    named = [item[name] for name in _REFERENCE_FIELDS if name in item]
    values = named or [value for name, value in item.items() if name != "prompt"]
    return list(dict.fromkeys(text for value in values for text in _texts(value)))


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return [", ".join(value), *value]
    return [] if value is None else [json.dumps(value, ensure_ascii=False)]


def shell(value: Any, fill: Any = "") -> Any:
    """JSON of the same keys and types with nothing in it."""
    if isinstance(value, dict):
        return {key: shell(below, fill) for key, below in value.items()}
    return fill if isinstance(value, str) else type(value)() if isinstance(value, list | int | float | bool) else None


def is_program(text: str) -> bool:
    """Whether it defines something in Python."""
    fenced = re.search(r"```\w*\n(.*?)```", text, re.DOTALL)
    try:
        tree = ast.parse(fenced.group(1) if fenced else text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body)


def tables(queries: Iterable[str]) -> list[str]:
    """Those that queries in SQL read, in their order; none of texts that are no such queries."""
    read = [query for query in queries if re.search(r"\bselect\b.+\bfrom\b", query, re.IGNORECASE | re.DOTALL)]
    named = [name for query in read for name in re.findall(r"\b(?:from|join)\s+[\"`\[]?([A-Za-z_]\w*)", query, re.IGNORECASE)]
    return list(dict.fromkeys(named))[:MOST]


def words(texts: Iterable[str], most: int = 40) -> list[str]:
    """The commonest words, commonest first."""
    return [word for word, _ in Counter(word for text in texts for word in re.findall(r"\w+", text)).most_common(most)]


def numbers(text: str) -> list[str]:
    """All that are written in digits."""
    return re.findall(r"-?\d+(?:\.\d+)?", text)


def names(prompt: str, item: Mapping[str, Any], answers: Sequence[str]) -> list[str]:
    """Functions that a row asks for. Of what is right in it no more is taken than what it defines: a word of that may be the answer."""
    called = re.findall(r"\b([A-Za-z_]\w*)\s*\(", prompt) + re.findall(r"`([A-Za-z_]\w*)`", prompt)
    defined = [name for text in answers for name in re.findall(r"^[ \t]*(?:def|class) ([A-Za-z_]\w*)", text, re.MULTILINE)]
    given = [item[field] for field in _FUNCTION_FIELDS if isinstance(item.get(field), str) and item[field].isidentifier()]
    return [name for name in dict.fromkeys(given + defined + called) if not keyword.iskeyword(name)][:MOST]
