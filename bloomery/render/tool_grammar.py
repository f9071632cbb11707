"""The grammar of calls, in llguidance's Lark: what a model must write so that its calls can be read and their arguments fit their schemas.

A mark that the vocabulary has a token for is that token, because a model that was taught the dialect never spells it out.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from bloomery.render.tools import Dialect, Function
from bloomery.types.errors import NotSupported
from bloomery.types.grammar import BLANKS

_TEXT: Final = "(?s:.*)"


def forced_calls(dialect: Dialect, functions: Sequence[Function], tokens: Mapping[str, int], *, parallel: bool) -> str:
    """Nothing but calls, at least one."""
    return "\n".join(["start: calls", *_calls(dialect, functions, tokens, parallel)])


def possible_calls(
    dialect: Dialect,
    functions: Sequence[Function],
    tokens: Mapping[str, int],
    *,
    parallel: bool,
    answer: Mapping[str, Any] | None,
    spoken: Collection[int] = (),
) -> str:
    """Text without a call, or calls, with or without text before them. With `answer`, a JSON schema, the text is JSON of it, and stands alone.

    `spoken` are the tokens in text that are no pieces of it, such as those around what a model thinks.
    """
    calls = _calls(dialect, functions, tokens, parallel)
    if answer is not None:
        return "\n".join(["start: answer | calls", f"answer: {_json(answer)}", *calls])
    mark = dialect.opening or dialect.begin.rstrip("\n")
    marks = sorted(set(spoken) - {tokens[name] for name in tokens if name in dialect.begin + dialect.opening})
    text = f"text: TEXT? (<[{','.join(map(str, marks))}]> TEXT?)*" if marks else "text: TEXT?"
    if dialect.bare:
        start = ["start: text | calls", r"TEXT: /[^{\s](?s:.*)/"]
    else:
        start = ["start: text calls?", f"TEXT: /(?s:.+)/ & ~/{_TEXT}{re.escape(mark).replace('/', chr(92) + '/')}{_TEXT}/"]
    return "\n".join([*start, text, *calls])


def _calls(dialect: Dialect, functions: Sequence[Function], tokens: Mapping[str, int], parallel: bool) -> list[str]:
    between = _literal(dialect.between, tokens)
    more = f"({between} call)*" if parallel else ""
    opening, closing = _literal(dialect.opening + dialect.list_start, tokens), _literal(dialect.closing, tokens)
    begin = "" if dialect.bare else dialect.begin
    rules = [f"calls: {opening} call {more} {closing}", f"call: {_literal(begin, tokens)} body {_literal(dialect.end, tokens)}"]
    rules.append("body: " + " | ".join(f"body_{number}" for number in range(len(functions))))
    for number, function in enumerate(functions):
        rules += _body(dialect, function, number, tokens)
    return rules


def _body(dialect: Dialect, function: Function, number: int, tokens: Mapping[str, int]) -> list[str]:
    arguments = f"arguments_{number}: {_json(function.parameters)}"
    match dialect.form, dialect.marks:
        case "object", _:
            before = f'{{"name": {json.dumps(function.name)}, "{dialect.arguments_key}": '
            return [f"body_{number}: {_literal(before, tokens)} arguments_{number} {_literal('}', tokens)}", arguments]
        case "named", _:
            number_behind = r" /:[0-9]{1,2}/" if dialect.name_start else ""
            name, name_end = _literal(dialect.name_start + function.name, tokens), _literal(dialect.name_end, tokens)
            return [f"body_{number}: {name}{number_behind} {name_end} arguments_{number}", arguments]
        case _, "parameters":
            parts = ("<parameter={}>\n", "\n</parameter>\n")
            return _pairs(f"<function={function.name}>\n", parts, "</function>", function, number, tokens)
        case _, "pairs":
            parts = ("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n")
            return _pairs(f"{function.name}\n", parts, "", function, number, tokens)
    raise NotSupported("`tool_choice`: calls of this model can be read and not enforced: use `auto`, without `strict`", field="tool_choice")


def _pairs(head: str, parts: tuple[str, str], tail: str, function: Function, number: int, tokens: Mapping[str, int]) -> list[str]:
    """Arguments one by one, in the order of the schema."""
    schema = function.parameters
    required, shared = schema.get("required", ()), {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules, names = [], []
    for place, (key, value) in enumerate(schema.get("properties", {}).items()):
        rule = f"argument_{number}_{place}"
        names.append(rule if key in required else f"{rule}?")
        rules.append(f"{rule}: {_literal(parts[0].format(key), tokens)} {rule}_value {_literal(parts[1], tokens)}")
        rules.append(_pair_value(rule, value, shared, parts[1]))
    return [f"body_{number}: {_literal(head, tokens)} {' '.join(names)} {_literal(tail, tokens)}", *rules]


def _pair_value(rule: str, schema: Any, shared: Mapping[str, Any], end: str) -> str:
    if not isinstance(schema, dict) or schema.get("type") != "string":
        return f"{rule}_value: {_json({**schema, **shared} if isinstance(schema, dict) else schema)}"
    if "enum" in schema or "const" in schema:
        texts = [text for text in schema.get("enum", [schema.get("const")]) if isinstance(text, str)]
        return f"{rule}_value: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    if others := sorted(set(schema) & {"pattern", "minLength", "maxLength", "format"}):
        raise NotSupported(f"`{others[0]}`: calls of this model write texts without quotes, which cannot be held to it: leave it out", field="tools")
    # A text ends where its mark does, so it cannot hold that.
    mark = re.escape(end.strip()).replace("/", r"\/")
    return f"{rule}_value: {rule.upper()}\n{rule.upper()}: /{_TEXT}/ & ~/{_TEXT}{mark}{_TEXT}/"


def _json(schema: Mapping[str, Any] | bool) -> str:
    options = {"x-guidance": {"whitespace_pattern": BLANKS, "lenient": False}}
    return "%json " + json.dumps({**schema, **options} if isinstance(schema, Mapping) else schema, ensure_ascii=False)


def _literal(text: str, tokens: Mapping[str, int]) -> str:
    """A text in Lark, the marks in it that are tokens as those."""
    if not text:
        return ""
    pattern = "|".join(sorted(map(re.escape, tokens), key=len, reverse=True)) or r"(?!)"
    pieces = re.split(f"({pattern})", text)
    return " ".join(f"<[{tokens[piece]}]>" if index % 2 else json.dumps(piece, ensure_ascii=False) for index, piece in enumerate(pieces) if piece)
