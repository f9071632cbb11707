"""Forms whose references go as deep as a text can hold are checked, compiled and followed, or refused, and end no process."""

import json
import signal
import subprocess
import sys
from itertools import islice, pairwise, product
from string import ascii_lowercase
from typing import Any

import pytest

from bloomery.types.errors import InvalidInput
from bloomery.types.generation import Grammar
from bloomery.types.grammar import MAX_GRAMMAR_CHARS, MAX_RULES, check_grammar

NAMES = [name for name in map("".join, product(ascii_lowercase, repeat=3)) if name not in ("not", "and")]
FOLLOW = """
import sys
from bloomery.infer.grammar import Grammars
from bloomery.models import tiny
from bloomery.types.generation import Grammar
from bloomery.types.grammar import check_grammar

grammar = Grammar(kind=sys.argv[1], text=sys.stdin.read())
check_grammar(grammar, "grammar")
guide = Grammars(tiny.PATH, 4096).guide(grammar, [])
for _ in range(3):
    allowed = guide.allowed_V.nonzero()[0]
    if guide.over or not len(allowed):
        break
    guide.take(int(allowed[0]))
print("followed")
"""


def lark(rules: int, *, upper: bool) -> str:
    """Each rule, or terminal, is a letter and the next."""
    names = [name.upper() if upper else name for name in islice(NAMES, rules)]
    steps = [f'{name}: "a" {following}' for name, following in pairwise(names)]
    return "\n".join([f"start: {names[0]}", *steps, f'{names[-1]}: "b"'])


def schema(wrapped: dict[str, Any], place: str) -> str:
    """As many definitions as there is room for, each of which holds a reference to the next at `place`, dots between the keys."""
    *outer, last = place.split(".")

    def holding(target: str) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(json.dumps(wrapped))
        at = made
        for key in outer:
            at = at[key]
        at[last] = {"$ref": target}
        return made

    each = len(json.dumps({"abc": holding("#/$defs/abc")}, separators=(",", ":")))
    names = NAMES[: (MAX_GRAMMAR_CHARS - 100) // each]
    definitions = {name: holding(f"#/$defs/{following}") for name, following in pairwise(names)}
    text = json.dumps({"$defs": definitions | {names[-1]: {"type": "string"}}, "$ref": f"#/$defs/{names[0]}"}, separators=(",", ":"))
    assert MAX_GRAMMAR_CHARS * 0.9 < len(text) <= MAX_GRAMMAR_CHARS
    return text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lark", lark(MAX_RULES - 2, upper=False)),
        ("lark", lark(MAX_RULES - 2, upper=True)),
        ("json_schema", schema({"type": "array"}, "items")),
        ("json_schema", schema({"type": "object", "properties": {}, "required": ["a"]}, "properties.a")),
    ],
    ids=["rules", "terminals", "items", "properties"],
)
def test_references_as_deep_as_a_text_can_hold_are_followed(kind: str, text: str) -> None:
    done = subprocess.run([sys.executable, "-c", FOLLOW, kind], input=text, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != -signal.SIGSEGV
    assert (done.returncode, done.stdout) == (0, "followed\n"), done.stderr


def test_more_rules_than_come_to_an_end_are_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=f"`guide` has {MAX_RULES + 1} colons, and at most {MAX_RULES} rules are taken") as refused:
        check_grammar(Grammar(kind="lark", text=lark(MAX_RULES, upper=False)), "guide")
    assert refused.value.field == "guide"
