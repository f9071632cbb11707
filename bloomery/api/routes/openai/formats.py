"""What form an answer must have: `response_format` of the contract, and `structured_outputs` by the names that vLLM gave them."""

import json
import re
from typing import Annotated, Any, Final, Literal, NamedTuple

from msgspec import UNSET, Meta, UnsetType

from bloomery.api.routes.openai.closed import Closed
from bloomery.api.routes.openai.tools import Name
from bloomery.types.errors import InvalidInput
from bloomery.types.generation import Grammar
from bloomery.types.grammar import lark

_SYNTAX: Final = re.compile(r"[.^$*+?{}\[\]\\|()]")
"""Characters that mean something in a regular expression."""

Schema = dict[str, Any]
Choice = Annotated[str, Meta(min_length=1)]


class TextFormat(Closed, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObject(Closed, frozen=True, kw_only=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class NamedSchema(Closed, frozen=True, kw_only=True):
    """A schema; it is held to with and without `strict`."""

    name: Name
    schema: Schema | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchema(Closed, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that fits a schema."""

    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObject | JsonSchema


class StructuredOutputs(Closed, frozen=True, kw_only=True):
    """Exactly one of these."""

    json: Schema | str | UnsetType = UNSET
    """A JSON schema, or the text of one."""
    json_object: Literal[True] | UnsetType = UNSET
    regex: str | UnsetType = UNSET
    choice: Annotated[list[Choice], Meta(min_length=1, max_length=1000)] | UnsetType = UNSET
    grammar: str | UnsetType = UNSET
    """In Lark's notation or in GBNF."""


class AnswerFormat(NamedTuple):
    """What holds the answer to its format, the field that asked for it, and its schema where it is JSON."""

    grammar: Grammar
    field: str
    schema: Schema | None = None


def answer_format(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> AnswerFormat | None:
    """The format that a request asks for, if any."""
    if isinstance(response_format, TextFormat):
        response_format = None
    if structured is None:
        return None if response_format is None else _of_format(response_format)
    if response_format is not None:
        raise InvalidInput("`structured_outputs` and `response_format` both say what the answer is: give one of them", field="structured_outputs")
    return _of_structured(structured)


def _of_format(response_format: JsonObject | JsonSchema) -> AnswerFormat:
    if isinstance(response_format, JsonObject):
        return _json_format({"type": "object"}, "response_format")
    schema = response_format.json_schema.schema
    # An empty schema is one: any JSON fits it.
    return _json_format({"type": "object"} if schema is None else schema, "response_format.json_schema.schema")


def _of_structured(structured: StructuredOutputs) -> AnswerFormat:
    given = {name: value for name in structured.__struct_fields__ if (value := getattr(structured, name)) is not UNSET}
    if len(given) != 1:
        raise InvalidInput("`structured_outputs` takes exactly one of json, json_object, regex, choice and grammar", field="structured_outputs")
    [(name, value)] = given.items()
    field = f"structured_outputs.{name}"
    match name:
        case "json" if isinstance(value, str):
            return AnswerFormat(Grammar(kind="json_schema", text=value), field)
        case "json":
            return _json_format(value, field)
        case "json_object":
            return _json_format({"type": "object"}, field)
        case "regex":
            return AnswerFormat(Grammar(kind="regex", text=value), field)
        case "choice":
            return AnswerFormat(Grammar(kind="regex", text="|".join(_SYNTAX.sub(r"\\\g<0>", text) for text in value)), field)
        case _:
            return AnswerFormat(lark(value, field), field)


def _json_format(schema: Schema, field: str) -> AnswerFormat:
    return AnswerFormat(Grammar(kind="json_schema", text=json.dumps(schema, ensure_ascii=False)), field, schema)
