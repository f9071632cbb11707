"""Calls are read as each family writes them, in one piece and in any pieces; what is no call stays text; and what is enforced can be read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from bloomery.infer.grammar import Grammars
from bloomery.render import tools
from bloomery.render.tool_grammar import forced_calls, possible_calls
from bloomery.render.tools import CallReader, Dialect, Function, dialect_of
from bloomery.types.errors import NotSupported
from bloomery.types.generation import Grammar
from bloomery.types.grammar import check_grammar
from tests.render.builders import byte_level, write

SUM = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"], "additionalProperties": False}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["K\u00f6ln", "12"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 5}},
}
FUNCTIONS = [Function("weather", WEATHER), Function("add-up", SUM)]
COLOGNE, TWO = {"city": "K\u00f6ln", "days": 3}, {"a": 1, "b": 2}
BAR, LOW = "\uff5c", "\u2581"
CALLS, CALL, SEP = f"<{BAR}tool{LOW}calls{LOW}begin{BAR}>", f"<{BAR}tool{LOW}call{LOW}begin{BAR}>", f"<{BAR}tool{LOW}sep{BAR}>"
CALL_END, CALLS_END = f"<{BAR}tool{LOW}call{LOW}end{BAR}>", f"<{BAR}tool{LOW}calls{LOW}end{BAR}>"
ONE, OTHER = ("weather", COLOGNE), ("add-up", TWO)
DIALECTS = {name: value for name, value in vars(tools).items() if isinstance(value, Dialect)}

WRITTEN: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("HERMES", '<tool_call>\n{"name": "weather", "arguments": {"city": "K\u00f6ln", "days": 3}}\n</tool_call>', "", [ONE]),
    (
        "HERMES",
        'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "K\u00f6ln", "days": 3}}\n</tool_call>\n'
        '<tool_call>{"name":"add-up","arguments":{"a":1,"b":2}}</tool_call>\n',
        "I look.\n",
        [ONE, OTHER],
    ),
    ("HERMES", '<tool_call>\n{"arguments": {"a": 1, "b": 2}, "name": "add-up"}\n</tool_call>', "", [OTHER]),
    ("HERMES", '<tool_call>\n{"name": "add-up", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}\n</tool_call>', "", [OTHER]),
    ("HERMES", '<tool_call>{"name": "f", "arguments": {"x": "</tool_call> \\"}{"}}</tool_call>', "", [("f", {"x": '</tool_call> "}{'})]),
    (
        "PARAMETERS",
        "<tool_call>\n<function=weather>\n<parameter=city>\nK\u00f6ln\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "",
        [ONE],
    ),
    (
        "PARAMETERS",
        "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n</function>\n</tool_call>",
        "",
        [("weather", {"city": "12"})],
    ),
    (
        "PAIRS",
        "Well.<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>K\u00f6ln</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "Well.",
        [ONE],
    ),
    ("LLAMA", '{"name": "weather", "parameters": {"city": "K\u00f6ln", "days": 3}}', "", [ONE]),
    (
        "LLAMA",
        '<|python_tag|>{"name": "add-up", "parameters": {"a": 1, "b": 2}}; {"name": "weather", "parameters": {"city": "12"}}',
        "",
        [OTHER, ("weather", {"city": "12"})],
    ),
    (
        "MISTRAL_LIST",
        '[TOOL_CALLS] [{"name": "add-up", "arguments": {"a": 1, "b": 2}}, {"name": "weather", "arguments": {"city": "K\u00f6ln", "days": 3}}]',
        "",
        [OTHER, ONE],
    ),
    (
        "MISTRAL",
        '[TOOL_CALLS]add-up[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{"city": "K\u00f6ln", "days": 3}',
        "",
        [OTHER, ONE],
    ),
    (
        "DEEPSEEK_JSON_BLOCK",
        f'{CALLS}{CALL}function{SEP}add-up\n```json\n{{"a": 1, "b": 2}}\n```{CALL_END}\n'
        f"{CALL}function{SEP}f\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        "",
        [OTHER, ("f", {})],
    ),
    ("DEEPSEEK", f'Now:{CALLS}{CALL}add-up{SEP}{{"a": 1, "b": 2}}{CALL_END}{CALL}f{SEP}{{}}{CALL_END}{CALLS_END}', "Now:", [OTHER, ("f", {})]),
    (
        "KIMI",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add-up:0<|tool_call_argument_begin|>"
        '{"a": 1, "b": 2}<|tool_call_end|><|tool_calls_section_end|>',
        "",
        [OTHER],
    ),
    ("GEMMA", '<|tool_call>call:weather{city:<|"|>K\u00f6ln<|"|>,days:3}<tool_call|>', "", [ONE]),
    ("GEMMA", '<|tool_call>call:f{x:{y:[<|"|>a "b", {c:1}<|"|>,true]}}<tool_call|>', "", [("f", {"x": {"y": ['a "b", {c:1}', True]}})]),
]


def read(dialect: Dialect, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader, text, calls = CallReader(dialect, FUNCTIONS), "", []
    for index, piece in enumerate(pieces):
        heard = reader.feed(piece, final=index == len(pieces) - 1)
        text += heard.text
        for call in heard.calls:
            if call.name is not None:
                assert call.number == len(calls)
                calls.append((call.name, ""))
            assert call.number == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    assert reader.called == bool(calls)
    return text, calls


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize(("dialect", "said", "text", "calls"), WRITTEN, ids=[f"{number} {case[0]}" for number, case in enumerate(WRITTEN)])
def test_calls_are_read_as_they_are_written_in_pieces_of_any_size(dialect: str, said: str, text: str, calls: list[tuple[str, Any]]) -> None:
    for size in (1, 2, 3, 7, len(said)):
        found, called = read(DIALECTS[dialect], cut(said, size))
        assert (found, [(name, json.loads(arguments)) for name, arguments in called]) == (text, calls), size


@pytest.mark.parametrize("properties", [None, [], {"x": True}])
def test_a_schema_without_real_properties_reads_values_as_json(properties: Any) -> None:
    reader = CallReader(DIALECTS["PAIRS"], [Function("f", {"type": "object", "properties": properties})])
    heard = reader.feed("<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>", final=True)
    assert [json.loads(call.arguments) for call in heard.calls if call.arguments] == [{"x": 1}]


def test_arguments_come_before_the_call_is_complete() -> None:
    reader = CallReader(tools.HERMES, FUNCTIONS)
    assert reader.feed('<tool_call>\n{"name": "weather", "arguments": ').calls == []
    assert [tuple(piece) for piece in reader.feed('{"ci').calls] == [(0, "weather", ""), (0, None, '{"ci')]
    assert [tuple(piece) for piece in reader.feed('ty": "K').calls] == [(0, None, 'ty": "K')]
    assert reader.feed("", final=True).calls == []


@pytest.mark.parametrize(
    ("dialect", "said"),
    [
        ("HERMES", "<tool_call>\nnot at all\n</tool_call>"),
        ("HERMES", '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>'),
        ("HERMES", '<tool_call>\n{"name": "wea'),
        ("HERMES", "a < b, <tool"),
        ("LLAMA", '{"answer": 42}'),
        ("LLAMA", 'I say {"name": "f", "parameters": {}}'),
        ("MISTRAL", "[TOOL_CALLS]nothing"),
        ("PARAMETERS", "<tool_call>\n<function>\n</tool_call>"),
        ("PAIRS", "<tool_call>two words</tool_call>"),
        ("GEMMA", "<|tool_call>call:f{{}<tool_call|>"),
    ],
)
def test_what_is_no_call_stays_text(dialect: str, said: str) -> None:
    for size in (1, 4, len(said)):
        assert read(DIALECTS[dialect], cut(said, size)) == (said, [])


@pytest.mark.parametrize(
    ("dialect", "said", "arguments"),
    [
        ("PARAMETERS", "<tool_call>\n<function=f>\n<parameter=x>\nNaN\n</parameter>\n</function>\n</tool_call>", {"x": "NaN"}),
        ("PAIRS", "<tool_call>f<arg_key>x</arg_key><arg_value>1e999</arg_value></tool_call>", {"x": "1e999"}),
        ("PAIRS", "<tool_call>f<arg_key>x</arg_key><arg_value>[-Infinity]</arg_value></tool_call>", {"x": "[-Infinity]"}),
        ("PAIRS", '<tool_call>f<arg_key>x</arg_key><arg_value>["\\ud800"]</arg_value></tool_call>', {"x": ["\ud800"]}),
        ("GEMMA", '<|tool_call>call:f{x:"\\udfff",y:1e3}<tool_call|>', {"x": "\udfff", "y": 1000.0}),
        ("GEMMA", "<|tool_call>call:f{x:NaN}<tool_call|>", None),
        ("HERMES", '<tool_call>\n{"arguments": {"x": "\\ud800"}, "name": "f"}\n</tool_call>', {"x": "\ud800"}),
        ("HERMES", '<tool_call>\n{"arguments": "{\\"x\\": \\"\\ud800\\"}", "name": "f"}\n</tool_call>', {"x": "\ud800"}),
        ("HERMES", '<tool_call>\n{"arguments": {"x": NaN}, "name": "f"}\n</tool_call>', None),
        ("HERMES", '<tool_call>\n{"arguments": {}, "name": "\\ud800"}\n</tool_call>', None),
        ("HERMES", '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>', None),
        ("HERMES", '<tool_call>\n{"arguments": {"x": "\\ud83d\\ude00"}, "name": "f"}\n</tool_call>', {"x": "\U0001f600"}),
    ],
)
def test_what_is_told_of_a_call_can_be_sent_and_read_as_json(dialect: str, said: str, arguments: dict[str, Any] | None) -> None:
    """None: it is no call, and stays text."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    for size in (1, 4, len(said)):
        text, calls = read(DIALECTS[dialect], cut(said, size))
        assert (text, len(calls)) == ((said, 0) if arguments is None else ("", 1))
        for name, written in calls:
            assert f"{name}{written}".encode()
            assert (name, json.loads(written, parse_constant=refuse)) == ("f", arguments)


def test_a_call_that_is_broken_off_has_the_arguments_so_far() -> None:
    assert read(tools.HERMES, cut('<tool_call>{"name": "f", "arguments": {"x": [1, 2', 5)) == ("", [("f", '{"x": [1, 2')])


@given(st.lists(st.text(alphabet='ab{}[]"\n <>', max_size=6), max_size=12), st.sampled_from(sorted(set(DIALECTS) - {"LLAMA"})))
def test_text_without_a_mark_comes_through_unchanged(pieces: list[str], dialect: str) -> None:
    assert read(DIALECTS[dialect], [*pieces, ""]) == ("".join(pieces), [])


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ('{{ tools }} <tool_call> "arguments"', "HERMES"),
        ("{{ tools }} <tool_call><function=f><parameter=x>", "PARAMETERS"),
        ("{{ tools }} <tool_call>f<arg_key>", "PAIRS"),
        ("{{ tools }} <|tool_call>call: <tool_call|>", "GEMMA"),
        ("{{ tools }} <|start_header_id|>", None),
        ("{{ tools }} <|start_header_id|> '\"parameters\": '", "LLAMA"),
        ("{{ tools }} [TOOL_CALLS]", "MISTRAL_LIST"),
        ("{{ tools }} [TOOL_CALLS] [ARGS]", "MISTRAL"),
        (f"{{{{ tools }}}} {CALL}", "DEEPSEEK"),
        (f"{{{{ tools }}}} {CALL} ```json", "DEEPSEEK_JSON_BLOCK"),
        ("{{ tools }} <|tool_call_begin|> <|tool_call_argument_begin|>", "KIMI"),
        ("{{ tools }} in a way of its own", None),
        ("<tool_call>", None),
        (None, None),
    ],
)
def test_the_template_tells_the_dialect(template: str | None, dialect: str | None) -> None:
    assert dialect_of(template) is (None if dialect is None else DIALECTS[dialect])


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(write(tmp_path_factory.mktemp("tools"), byte_level()), byte_level().get_vocab_size())


def wander(grammars: Grammars, text: str, random: np.random.Generator) -> str:
    """What a model without any sense writes under a grammar."""
    grammar = Grammar(kind="lark", text=text)
    check_grammar(grammar, "tools")
    guide, tokens = grammars.guide(grammar, [2]), []
    while not guide.over and len(tokens) < 1500:
        tokens.append(int(random.choice(np.flatnonzero(guide.allowed_V))))
        if tokens[-1] == 2:
            break
        guide.take(tokens[-1])
    assert guide.problem is None
    return str(byte_level().decode([token for token in tokens if token != 2], skip_special_tokens=False))


@pytest.mark.parametrize("name", sorted(set(DIALECTS) - {"GEMMA"}))
def test_what_is_enforced_is_read_again_and_fits(grammars: Grammars, name: str) -> None:
    random = np.random.default_rng(0)
    for parallel in (True, False):
        for _ in range(3):
            said = wander(grammars, forced_calls(DIALECTS[name], FUNCTIONS, {}, parallel=parallel), random)
            text, calls = read(DIALECTS[name], cut(said, 3))
            assert text == ""
            assert calls
            assert parallel or len(calls) == 1
            for called, arguments in calls:
                values = json.loads(arguments)
                if called == "weather":
                    assert values["city"] in ("K\u00f6ln", "12")
                    assert values.get("days", 1) in range(1, 6)
                else:
                    assert called == "add-up"
                    assert all(type(values[key]) is int for key in ("a", "b"))


@pytest.mark.parametrize("name", sorted(set(DIALECTS) - {"GEMMA"}))
def test_strict_calls_leave_text_free_and_hold_calls_to_it(grammars: Grammars, name: str) -> None:
    dialect = DIALECTS[name]
    strict = possible_calls(dialect, FUNCTIONS[1:], {}, parallel=True, answer=None)
    guide = grammars.guide(Grammar(kind="lark", text=strict), [2])
    for token in byte_level().encode("The quick brown fox", add_special_tokens=False).ids:
        assert guide.allowed_V[token]
        guide.take(token)
    assert guide.allowed_V[2]
    random, answer = np.random.default_rng(1), {"enum": ["yes", "no"]}
    for _ in range(4):
        text, calls = read(dialect, cut(wander(grammars, possible_calls(dialect, FUNCTIONS, {}, parallel=True, answer=answer), random), 5))
        assert bool(calls) != (text in ('"yes"', '"no"'))


def test_a_model_may_think_before_a_strict_call(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    known = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    spoken = [known["<think>"], known["</think>"], known["<tool_call>"], known["</tool_call>"]]
    grammars = Grammars(write(tmp_path, tokenizer), tokenizer.get_vocab_size())
    text = possible_calls(tools.HERMES, FUNCTIONS[1:], known, parallel=False, answer=None, spoken=spoken)
    guide = grammars.guide(Grammar(kind="lark", text=text), [2])
    said = '<think>\nHm?\n</think>\n\nI add.<tool_call>\n{"name": "add-up", "arguments": {"a":1,"b":2}}\n</tool_call>'
    for token in tokenizer.encode(said, add_special_tokens=False).ids:
        assert guide.allowed_V[token], tokenizer.id_to_token(token)
        guide.take(token)
    assert guide.over


def test_marks_that_are_tokens_are_those_tokens() -> None:
    text = forced_calls(tools.HERMES, FUNCTIONS, {"<tool_call>": 7, "</tool_call>": 8}, parallel=False)
    assert 'call: <[7]> "\\n" body "\\n" <[8]>' in text


def test_what_cannot_be_enforced_is_refused() -> None:
    with pytest.raises(NotSupported, match="read and not enforced"):
        forced_calls(tools.GEMMA, FUNCTIONS, {}, parallel=True)
    bounded = Function("f", {"type": "object", "properties": {"x": {"type": "string", "maxLength": 3}}})
    with pytest.raises(NotSupported, match="maxLength"):
        forced_calls(tools.PARAMETERS, [bounded], {}, parallel=True)


def test_what_is_garbled_is_read_alike_in_pieces_of_any_size() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        dialect, said, _, _ = WRITTEN[random.integers(len(WRITTEN))]
        for _ in range(random.integers(1, 4)):
            place = int(random.integers(len(said) + 1))
            other = WRITTEN[random.integers(len(WRITTEN))][1]
            said = str(
                random.choice(
                    [
                        said[:place] + said[place + 1 :],
                        f"{said[:place]}{random.choice(list('{}<> '))}{said[place:]}",
                        said[:place],
                        said[:place] + other + said[place:],
                    ]
                )
            )
        whole = read(DIALECTS[dialect], [said])
        assert read(DIALECTS[dialect], [*cut(said, 1), ""]) == read(DIALECTS[dialect], [*cut(said, 3), ""]) == whole, said
