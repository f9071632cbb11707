"""Items of OpenAI's evals as rows: read, held against their schema, and put into the messages that ask for an answer.

Of a JSON schema the first level is checked, which names columns: whether those that are required are there, and of which type each is.
"""

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from pydantic import ValidationError

from bloomery.grade.declared import InputText, Message
from bloomery.grade.template import Missing, Reference, Template, parse_template
from bloomery.services.data.row import Row
from bloomery.services.data.row_files import LONGEST_ROW
from bloomery.services.evaluations.questions import GIVEN, PROBLEM
from bloomery.types.errors import InvalidInput, NotSupported, shown
from bloomery.types.evals import Given, NewRun
from bloomery.types.grading import GradeInput, Sample

TEMPLATE: Final = "data_source.input_messages.template"
REFERENCE: Final = "data_source.input_messages.item_reference"
_ROLES: Final = ("system", "developer", "user", "assistant")
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class Asking:
    """How an item becomes messages: by a template, or where it has them."""

    def __init__(self, given: NewRun) -> None:
        self._tools = given.tools
        self._template = None if given.template is None else _template(given.template)
        self._reference = None if given.item_reference is None else _reference(given.item_reference)
        self.asks = given.kind != "jsonl"
        """Whether anybody is asked."""

    @property
    def references(self) -> list[tuple[str, Reference]]:
        """What it needs of an item, each with the field that says so."""
        if self._reference is not None:
            return [(REFERENCE, self._reference)]
        return [(field, each) for field, _, template in self._template or () for each in template.references]

    def row(self, given: Given) -> Row:
        """The item as a row; one that cannot be asked says why."""
        rest: dict[str, Any] = {"item": given.item}
        if not self.asks:
            return Row((), kind="prompt", rest=rest | ({} if given.sample is None else {GIVEN: given.sample}))
        if self._tools is not None:
            rest["tools"] = self._tools
        try:
            return Row(tuple(self._messages(given.item)), kind="prompt", rest=rest)
        except Missing as missing:
            return Row((), kind="prompt", rest=rest | {PROBLEM: str(missing)})

    def _messages(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        told = GradeInput.model_construct(item=item, sample=Sample(output_text=""), messages=[], trace=None)
        if self._reference is None:
            yield from ({"role": role, "content": template.fill(told)} for _, role, template in self._template or ())
            return
        found = self._reference.find(told)
        for message in found if isinstance(found, list) else [found]:
            if not isinstance(message, dict) or message.get("role") not in _ROLES or not isinstance(message.get("content"), str):
                raise Missing(f"`{self._reference.text}` holds no messages: each has a `role` and a text as `content`")
            yield {"role": _role(message["role"]), "content": message["content"]}


def read_lines(lines: Iterable[bytes]) -> Iterator[Given]:
    """The items of a file, one on each line."""
    for number, line in enumerate(lines, start=1):
        if len(line) > LONGEST_ROW:
            raise _broken(number, f"is longer than {LONGEST_ROW >> 20} MiB")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            # As the bodies of requests are read: no NaN, and no halves of characters, which no answer could show again.
            found = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _broken(number, "is not JSON") from None
        if not isinstance(found, dict) or not isinstance(found.get("item"), dict):
            raise _broken(number, 'is no `{"item": {...}}`')
        try:
            yield Given.model_validate(found)
        except ValidationError as error:
            first = error.errors()[0]
            raise _broken(number, f"`{'.'.join(map(str, first['loc']))}`: {first['msg']}") from None


def check_item(item: Mapping[str, Any], schema: Mapping[str, Any], field: str) -> None:
    """Refuse one that lacks a column, or has something else in it."""
    required = schema.get("required")
    for name in required if isinstance(required, list) else ():
        if isinstance(name, str) and name not in item:
            raise InvalidInput(f"`{field}` has no `{shown(name)}`, which the item schema requires", field=field)
    for name, value in item.items():
        wanted = _types(schema, name)
        if wanted and not any(_is(value, each) for each in wanted):
            raise InvalidInput(f"`{field}.{shown(name)}` is no {' or '.join(wanted)}, as the item schema has it", field=f"{field}.{shown(name)}")


def check_columns(references: Iterable[tuple[str, Reference]], schema: Mapping[str, Any]) -> None:
    """Refuse references, by the fields that they stand in, to columns that the schema closes out."""
    columns = schema.get("properties")
    if not isinstance(columns, dict) or not columns or schema.get("additionalProperties") is True:
        return
    for field, reference in references:
        if reference.namespace == "item" and reference.steps[0] not in columns:
            known = ", ".join(f"`{shown(name)}`" for name in columns)
            raise InvalidInput(f"`{field}`: `{{{{ {shown(reference.text)} }}}}` is no column of the item schema, which has {known}", field=field)


def _template(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, Template]]:
    """Of each message the field, its role and its text."""
    parsed = []
    for place, given in enumerate(messages):
        field = f"{TEMPLATE}.{place}"
        try:
            message = Message.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join([field, *map(str, first["loc"])])
            raise InvalidInput(f"`{where}`: {first['msg']}", field=where) from None
        for part in message.content:
            if not isinstance(part, InputText):
                raise NotSupported(f"`{field}.content`: parts of type `{part.type}` are not offered, the models here read text alone", field=field)
        text = parse_template("".join(part.text for part in message.content if isinstance(part, InputText)), f"{field}.content")
        if any(reference.namespace == "sample" for reference in text.references):
            raise InvalidInput(f"`{field}.content`: there is no `sample` yet when the model is asked: refer to `item`", field=f"{field}.content")
        parsed.append((f"{field}.content", _role(message.role), text))
    return parsed


def _reference(text: str) -> Reference:
    """`item.input` leads to the messages of an item."""
    parts = parse_template(f"{{{{{text}}}}}", REFERENCE).parts
    reference = parts[0] if len(parts) == 1 else None
    if not isinstance(reference, Reference) or reference.namespace != "item":
        raise InvalidInput(f"`{REFERENCE}` is `{shown(text)}`: name a column of the item, as in `item.input`", field=REFERENCE)
    return reference


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def _types(schema: Mapping[str, Any], name: str) -> list[str]:
    columns = schema.get("properties")
    column = columns.get(name) if isinstance(columns, dict) else None
    told = column.get("type") if isinstance(column, dict) else None
    several = told if isinstance(told, list) else [told]
    return [each for each in several if isinstance(each, str) and each in _TYPES]


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind]) or (kind == "integer" and isinstance(value, float) and value.is_integer())


def _broken(number: int, problem: str) -> InvalidInput:
    return InvalidInput(f"line {number} of the file {problem}: give an `item`, and a `sample` if there is one", field="data_source.source.id")
