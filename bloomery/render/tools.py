"""Calls of tools in what a model writes: every family has a dialect of its own for them, told by the chat template that taught it.

A `Dialect` says how calls are written, a `CallReader` reads one answer as it comes: text, and calls whose arguments arrive piece by piece.
What was begun like a call and is none comes out as text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from bloomery.types import strict_json


class Function(NamedTuple):
    """A tool that may be called."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments."""
    strict: bool = False
    """Whether its arguments fit that in any case."""


class CallPiece(NamedTuple):
    """More of a call: its name at first, and then its arguments, which are JSON when all are there."""

    number: int
    name: str | None
    arguments: str


class Heard(NamedTuple):
    """What became certain: text, and pieces of calls."""

    text: str
    calls: list[CallPiece]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """How calls are written: `opening` call `between` call `closing`, and a call is `begin` body `end`.

    The body is an `object` with a name and arguments, or `named`: the name, `name_end` and the arguments; or else `written` in marks of its own.
    """

    form: Literal["object", "named", "written"]
    begin: str
    end: str
    opening: str = ""
    list_start: str = ""
    """What follows the opening where the calls are a list."""
    between: str = ""
    closing: str = ""
    arguments_key: str = "arguments"
    name_start: str = ""
    """Stands before a name, with a number behind it."""
    name_end: str = ""
    read: Callable[[str, Sequence[Function]], tuple[str, str] | None] | None = None
    """Name and arguments of a body that is `written`, or None where it is no call."""
    marks: Literal["parameters", "pairs", "braces"] | None = None
    """How arguments are `written`."""
    body_end: str = ""
    """What a `written` body is complete with although its `end` is missing; without any it is not: who calls with half of the arguments does harm."""
    bare: bool = False
    """Whether an answer that begins as an object is a call, without a mark."""
    short_ids: bool = False
    """Whether the template takes ids of nine letters and digits alone."""

    def is_unmarked(self, text: str) -> bool:
        """Whether an answer that begins so is a call without a mark before it."""
        return self.bare and text.lstrip().startswith("{")


def _written_as_parameters(body: str, functions: Sequence[Function]) -> tuple[str, str] | None:
    function = re.search(r"<function=([^>\n]+)>(.*?)(?:</function>|$)", body, re.DOTALL)
    if function is None:
        return None
    pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", function[2], re.DOTALL)
    return _from_pairs(function[1].strip(), pairs, functions)


def _written_as_pairs(body: str, functions: Sequence[Function]) -> tuple[str, str] | None:
    name = body.partition("<arg_key>")[0].strip()
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL)
    return _from_pairs(name, pairs, functions) if name and not re.search(r"\s", name) else None


def _from_pairs(name: str, pairs: Sequence[tuple[str, str]], functions: Sequence[Function]) -> tuple[str, str]:
    schema = next((function.parameters for function in functions if function.name == name), {})
    declared = schema.get("properties")
    known = declared if isinstance(declared, dict) else {}
    return name, _as_json({key.strip(): _value(text, known.get(key.strip(), {})) for key, text in pairs})


def _value(text: str, schema: Any) -> Any:
    """A value without quotes is text where the schema wants text, and else what it would be in JSON or, as some templates write, in Python."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    try:
        value = _PYTHONS[text] if text in _PYTHONS else strict_json.read(text)
    except ValueError:
        return text
    return text if "string" in kinds and _KIND_OF[type(value)] not in kinds else value


def _kinds(schema: Any) -> set[str]:
    """Types that a schema names; none where it names none."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type", ())
    kinds = {named} if isinstance(named, str) else {kind for kind in named if isinstance(kind, str)} if isinstance(named, list) else set()
    either = [each for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for each in schema[key]]
    found = kinds.union(*map(_kinds, either))
    return found | {"integer"} if "number" in found else found


def _written_in_braces(body: str, functions: Sequence[Function]) -> tuple[str, str] | None:
    call = re.fullmatch(r"\s*call:([\w.-]+)(\{.*\})\s*", body, re.DOTALL)
    if call is None:
        return None
    parts = call[2].split('<|"|>')
    # Every second part is a text; in the others keys stand without quotes.
    quoted = [json.dumps(part, ensure_ascii=False) if index % 2 else _quote_keys(part) for index, part in enumerate(parts)]
    try:
        return call[1], _as_json(strict_json.read("".join(quoted)))
    except ValueError:
        return None


def _quote_keys(part: str) -> str:
    """As JSON; the template writes what is missing as Python does."""
    quoted = re.sub(r"([{,]\s*)([A-Za-z_][\w.-]*)(\s*:)", r'\1"\2"\3', part)
    return re.sub(r"([:,\[]\s*)None(?=\s*[,}\]])", r"\1null", quoted)


def _as_json(value: Any) -> str:
    return _escaped(json.dumps(value, ensure_ascii=False))


def _escaped(text: str) -> str:
    """Halves of characters, which no UTF-8 holds, as the escapes that they were written as."""
    return _HALVES.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and _HALVES.search(value) is None


_HALVES: Final = re.compile("[\ud800-\udfff]")
_PYTHONS: Final[Mapping[str, Any]] = {"True": True, "False": False, "None": None}
_KIND_OF: Final = {bool: "boolean", type(None): "null", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_HEAD_CHARS: Final = 1024
"""Within so many the arguments of a call begin, or else they are read when all of it is there."""
_TOOL_CALL: Final[dict[str, Any]] = {"begin": "<tool_call>\n", "end": "\n</tool_call>", "between": "\n"}


def _deepseek(words: str) -> str:
    """A mark of DeepSeek's, which writes them with characters that look like others."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_CALL: Final = _deepseek("tool call begin")
_DEEPSEEK: Final[dict[str, Any]] = {"form": "named", "opening": _deepseek("tool calls begin"), "closing": _deepseek("tool calls end")}

HERMES: Final = Dialect(form="object", **_TOOL_CALL)
PARAMETERS: Final = Dialect(form="written", read=_written_as_parameters, marks="parameters", body_end="</function>", **_TOOL_CALL)
PAIRS: Final = Dialect(form="written", read=_written_as_pairs, marks="pairs", **_TOOL_CALL | {"begin": "<tool_call>"})
LLAMA: Final = Dialect(form="object", begin="<|python_tag|>", end="", between="; ", arguments_key="parameters", bare=True)
MISTRAL_LIST: Final = Dialect(form="object", opening="[TOOL_CALLS]", list_start="[", begin="", end="", between=", ", closing="]", short_ids=True)
MISTRAL: Final = Dialect(form="named", begin="[TOOL_CALLS]", name_end="[ARGS]", end="", short_ids=True)
DEEPSEEK_JSON_BLOCK: Final = Dialect(
    begin=f"{_CALL}function{_deepseek('tool sep')}",
    name_end="\n```json\n",
    end=f"\n```{_deepseek('tool call end')}",
    between="\n",
    **_DEEPSEEK,
)
DEEPSEEK: Final = Dialect(begin=_CALL, name_end=_deepseek("tool sep"), end=_deepseek("tool call end"), **_DEEPSEEK)
KIMI: Final = Dialect(
    form="named",
    opening="<|tool_calls_section_begin|>",
    begin="<|tool_call_begin|>",
    name_start="functions.",
    name_end="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    closing="<|tool_calls_section_end|>",
)
GEMMA: Final = Dialect(form="written", begin="<|tool_call>", end="<tool_call|>", read=_written_in_braces, marks="braces", body_end="}")

_TOLD_BY: Final[tuple[tuple[tuple[str, ...], Dialect], ...]] = (
    (("<function=", "<tool_call>"), PARAMETERS),
    (("<arg_key>", "<tool_call>"), PAIRS),
    (("<|tool_call>", "<tool_call|>"), GEMMA),
    (("<tool_call>",), HERMES),
    (("<|tool_call_begin|>", "<|tool_call_argument_begin|>"), KIMI),
    ((_CALL, "```json"), DEEPSEEK_JSON_BLOCK),
    ((_CALL,), DEEPSEEK),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<|start_header_id|>", '"parameters": '), LLAMA),
)
"""The first whose words are all in the template."""


def dialect_of(template: str | None) -> Dialect | None:
    """The dialect that a chat template teaches; None where it teaches none that is known."""
    text = template or ""
    if "tools" not in text:
        return None
    return next((dialect for words, dialect in _TOLD_BY if all(word in text for word in words)), None)


class CallReader:
    """Reads one answer."""

    def __init__(self, dialect: Dialect, functions: Sequence[Function]) -> None:
        self._dialect, self._functions = dialect, functions
        # With or without the line break that belongs to it: models are not strict about those.
        self._starts = [mark for mark in (dialect.begin.rstrip("\n"), dialect.opening) if mark]
        self._buffer = self._said = ""
        self._read = 0
        """Calls so far."""
        self._body: _Body | None = None
        self._text_said = self._behind_call = False
        self.cut_off = False
        """Whether the answer ended in the middle of a call's arguments."""

    @property
    def called(self) -> bool:
        """Whether anything was called."""
        return self._read > 0

    def feed(self, text: str, *, final: bool = False) -> Heard:
        """Take more of the answer; `final` with the last of it."""
        self._buffer += text
        calls: list[CallPiece] = []
        while self._step(calls, final):
            pass
        said, self._said = self._said, ""
        return Heard(said, calls)

    def _say(self, text: str) -> None:
        self._said += text
        self._text_said = self._text_said or bool(text.strip())

    def _step(self, calls: list[CallPiece], final: bool) -> bool:
        """One change of what is being read; False when more of the answer is needed for the next."""
        if self._body is None:
            return self._step_in_text(final)
        body = self._body
        body.take(self._buffer, final)
        self._buffer = ""
        if body.name is not None and not body.told:
            body.told = True
            calls.append(CallPiece(self._read, body.name, ""))
            self._read += 1
        if body.told and (piece := body.take_arguments()):
            calls.append(CallPiece(self._read - 1, None, piece))
        if body.rest is None and not final:
            return False
        self.cut_off = body.told and body.cut_off
        self._buffer = body.rest or ""
        if not body.told:
            self._say(body.raw[: len(body.raw) - len(self._buffer)])
        self._body, self._behind_call = None, body.told
        return bool(self._buffer)

    def _step_in_text(self, final: bool) -> bool:
        if self._behind_call:
            if self._skip_to_next():
                return self._waits_for_more(final)
            self._behind_call = False
        if not self._read and not self._text_said and self._dialect.is_unmarked(self._buffer):
            self._open(self._buffer.lstrip(), "")
            return True
        found = [(at, -len(mark), mark) for mark in self._starts if (at := self._buffer.find(mark)) >= 0]
        if found:
            at, _, mark = min(found)
            if self._text_said or self._buffer[:at].strip():
                self._say(self._buffer[:at])
            self._buffer = self._buffer[at:]
            return self._step_behind(mark, final)
        certain = len(self._buffer) if final else len(self._buffer) - self._held_back()
        if final or self._text_said or self._buffer[:certain].strip():
            self._say(self._buffer[:certain])
            self._buffer = self._buffer[certain:]
        return False

    def _step_behind(self, mark: str, final: bool) -> bool:
        """Begin the call whose mark is there; where that only opens calls, and something else follows, it is text."""
        if mark == self._dialect.opening and (begin := self._dialect.begin.rstrip("\n")):
            behind = self._buffer[len(mark) :].lstrip()
            if begin.startswith(behind) and behind != begin and not final:
                return False
            if not behind.startswith(begin):
                self._say(mark)
                self._buffer = self._buffer[len(mark) :]
                return True
            mark = self._buffer[: len(self._buffer) - len(behind) + len(begin)]
        self._open(self._buffer[len(mark) :], mark)
        return True

    def _open(self, rest: str, mark: str) -> None:
        self._buffer, self._body = rest, _Body(self._dialect, self._functions, mark)

    def _skip_to_next(self) -> bool:
        """Drop what stands between calls and behind the last one; whether nothing else is there."""
        dialect = self._dialect
        marks = [mark.strip() for mark in (dialect.closing, dialect.between, dialect.opening) if mark.strip()]
        while True:
            self._buffer = self._buffer.lstrip()
            mark = next((mark for mark in marks if self._buffer.startswith(mark)), None)
            if mark is None:
                break
            self._buffer = self._buffer[len(mark) :]
        if self._buffer.startswith("{") and (dialect.bare or not dialect.begin):
            self._open(self._buffer, "")
            return True
        return self._buffer == "" or any(mark.startswith(self._buffer) for mark in (*marks, *self._starts))

    def _waits_for_more(self, final: bool) -> bool:
        if final and self._body is None:
            self._buffer = ""
        return self._body is not None

    def _held_back(self) -> int:
        """Length of the longest end of the buffer that may become the beginning of a call."""
        longest = max(map(len, self._starts), default=1)
        ends = range(min(longest, len(self._buffer)), 0, -1)
        return next((size for size in ends if any(mark.startswith(self._buffer[-size:]) for mark in self._starts)), 0)


class _Body:
    """What follows the beginning of a call."""

    def __init__(self, dialect: Dialect, functions: Sequence[Function], mark: str) -> None:
        self._dialect, self._functions = dialect, functions
        self.raw = mark
        """All of it and what follows, to be shown as text where it is no call."""
        self._text = ""
        self.name: str | None = None
        self.told = False
        self.rest: str | None = None
        """What follows the call, once it is complete."""
        self._arguments = ""
        self._span: JsonSpan | None = None
        self._around = JsonSpan(depth=1)
        """Of an object with arguments, what is behind them."""
        self._whole, self._seen, self._end = JsonSpan(), 0, 0

    @property
    def cut_off(self) -> bool:
        """Whether there are arguments without their end."""
        return self._span is not None and not self._span.complete

    def take(self, text: str, final: bool) -> None:
        """Read on."""
        self.raw += text
        self._text += text
        if self._dialect.form == "written":
            self._take_written(final)
            return
        if self._span is None:
            self._begin_arguments(final)
        if self._span is not None:
            self._go_on()

    def take_arguments(self) -> str:
        """Arguments that were not taken before."""
        piece, self._arguments = self._arguments, ""
        return piece

    def _take_written(self, final: bool) -> None:
        end = self._dialect.end.strip()
        body, found, rest = self._text.partition(end)
        if not found and not final:
            return
        complete = found or (self._dialect.body_end and body.rstrip().endswith(self._dialect.body_end))
        if complete and (call := self._read(body)) is not None:
            self.name, self._arguments = call
        self.rest = rest if found else ""

    def _read(self, body: str) -> tuple[str, str] | None:
        assert self._dialect.read is not None
        try:
            return self._dialect.read(body, self._functions)
        except RecursionError:
            # Thousands of brackets are no arguments.
            return None

    def _begin_arguments(self, final: bool) -> None:
        if self._dialect.form == "named":
            self._begin_named()
            return
        key = self._dialect.arguments_key
        start = re.search(rf'^[\s\[]*\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"{key}"\s*:\s*(?=\{{)', self._text[:_HEAD_CHARS])
        if start is not None and (name := _text_of(start[1])) is not None:
            self.name, self._text, self._span = name, self._text[start.end() :], JsonSpan()
            return
        # Its parts may stand in another order: then it is read when it is there as a whole.
        first = max(self._seen, self._text.find("{"))
        end = self._whole.feed(self._text[first:]) if "{" in self._text and not self._whole.complete else None
        if end is not None:
            self._end = first + end
            self._take_whole(self._text[self._text.index("{") : self._end])
        self._seen = len(self._text)
        if self._whole.complete:
            self.rest = self._behind_end(self._text[self._end :])

    def _begin_named(self) -> None:
        name, found, rest = self._text.partition(self._dialect.name_end)
        if found and "{" in rest:
            self.name = _plain_name(name, self._dialect.name_start)
            self._text, self._span = rest[rest.index("{") :], JsonSpan()

    def _take_whole(self, text: str) -> None:
        try:
            call = strict_json.read(text)
            arguments = call.get(self._dialect.arguments_key, call.get("arguments", call.get("parameters", {})))
            written = _escaped(arguments) if isinstance(arguments, str) else _as_json(arguments)
        except (ValueError, RecursionError):
            return
        if _is_text(name := call.get("name")):
            self.name, self._arguments = name, written

    def _go_on(self) -> None:
        """Read arguments to their end, and then what closes the call."""
        assert self._span is not None
        if not self._span.complete:
            end = self._span.feed(self._text)
            self._arguments += self._text if end is None else self._text[:end]
            self._text = "" if end is None else self._text[end:]
        if self._span.complete and self._dialect.form == "object" and not self._around.complete:
            # An id, say, which is no argument.
            end = self._around.feed(self._text)
            self._text = "" if end is None else self._text[end:]
        if self._span.complete and (self._dialect.form != "object" or self._around.complete):
            self.rest = self._behind_end(self._text)

    def _behind_end(self, text: str) -> str | None:
        """What follows the mark that closes a call; None while that may still come."""
        end, text = self._dialect.end.strip(), text.lstrip()
        if text.startswith(end):
            return text[len(end) :]
        return None if end.startswith(text) else text


class JsonSpan:
    """Finds the end of a JSON object while it comes; with a `depth`, of one that was begun before."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_text = self._escaped = False
        self.complete = False

    def feed(self, text: str) -> int | None:
        """Where in this piece the object ends, if it does."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_text:
                self._escaped = character == "\\"
                self._in_text = character != '"'
            elif character == '"':
                self._in_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.complete = True
                    return place + 1
        return None


def _text_of(quoted: str) -> str | None:
    try:
        text: str = json.loads(quoted)
    except ValueError:
        return None
    return text if _is_text(text) else None


def _plain_name(name: str, start: str) -> str:
    """Without the id of the call that some models write beside it."""
    name = name.partition("[CALL_ID]")[0].strip()
    return name.removeprefix(start).rpartition(":")[0] or name.removeprefix(start) if start else name
