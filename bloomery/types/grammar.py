"""Whether a grammar can be followed: asked at the door, where there are no tokens, and again by the engine, which has them.

All limits count work and none counts time, so that a grammar which is followed once is followed again.

llguidance follows what refers to something else by calling itself, as deep as a text can have references. An ordinary thread's stack is too small for
that, which ends the process: whoever hands it a grammar does so `on_deep_stack`.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import chain
from typing import Any, Final, TypeVar

from llguidance import LLMatcher, LLParserLimits, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from bloomery.types.errors import InvalidInput
from bloomery.types.generation import Grammar

T = TypeVar("T")

MAX_GRAMMAR_CHARS: Final = 1 << 17
MAX_RULES: Final = 4000
"""Of a Lark grammar. From some five thousand on, each of which refers to the next, llguidance does not come to an end."""
_NO_OPERATORS: Final = re.compile(r'"(?:\\.|[^"\\])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/', re.DOTALL)
"""Texts, comments and regular expressions of a Lark grammar, in which a `~` is a character."""
_COMPLEMENT: Final = re.compile(r"~(?!\s*\d)")
"""Before a number it says how often."""
_STACK_BYTES: Final = 1 << 28
"""Twice what references took that fill the longest text; memory is taken as it is touched."""
_setting_stack = threading.Lock()
BLANKS: Final = r"[ \n\t]{0,40}"
"""Between the parts of a JSON text. Without a bound a weak model may write blanks for ever."""
_DATA: Final = ("const", "default", "enum", "examples")
"""What a schema has of JSON that is no schema."""
LIMITS: Final = LLParserLimits(step_lexer_fuel=60_000, step_max_items=20_000, max_lexer_states=25_000, verbose_errors=False)
"""They count steps, not time: usually 20 ms to compile a grammar, 5 ms for a token (at worst some hundred), and 50 MB."""
_REASON_CHARS: Final = 1000
_MARK: Final = "<non-verbose/>"
"""Stands in reasons where `verbose_errors` would tell more."""


def native(grammar: Grammar, field: str = "grammar") -> str:
    """The grammar as llguidance takes it."""
    _check_length(grammar.text, field)
    match grammar.kind:
        case "json_schema":
            return _from_schema(grammar.text, field)
        case "regex":
            _check_end(grammar.text, field)
            # Digits and letters are those of ASCII, as in the patterns of JSON schemas.
            return LLMatcher.grammar_from_regex(regex_to_lark(grammar.text, "dw"))
        case "lark":
            # Every rule has a colon.
            if (colons := grammar.text.count(":")) > MAX_RULES:
                raise InvalidInput(f"`{field}` has {colons} colons, and at most {MAX_RULES} rules are taken: simplify it", field=field)
            return LLMatcher.grammar_from_lark(grammar.text)


def _from_schema(text: str, field: str) -> str:
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": BLANKS, "lenient": False})
        for pattern in _patterns(json.loads(text)):
            _check_end(pattern, field)
        return grammar
    except ValueError as error:
        raise InvalidInput(f"`{field}` is no JSON schema: {brief(str(error))}", field=field) from error


def _patterns(schema: Any) -> Iterator[str]:
    """The regular expressions of a schema and of those below it."""
    if isinstance(schema, list):
        yield from chain.from_iterable(map(_patterns, schema))
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            yield value
        elif key not in _DATA:
            yield from value if key == "patternProperties" and isinstance(value, dict) else ()
            yield from _patterns(value)


def _check_end(pattern: str, field: str) -> None:
    """llguidance leaves out a backslash with nothing behind it, and follows what is left."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise InvalidInput(
            f"`{field}` has a regular expression that ends with a backslash: put behind it what it escapes, or another one", field=field
        )


def check_grammar(grammar: Grammar, field: str) -> None:
    """Refuse what no continuation can be held to; `field` is its name as the caller knows it. Takes milliseconds, for a large grammar many."""
    text = native(grammar, field)
    wrong, reasons = on_deep_stack(lambda: LLMatcher.validate_grammar_with_warnings(text, limits=LIMITS))
    if wrong:
        raise InvalidInput(f"`{field}` cannot be followed: {brief(reasons[0])}", field=field)


def on_deep_stack(call: Callable[[], T]) -> T:
    """What `call` gives or raises, from a thread with room for every grammar that is taken."""
    given: Future[T] = Future()

    def run() -> None:
        try:
            given.set_result(call())
        except BaseException as error:
            given.set_exception(error)

    with _setting_stack:
        # It is a setting of the whole process: a thread that somebody else starts meanwhile has more room than it needs.
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    # Its work is bounded by `LIMITS` and by the length of the text.
    return given.result()


def lark(text: str, field: str) -> Grammar:
    """A grammar in Lark's notation, or in GBNF, which is turned into it."""
    _check_length(text, field)
    try:
        converted = any_to_lark(text)
    except Exception as error:
        # The converter raises bare exceptions of its own.
        raise InvalidInput(f"`{field}` is neither Lark nor GBNF: {brief(str(error))}", field=field) from error
    if _COMPLEMENT.search(_NO_OPERATORS.sub(" ", converted)):
        # No limit counts the work of finding out whether a complement leaves anything: that of fifty characters may never come to an end.
        raise InvalidInput(f"`{field}` has a complement (`~`), which is not taken: say what may come, not what may not", field=field)
    return Grammar(kind="lark", text=converted)


def _check_length(text: str, field: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidInput(f"`{field}` has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are taken: simplify it", field=field)


def brief(reason: str) -> str:
    """What llguidance says, on one line and not too long."""
    return " ".join(reason.replace(_MARK, "").split())[:_REASON_CHARS]
