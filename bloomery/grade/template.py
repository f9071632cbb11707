"""Texts with references: `{{ item.answer }}`, `{{ sample.output_tools[0].function.name }}`.

What stands for a reference is put in once: braces in it are text. A text stands as it is, anything else as JSON. A reference that leads nowhere is
Missing, never an empty text.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from bloomery.types.errors import InvalidInput, shown
from bloomery.types.grading import GradeInput

Namespace = Literal["item", "sample"]
SAMPLE_FIELDS: Final = ("output_text", "output_json", "output_tools", "choices")
MAX_STEPS: Final = 32

_REFERENCE: Final = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_STEP: Final = re.compile(r"""\.(?P<name>[^\W\d][\w-]*)|\[(?P<index>\d{1,9})\]|\[(?P<quoted>'[^'\]]*'|"[^"\]]*")\]""")
_HEAD: Final = re.compile(r"\s*(item|sample)(?![\w-])")


class Missing(Exception):
    """A reference leads nowhere in this row; the message says how far it leads."""


class Reference(NamedTuple):
    """Where in a row: a namespace, and names and indexes below it."""

    text: str
    namespace: Namespace
    steps: tuple[str | int, ...]

    def find(self, given: GradeInput) -> Any:
        """What it leads to; Missing where that is not there."""
        found: Any = given.item if self.namespace == "item" else _sample(given)
        path: str = self.namespace
        for step in self.steps:
            found = _below(found, step, path, self.text)
            path += f".{step}" if isinstance(step, str) else f"[{step}]"
        return found


@dataclass(frozen=True, slots=True)
class Template:
    """A text that was read: parts which stand as they are, and references."""

    parts: tuple[str | Reference, ...]

    @property
    def references(self) -> tuple[Reference, ...]:
        """All of them, in their order."""
        return tuple(part for part in self.parts if isinstance(part, Reference))

    def fill(self, given: GradeInput) -> str:
        """The text for one row; Missing where a reference leads nowhere."""
        return unicode("".join(part if isinstance(part, str) else _text(part, given) for part in self.parts))


def unicode(text: str) -> str:
    """The text with a sign for each half of a character: JSON may spell such halves, and nobody can send them on."""
    return text.encode("utf-8", "replace").decode() if not text.isascii() else text


def parse_template(text: str, field: str) -> Template:
    """Read a text; what stands in double braces and is no reference is refused, naming the field."""
    parts: list[str | Reference] = []
    end = 0
    for found in _REFERENCE.finditer(text):
        parts += [text[end : found.start()], _reference(found[1], field)]
        end = found.end()
    return Template(tuple(part for part in [*parts, text[end:]] if part != ""))


def _reference(inside: str, field: str) -> Reference:
    head = _HEAD.match(inside)
    if head is None:
        raise InvalidInput(f"`{field}`: `{{{{{shown(inside)}}}}}` is no reference: begin it with `item` or `sample`", field=field)
    steps: list[str | int] = []
    place, last = head.end(), len(inside.rstrip())
    while place < last:
        step = _STEP.match(inside, place)
        if step is None or len(steps) == MAX_STEPS:
            problem = f"`{{{{{shown(inside)}}}}}` cannot be read behind `{shown(inside[:place].strip())}`"
            raise InvalidInput(f"`{field}`: {problem}: write names as `.name` or `['name']` and places as `[0]`", field=field)
        steps.append(int(step["index"]) if step["index"] is not None else step["name"] or step["quoted"][1:-1])
        place = step.end()
    namespace: Namespace = "item" if head[1] == "item" else "sample"
    if not steps or (namespace == "sample" and steps[0] not in SAMPLE_FIELDS):
        offered = " or ".join(f"`sample.{name}`" for name in SAMPLE_FIELDS) if namespace == "sample" else "`item.name`"
        raise InvalidInput(f"`{field}`: `{{{{{shown(inside)}}}}}` leads to no value: give {offered}", field=field)
    return Reference(inside.strip(), namespace, tuple(steps))


def _sample(given: GradeInput) -> dict[str, Any]:
    sample = {name: getattr(given.sample, name) for name in SAMPLE_FIELDS}
    # None says that the text is no JSON.
    return {name: value for name, value in sample.items() if value is not None}


def _below(value: Any, step: str | int, path: str, reference: str) -> Any:
    if isinstance(step, str) and isinstance(value, dict) and step in value:
        return value[step]
    if isinstance(step, int) and isinstance(value, list) and step < len(value):
        return value[step]
    what = f"`{{{{ {shown(reference)} }}}}` leads nowhere"
    if path == "sample" and step == "output_json":
        raise Missing(f"{what}: the output is not JSON")
    raise Missing(f"{what}: `{shown(path)}` {_lacks(value, step)}")


def _lacks(value: Any, step: str | int) -> str:
    if isinstance(step, int):
        return f"has {len(value)} entries" if isinstance(value, list) else "is no list"
    return f"has no `{shown(step)}`" if isinstance(value, dict) else "is no object"


def _text(reference: Reference, given: GradeInput) -> str:
    value = reference.find(given)
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise Missing(f"`{{{{ {shown(reference.text)} }}}}` leads to what is nested too deeply to be written") from None
